"""Real replicas that make their own certificates: they race, rotate under load, die, and start with no API server."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pytest
from cryptography import x509
from tests.fakes.fake_api_server import FakeApiServer, Mood
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.installed_chart import (
    MANAGED,
    SERVICE,
    installed_chart,
    kept_when_due,
    publish,
    published,
    withdraw,
)
from tests.harness.self_managed_webhook import Reviewer, SelfManagedWebhook
from tests.harness.webhook_process import review_of, training_pod

from keepstep_agent.webhook.certificates import CertificateWithKey, read_secret

_LAG_SECONDS = 1.0
"""API servers hear of a change in their configuration some time after it, up to `SETTLE_SECONDS`; the rest of these is
for a busy machine."""
TIMINGS = {"look_seconds": 0.5, "retry_seconds": 0.2}
REVIEW = review_of(training_pod())


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApiServer]:
    with installed_chart(tmp_path) as api:
        yield api


def two_replicas(folder: Path, api: FakeApiServer, stack: ExitStack, **timings: float) -> list[SelfManagedWebhook]:
    """Started at the same time."""
    replicas = [
        stack.enter_context(
            SelfManagedWebhook(folder / str(number), api, timings={**TIMINGS, **timings}, awaited=False)
        )
        for number in range(2)
    ]
    for replica in replicas:
        replica.wait_serving()
    return replicas


def ask(replica: SelfManagedWebhook, bundle: bytes) -> None:
    """By a new connection, verified."""
    reviewer = Reviewer(replica, bundle)
    try:
        assert reviewer.ask(REVIEW)["allowed"]
    finally:
        reviewer.close()


def test_of_two_that_begin_at_once_one_writes_and_both_are_verified_by_what_is_published(
    api: FakeApiServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        replicas = two_replicas(tmp_path, api, stack)
        for replica in replicas:
            ask(replica, published(api))
        assert replicas[0].served() == replicas[1].served()
        written = [one.resource for one in api.asked if one.verb == "patch" and one.status == 200]
        assert written.count("secrets") == 1, "who was overtaken was refused"
        assert written.count("mutatingwebhookconfigurations") == 1
        assert [one for one in api.asked if one.status not in (200, 409)] == []
        pairs = [(replica.certificates / "own.pem").read_text() for replica in replicas]
        assert pairs[0] == pairs[1]
        for replica in replicas:
            assert pairs[0].splitlines()[-2] not in replica.log_text()


def install_old(api: FakeApiServer) -> CertificateWithKey:
    """A CA that is due, published, with a leaf that is served. Returns the CA."""
    kept = kept_when_due()
    api.shelf.patch("secrets", MANAGED.secret, {"data": kept.data()})
    publish(api, kept.data()["ca.crt"])
    return kept.authorities[0]


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


@pytest.mark.slow
def test_a_rotation_of_the_authority_under_load_drops_no_review(api: FakeApiServer, tmp_path: Path) -> None:
    old = install_old(api)
    allowed = api.allowed
    api.allowed = lambda *asked: asked[:2] != ("patch", "secrets") and allowed(*asked)
    with ExitStack() as stack:
        replicas = two_replicas(tmp_path, api, stack)
        assert {replica.served().issuer for replica in replicas} == {old.certificate.subject}
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

        def new_connection(replica: SelfManagedWebhook) -> Callable[[], None]:
            return lambda: ask(replica, known.bundle())

        def kept_connection(replica: SelfManagedWebhook) -> Callable[[], None]:
            reviewer = Reviewer(replica, known.bundle())
            stack.callback(reviewer.close)

            def asking() -> None:
                assert reviewer.ask(REVIEW)["allowed"]

            return asking

        askings = [make(replica) for replica in replicas for make in (new_connection, kept_connection)]
        threads = [threading.Thread(target=load, args=(number, one)) for number, one in enumerate(askings)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: bool(failures) or all(answered), HANG_SECONDS, "all are answered")
            api.allowed = allowed
            wait_until(
                lambda: bool(failures) or old.certificate.subject not in {one.served().issuer for one in replicas},
                HANG_SECONDS,
                "both serve a leaf of the new CA",
            )
            so_far = list(answered)
            wait_until(
                lambda: bool(failures) or all(now > then for now, then in zip(answered, so_far, strict=True)),
                HANG_SECONDS,
                "all go on",
            )
        finally:
            ends.set()
            for thread in threads:
                thread.join(HANG_SECONDS)
        assert not failures
        both = x509.load_pem_x509_certificates(published(api))
        assert old.certificate in both, "a replica that is cut off may still serve its leaf"
        assert len(both) == 2


def test_when_one_is_killed_another_does_its_work(api: FakeApiServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        one, other = two_replicas(tmp_path, api, stack)
        one.process.kill()
        one.wait()
        withdraw(api)
        wait_until(lambda: bool(published(api)), HANG_SECONDS, "published again")
        ask(other, published(api))


def test_a_secret_that_is_lost_is_filled_anew_and_all_replicas_serve_what_is_in_it(
    api: FakeApiServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        replicas = two_replicas(tmp_path, api, stack)
        before = replicas[0].served()
        api.shelf.delete("secrets", MANAGED.secret)
        # As `helm upgrade` does.
        api.shelf.create("secrets", {"metadata": {"name": MANAGED.secret}, "type": "Opaque"})
        wait_until(lambda: {one.served() for one in replicas}.isdisjoint({before}), HANG_SECONDS, "both serve another")
        assert replicas[0].served() == replicas[1].served()
        for replica in replicas:
            ask(replica, published(api))


def test_one_that_starts_again_while_the_api_server_is_away_serves_with_what_it_has(
    api: FakeApiServer, tmp_path: Path
) -> None:
    with SelfManagedWebhook(tmp_path / "replica", api, timings=TIMINGS) as replica:
        before: x509.Certificate = replica.served()
        replica.process.kill()
        replica.wait()
        api.mood = Mood.BROKEN
        replica.start()
        assert replica.served() == before
        ask(replica, published(api))
        wait_until(lambda: "etcdserver: leader changed" in replica.log_text(), HANG_SECONDS, "it says what is wrong")
        api.mood = Mood.WELL
        wait_until(lambda: "certificates.well" in replica.log_text(), HANG_SECONDS, "and when it is over")
    kept = read_secret(api.shelf.get("secrets", MANAGED.secret), SERVICE, datetime.now(UTC))
    assert kept.leaf is not None
    assert kept.leaf.certificate == before


def test_one_that_is_told_to_end_before_it_could_begin_ends_at_once(api: FakeApiServer, tmp_path: Path) -> None:
    api.mood = Mood.BROKEN
    timings = {**TIMINGS, "begin_seconds": 3600}
    with SelfManagedWebhook(tmp_path / "replica", api, timings=timings, awaited=False) as replica:
        wait_until(lambda: "certificates.problem" in replica.log_text(), HANG_SECONDS, "it waits")
        replica.terminate()
        assert replica.wait() == 0
