"""What the chart starts and tests in a cluster, run here: the webhook by the chart's flags, and helm test's program."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chart.rendering import Object, arguments_of, of_kind, render
from tests.harness.bounds import HANG_SECONDS
from tests.harness.webhook_process import IMAGE, WebhookProcess

DESTINATION = "s3://bucket/helm-test"
PLACES = ("--certificates=", "--listen=", "--http-listen=", "--lame-duck-seconds=")


@pytest.fixture
def webhook(tmp_path: Path) -> Iterator[WebhookProcess]:
    """Of the chart with cert-manager: the certificates are there. Only its places are the harness's."""
    name, tag = IMAGE.split(":")
    flags = arguments_of(render({"certManager": {"enabled": True}, "image": {"repository": name, "tag": tag}}))[1:]
    with WebhookProcess(tmp_path, *(flag for flag in flags if not flag.startswith(PLACES))) as process:
        yield process


def container() -> Object:
    (found,) = of_kind(render(), "Pod")["spec"]["containers"]
    return dict(found)


def ask(url: str, authority: Path, destination: str = DESTINATION) -> "subprocess.CompletedProcess[str]":
    """As the pod does it, by the image's Python."""
    python, option = container()["command"]
    assert python == "python3"
    program = container()["args"][0].replace(DESTINATION, destination)
    return subprocess.run(
        [sys.executable, option, program, url, str(authority)], capture_output=True, text=True, timeout=HANG_SECONDS
    )


def test_helm_test_finds_that_the_webhook_injects(webhook: WebhookProcess) -> None:
    done = ask(f"https://127.0.0.1:{webhook.port}/mutate", webhook.authority)
    assert (done.returncode, done.stderr) == (0, "")
    assert "injects Keepstep" in done.stdout


def test_helm_test_fails_where_another_ca_signed(webhook: WebhookProcess) -> None:
    done = ask(f"https://127.0.0.1:{webhook.port}/mutate", webhook.make_certificate())
    assert done.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr


def test_helm_test_fails_with_the_reason_where_the_pod_is_refused(webhook: WebhookProcess) -> None:
    done = ask(f"https://127.0.0.1:{webhook.port}/mutate", webhook.authority, destination="nowhere")
    assert done.returncode != 0
    assert "keepstep.dev/destination" in done.stderr


def test_helm_test_asks_the_service_and_sees_no_key() -> None:
    for enabled in (False, True):
        objects = render({"certManager": {"enabled": enabled}})
        asked = of_kind(objects, "MutatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["service"]
        spec = of_kind(objects, "Pod")["spec"]
        assert spec["containers"][0]["args"][1:] == [
            f"https://{asked['name']}.{asked['namespace']}.svc{asked['path']}",
            "/ca/ca.crt",
        ]
        (volume,) = spec["volumes"]
        assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt"]
        served = (
            of_kind(objects, "Certificate", "keepstep-webhook")["spec"]["secretName"]
            if enabled
            else of_kind(objects, "Secret", "keepstep-webhook-certificates")["metadata"]["name"]
        )
        assert volume["secret"]["secretName"] == served


def test_helm_test_is_over_once_it_has_answered() -> None:
    pod = of_kind(render(), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
