"""Real replicas with the Secret mounted, while the Job renews what they serve: no review is lost."""

import http.client
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from cryptography import x509
from structlog.testing import capture_logs
from tests.fakes.fake_api_server import FakeApiServer
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.installed_chart import (
    SECRET,
    SERVICE,
    install,
    installed_chart,
    kept_in,
    made,
    mount_secret,
    published,
    run_job,
)
from tests.harness.webhook_process import WebhookProcess, review_of, training_pod
from tests.webhook.handshakes import serving

from keepstep_agent.webhook.certificates import SecretContent
from keepstep_agent.webhook.serving_certificate import ServingCertificate

_LAG_SECONDS = 1.0
"""API servers hear of a change in their configuration some time after it."""
REVIEW = json.dumps(review_of(training_pod()))


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApiServer]:
    with installed_chart(tmp_path) as api:
        yield api


class Replica(WebhookProcess):
    """With the chart's Secret mounted. `mount` is what kubelet does a while after the Secret has changed."""

    def __init__(self, folder: Path, api: FakeApiServer) -> None:
        super().__init__(folder, "--lame-duck-seconds=0")
        self._api = api

    def __enter__(self) -> Self:
        self.mount()
        self.start()
        return self

    def mount(self) -> None:
        mount_secret(self, self._api.shelf.get("secrets", SECRET))


class Reviewer(http.client.HTTPSConnection):
    """An API server's connection to one webhook: by the Service's name, trusting one bundle."""

    def __init__(self, webhook: WebhookProcess, bundle: bytes) -> None:
        self._trusting = ssl.create_default_context(cadata=bundle.decode())
        super().__init__("127.0.0.1", webhook.port, timeout=HANG_SECONDS, context=self._trusting)

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), timeout=HANG_SECONDS)
        self.sock = self._trusting.wrap_socket(plain, server_hostname=SERVICE)

    def ask(self) -> None:
        self.request("POST", "/mutate", REVIEW, {"Content-Type": "application/json"})
        answer = self.getresponse()
        assert json.loads(answer.read())["response"]["allowed"]


def ask(replica: WebhookProcess, bundle: bytes) -> None:
    """By a new connection, verified."""
    reviewer = Reviewer(replica, bundle)
    try:
        reviewer.ask()
    finally:
        reviewer.close()


class _Known:
    """What an API server trusts that hears of changes late."""

    def __init__(self, api: FakeApiServer) -> None:
        self._api = api
        self._published = [(-math.inf, published(api))]
        self._ends = threading.Event()
        self._watching = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._watching.join(HANG_SECONDS)

    def bundle(self) -> bytes:
        known_at = time.monotonic() - _LAG_SECONDS
        return [bundle for at, bundle in tuple(self._published) if at <= known_at][-1]

    def _watch(self) -> None:
        while not self._ends.wait(0.01):
            bundle = published(self._api)
            if bundle != self._published[-1][1]:
                self._published.append((time.monotonic(), bundle))


def test_a_renewal_under_load_drops_no_review_though_one_replica_gets_it_late(
    api: FakeApiServer, tmp_path: Path
) -> None:
    old, following = made(days_ago=244), made(days_ago=0.05)
    install(api, SecretContent(served=old, following=following))
    with ExitStack() as stack:
        replicas = [stack.enter_context(Replica(tmp_path / str(number), api)) for number in range(2)]
        known = stack.enter_context(_Known(api))
        ends = threading.Event()
        failures: list[BaseException] = []
        answered = [0] * 4

        def load(number: int, asking: Callable[[], None]) -> None:
            try:
                while not ends.is_set():
                    asking()
                    answered[number] += 1
            except BaseException as error:
                failures.append(error)

        def ask_by_what_is_known(replica: Replica) -> None:
            ask(replica, known.bundle())

        def kept_connection(replica: Replica) -> Reviewer:
            reviewer = Reviewer(replica, known.bundle())
            stack.callback(reviewer.close)
            return reviewer

        askings = [partial(ask_by_what_is_known, replica) for replica in replicas]
        askings += [partial(kept_connection(replica).ask) for replica in replicas]
        threads = [threading.Thread(target=load, args=(number, one)) for number, one in enumerate(askings)]
        for thread in threads:
            thread.start()

        def goes_on() -> None:
            so_far = list(answered)
            wait_until(
                lambda: bool(failures) or all(now > then for now, then in zip(answered, so_far, strict=True)),
                HANG_SECONDS,
                "all go on",
            )

        try:
            goes_on()
            assert run_job(api.url, tmp_path / "service-account").returncode == 0
            for replica in replicas:
                replica.mount()
                wait_until(
                    lambda one=replica: bool(failures) or one.served() == following.certificate,  # type: ignore[misc]
                    HANG_SECONDS,
                    "it serves the next",
                )
                goes_on()
        finally:
            ends.set()
            for thread in threads:
                thread.join(HANG_SECONDS)
    assert not failures
    assert old.certificate in x509.load_pem_x509_certificates(published(api))


def test_a_secret_that_is_taken_away_ends_no_webhook_and_the_next_one_is_served(
    api: FakeApiServer, tmp_path: Path
) -> None:
    assert run_job(api.url, tmp_path / "service-account").returncode == 0
    with Replica(tmp_path / "replica", api) as replica:
        before = replica.served()
        api.shelf.patch("secrets", SECRET, {"data": None})
        nothing = tmp_path / "nothing"
        nothing.mkdir()
        replica.put_certificate(nothing / "tls.crt")
        wait_until(lambda: "certificate.unusable" in replica.log_text(), HANG_SECONDS, "it is said")
        ask(replica, published(api))
        assert run_job(api.url, tmp_path / "service-account").returncode == 0
        assert replica.served() == before
        ask(replica, published(api))
        replica.mount()
        served = kept_in(api).served
        assert served is not None
        wait_until(lambda: replica.served() == served.certificate, HANG_SECONDS, "it serves the new one")
        ask(replica, published(api))


def test_one_that_expires_while_it_is_served_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = made(days_ago=300)
    serving(tmp_path, pair)
    certificate = ServingCertificate(tmp_path)
    with capture_logs() as lines:
        certificate.load()
        assert lines == []
        monkeypatch.setattr(certificate, "expires_at", datetime.now(UTC) - timedelta(seconds=1))
        for _ in range(2):
            certificate.load()
    assert [line["event"] for line in lines] == ["certificate.expired"]


def test_one_that_has_expired_is_said(api: FakeApiServer, tmp_path: Path) -> None:
    install(api, SecretContent(served=made(days_ago=400)))
    with Replica(tmp_path / "replica", api) as replica:
        assert "certificate.expired" in replica.log_text()
        assert run_job(api.url, tmp_path / "service-account").returncode == 0
        replica.mount()
        served = kept_in(api).served
        assert served is not None
        wait_until(lambda: replica.served() == served.certificate, HANG_SECONDS, "it serves the new one")
        ask(replica, published(api))
