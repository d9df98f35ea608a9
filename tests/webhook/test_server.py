"""The real webhook process over TLS: what it answers, what it refuses, and that nothing makes it lose a review."""

import base64
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.webhook_process import IMAGE, WebhookProcess, review_of, training_pod
from tests.servers.loopback import needs_ipv6

_MIB = 1024 * 1024


@pytest.fixture
def webhook(tmp_path: Path) -> Iterator[WebhookProcess]:
    with WebhookProcess(tmp_path, "--lame-duck-seconds=1") as process:
        yield process


def ask(connection: http.client.HTTPConnection, review: object) -> dict[str, Any]:
    connection.request("POST", "/mutate", json.dumps(review), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    response: dict[str, Any] = json.loads(body)["response"]
    return response


def send(
    connection: http.client.HTTPConnection, body: bytes, content_type: str = "application/json"
) -> tuple[int, str]:
    connection.request("POST", "/mutate", body, {"Content-Type": content_type})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_an_opted_in_pod_gets_agent_and_restore(webhook: WebhookProcess) -> None:
    pod = training_pod()
    response = ask(webhook.connect(), review_of(pod, uid="a-uid"))
    assert response["uid"] == "a-uid"
    assert response["allowed"]
    changed = jsonpatch.apply_patch(pod, base64.b64decode(response["patch"]).decode())
    injected = {one["name"]: one["image"] for one in changed["spec"]["initContainers"]}
    assert injected == {"keepstep-restore": IMAGE, "keepstep-agent": IMAGE}


def test_a_pod_that_asks_for_what_cannot_be_is_refused_with_the_reason(webhook: WebhookProcess) -> None:
    response = ask(webhook.connect(), review_of(training_pod(destinaton="s3://bucket")))
    assert not response["allowed"]
    assert "did you mean keepstep.dev/destination?" in response["status"]["message"]


def test_under_ignore_it_runs_without_and_its_author_is_told(tmp_path: Path) -> None:
    with WebhookProcess(tmp_path, "--failure-policy=Ignore") as webhook:
        response = ask(webhook.connect(), review_of(training_pod(destinaton="s3://bucket")))
    assert response["allowed"]
    assert any("did you mean keepstep.dev/destination?" in warning for warning in response["warnings"])


@pytest.mark.parametrize(
    ("body", "content_type", "status", "says"),
    [
        pytest.param(b"\x00\xff garbage", "application/json", 400, "not JSON", id="garbage"),
        pytest.param(b"[" * 100_000, "application/json", 400, "not JSON", id="nested beyond sense"),
        pytest.param(b"{}", "text/plain", 415, "application/json", id="another type"),
        pytest.param(b" " * (4 * _MIB), "application/json", 413, "", id="larger than any pod"),
    ],
)
def test_what_is_no_review_gets_a_clean_refusal_and_the_next_one_an_answer(
    webhook: WebhookProcess, body: bytes, content_type: str, status: int, says: str
) -> None:
    found, text = send(webhook.connect(), body, content_type)
    assert found == status, text
    assert says in text
    assert ask(webhook.connect(), review_of(training_pod()))["allowed"]


def test_json_that_is_no_review_is_not_allowed_and_says_why(webhook: WebhookProcess) -> None:
    response = ask(webhook.connect(), {"kind": "Pod"})
    assert not response["allowed"]
    assert "not an AdmissionReview" in response["status"]["message"]


def test_a_body_that_does_not_come_is_given_up_while_others_are_answered(tmp_path: Path) -> None:
    with WebhookProcess(tmp_path, "--read-seconds=5") as webhook:
        slow = webhook.connect()
        slow.putrequest("POST", "/mutate")
        slow.putheader("Content-Type", "application/json")
        slow.putheader("Content-Length", "1000")
        slow.endheaders(b"{")
        assert ask(webhook.connect(), review_of(training_pod()))["allowed"]
        answer = slow.getresponse()
        assert answer.status == 408, answer.read()


def test_only_tls_1_2_and_newer_is_spoken(webhook: WebhookProcess) -> None:
    context = ssl.create_default_context(cafile=webhook.authority)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", webhook.port), timeout=HANG_SECONDS) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_certificate_that_changes_under_load_drops_no_review(webhook: WebhookProcess) -> None:
    before, after = webhook.authority, webhook.make_certificate()
    ends = threading.Event()
    failures: list[Exception] = []
    answered = [0, 0]
    kept = webhook.connect(before)
    kept.connect()

    def load(number: int) -> None:
        """One keeps its connection, as the API server does; the other takes a new one each time and trusts both CAs, as
        a caBundle does while they change."""
        try:
            while not ends.is_set():
                connection = kept if number == 0 else webhook.connect(before, after)
                assert ask(connection, review_of(training_pod()))["allowed"]
                answered[number] += 1
                if connection is not kept:
                    connection.close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        webhook.put_certificate(after)
        wait_until(lambda: _speaks(webhook) or bool(failures), HANG_SECONDS, "the new certificate serves")
        so_far = list(answered)
        wait_until(
            lambda: all(now > then for now, then in zip(answered, so_far, strict=True)) or bool(failures),
            HANG_SECONDS,
            "both go on",
        )
    finally:
        ends.set()
        for thread in threads:
            thread.join(HANG_SECONDS)
    assert not failures


def _speaks(webhook: WebhookProcess) -> bool:
    """With the newest certificate."""
    connection = webhook.connect()
    try:
        connection.connect()
    except ssl.SSLCertVerificationError:
        return False
    finally:
        connection.close()
    return True


def test_a_certificate_that_does_not_fit_its_key_is_said_and_the_one_before_serves_on(webhook: WebhookProcess) -> None:
    serving = webhook.authority
    half = webhook.make_certificate()
    half.with_name("tls.key").write_bytes(serving.with_name("tls.key").read_bytes())
    webhook.put_certificate(half)
    wait_until(lambda: "certificate.unusable" in webhook.log_text(), HANG_SECONDS, "it is said")
    assert ask(webhook.connect(serving), review_of(training_pod()))["allowed"]


def test_without_a_certificate_it_says_what_is_missing(tmp_path: Path) -> None:
    webhook = WebhookProcess(tmp_path)
    webhook.start(wait=False)
    assert webhook.wait() == 1
    assert "hint: put tls.crt and tls.key there" in webhook.log_text()


def test_told_to_end_it_is_not_ready_and_still_answers_and_ends_with_0(tmp_path: Path) -> None:
    with WebhookProcess(tmp_path, "--lame-duck-seconds=20") as webhook:
        kept = webhook.connect()
        assert ask(kept, review_of(training_pod()))["allowed"]
        webhook.terminate()
        wait_until(lambda: webhook.get("/readyz")[0] == 503, HANG_SECONDS, "it is not ready any more")
        assert webhook.get("/healthz")[0] == 200
        assert ask(kept, review_of(training_pod()))["allowed"]
        assert ask(webhook.connect(), review_of(training_pod()))["allowed"]
        assert webhook.wait() == 0


@needs_ipv6
def test_as_the_chart_starts_it_it_is_reached_over_ipv4_and_over_ipv6(tmp_path: Path) -> None:
    """A cluster, and so kubelet's probes and the API server's calls, may have IPv6 alone."""
    with WebhookProcess(tmp_path, host="") as webhook:
        for host in ("127.0.0.1", "::1"):
            for port in (webhook.port, webhook.http_port):
                socket.create_connection((host, port), HANG_SECONDS).close()


def test_metrics_say_what_became_of_the_reviews(webhook: WebhookProcess) -> None:
    ask(webhook.connect(), review_of(training_pod()))
    ask(webhook.connect(), review_of(training_pod(destination="nowhere")))
    status, text = webhook.get("/metrics")
    assert status == 200
    assert 'keepstep_webhook_reviews_total{outcome="injected"} 1.0' in text
    assert 'keepstep_webhook_reviews_total{outcome="refused"} 1.0' in text
    assert 'keepstep_webhook_reviews_total{outcome="skipped"} 0.0' in text
    [left] = [line for line in text.splitlines() if line.startswith("keepstep_webhook_certificate_seconds_left ")]
    assert 0 < float(left.split()[1]) <= 24 * 3600
