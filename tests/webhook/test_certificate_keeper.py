"""The keeper of the certificates against an API server with the chart's objects and rights, over HTTP."""

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog
from tests.fakes.fake_api_server import FakeApiServer, Mood
from tests.harness.bounds import HANG_SECONDS
from tests.harness.installed_chart import MANAGED, SERVICE, installed_chart, managed_in, published, withdraw
from tests.webhook.test_certificates import pem, shake_hands

from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.policies.certificate_rotation import CertificateLifetimes
from keepstep_agent.webhook.certificate_keeper import CertificateKeeper, ServingCertificate, kept_certificates
from keepstep_agent.webhook.certificates import CertificateWithKey, make_authority, make_leaf, read_secret
from keepstep_agent.webhook.settings import CertificateTimings, SelfManaged

TIMINGS = CertificateTimings(
    look_seconds=0.05,
    retry_seconds=0.05,
    call_seconds=10,
    begin_seconds=60,
    publish_seconds=60,
)
"""Waits that end well are long, and those that a test sits out are set by it."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApiServer]:
    with installed_chart(tmp_path) as api:
        yield api


@pytest.fixture
def certificate(tmp_path: Path) -> ServingCertificate:
    return ServingCertificate(tmp_path / "certificates")


def managed(api: FakeApiServer, folder: Path, **timings: float) -> SelfManaged:
    return replace(managed_in(api, folder), timings=replace(TIMINGS, **timings))


def put_old_pair(certificate: ServingCertificate, begins_at: datetime | None = None) -> datetime:
    """Of a CA that nobody knows, valid for a day. Returns when it ends."""
    begins_at, lives = begins_at or datetime.now(UTC), CertificateLifetimes(leaf=timedelta(days=1))
    certificate.put(pem(make_leaf(make_authority(begins_at, lives), {SERVICE}, begins_at, lives)))
    assert certificate.expires_at is not None
    return certificate.expires_at


async def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {HANG_SECONDS:g} s: {what}"
        await asyncio.sleep(0.01)


def kept_leaf(api: FakeApiServer) -> CertificateWithKey:
    leaf = read_secret(api.shelf.get("secrets", MANAGED.secret), SERVICE, datetime.now(UTC)).leaf
    assert leaf is not None
    return leaf


async def test_who_enters_has_a_pair_that_the_published_bundle_verifies(
    api: FakeApiServer, tmp_path: Path, certificate: ServingCertificate
) -> None:
    async with kept_certificates(managed(api, tmp_path), certificate):
        leaf = kept_leaf(api)
        (file,) = (tmp_path / "certificates").iterdir()
        assert file.read_bytes() == pem(leaf)
        shake_hands(tmp_path / "again", leaf, published(api), SERVICE)
        shake_hands(tmp_path / "again", leaf, published(api), f"{SERVICE}.cluster.local")


async def test_it_uses_exactly_the_rights_that_the_chart_gives(
    api: FakeApiServer, tmp_path: Path, certificate: ServingCertificate
) -> None:
    async with kept_certificates(managed(api, tmp_path), certificate):
        withdraw(api)
        await until(lambda: published(api), "published again")
    used = {(one.verb, one.resource, one.name) for one in api.asked}
    objects = {"secrets": MANAGED.secret, "mutatingwebhookconfigurations": MANAGED.configuration}
    assert used == {(verb, *one) for one in objects.items() for verb in ("get", "patch")}
    assert all(api.allowed(*one) for one in used), "and tests of the chart hold that these are all"
    assert {one.manager for one in api.asked if one.verb == "patch"} == {"keepstep-webhook"}


@pytest.mark.parametrize("verb", ["get", "patch"])
async def test_without_a_right_that_it_needs_to_begin_it_ends_and_names_it(
    api: FakeApiServer, tmp_path: Path, certificate: ServingCertificate, verb: str
) -> None:
    allowed = api.allowed
    api.allowed = lambda *asked: asked[:2] != (verb, "secrets") and allowed(*asked)
    with pytest.raises(KeepstepError, match=f'403 .* cannot {verb} resource "secrets"') as caught:
        async with kept_certificates(managed(api, tmp_path, begin_seconds=0.2), certificate):
            raise AssertionError("it has none")
    assert caught.value.kind is ErrorKind.ACCESS_DENIED
    assert "`helm upgrade`" in caught.value.hint


@pytest.mark.parametrize("verb", ["get", "patch"])
async def test_without_the_right_to_publish_it_serves_and_says_so_once_until_all_is_well(
    api: FakeApiServer, tmp_path: Path, certificate: ServingCertificate, verb: str
) -> None:
    allowed = api.allowed
    api.allowed = lambda *asked: asked[:2] != (verb, "mutatingwebhookconfigurations") and allowed(*asked)
    with structlog.testing.capture_logs() as logs:
        async with kept_certificates(managed(api, tmp_path, publish_seconds=0.2), certificate):
            assert not published(api)
            await until(lambda: "certificates.problem" in {one["event"] for one in logs}, "it is said")
            asked = len(api.asked)
            await until(lambda: len(api.asked) > asked + 20, "it goes on")
            api.allowed = allowed
            await until(lambda: published(api), "published")
            await until(lambda: "certificates.well" in {one["event"] for one in logs}, "it is said")
    (problem,) = [one for one in logs if one["event"] == "certificates.problem"]
    assert f'cannot {verb} resource "mutatingwebhookconfigurations"' in problem["error"]
    assert problem["log_level"] == "error"


@pytest.mark.parametrize("resource", ["secrets", "mutatingwebhookconfigurations"])
async def test_an_object_that_is_not_there_is_named_and_waited_for(
    api: FakeApiServer, tmp_path: Path, certificate: ServingCertificate, resource: str
) -> None:
    name = {"secrets": MANAGED.secret}.get(resource, MANAGED.configuration)
    there = api.shelf.get(resource, name)
    api.shelf.delete(resource, name)
    with structlog.testing.capture_logs() as logs:
        keeping = kept_certificates(managed(api, tmp_path), certificate)
        entering = asyncio.create_task(keeping.__aenter__())
        await until(lambda: any(one.resource == resource and one.status == 404 for one in api.asked), "it is missed")
        assert not entering.done()
        api.shelf.create(resource, there)
        await asyncio.wait_for(entering, HANG_SECONDS)
        await keeping.__aexit__(None, None, None)
    assert "certificates.problem" not in {one["event"] for one in logs}, "an installation takes a moment"
    assert published(api)


@pytest.mark.parametrize("mood", [Mood.BROKEN, Mood.DEAF])
async def test_who_has_a_valid_pair_serves_though_the_api_server_is_away_and_renews_it_later(
    api: FakeApiServer, tmp_path: Path, certificate: ServingCertificate, mood: Mood
) -> None:
    before = put_old_pair(certificate)
    api.mood = mood
    beats = 0

    async def beat() -> None:
        """As reviews are answered meanwhile."""
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    beating = asyncio.create_task(beat())
    async with kept_certificates(managed(api, tmp_path, call_seconds=2), certificate):
        beating.cancel()
        assert certificate.expires_at == before
        api.mood = Mood.WELL
        await until(lambda: certificate.expires_at != before, "it is renewed")
        assert certificate.expires_at == kept_leaf(api).certificate.not_valid_after_utc
    # Who was held up for the two seconds of a call would have one or two.
    assert beats > 5 or mood is not Mood.DEAF


async def test_without_a_pair_and_without_an_api_server_it_ends_and_says_why(
    tmp_path: Path, api: FakeApiServer, certificate: ServingCertificate
) -> None:
    api.mood = Mood.BROKEN
    with pytest.raises(KeepstepError, match=r"answers 500 .* etcdserver: leader changed") as caught:
        async with kept_certificates(managed(api, tmp_path, begin_seconds=0.2), certificate):
            raise AssertionError("it has none")
    assert caught.value.kind is ErrorKind.UNREACHABLE


async def test_without_a_service_account_it_says_what_is_missing(
    tmp_path: Path, api: FakeApiServer, certificate: ServingCertificate
) -> None:
    told = replace(managed(api, tmp_path, begin_seconds=0.2), service_account=tmp_path / "nothing")
    with pytest.raises(KeepstepError) as caught:
        async with kept_certificates(told, certificate):
            raise AssertionError("it has none")
    assert "automountServiceAccountToken" in caught.value.hint


async def test_a_folder_that_cannot_be_written_is_said(api: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unwritable = ServingCertificate(tmp_path / "file" / "certificates")
    with pytest.raises(KeepstepError) as caught:
        async with kept_certificates(managed(api, tmp_path, begin_seconds=0.2), unwritable):
            raise AssertionError("it has none")
    assert "must be writable" in caught.value.hint


async def test_an_expired_pair_is_none(api: FakeApiServer, tmp_path: Path, certificate: ServingCertificate) -> None:
    put_old_pair(certificate, datetime.now(UTC) - timedelta(days=100))
    assert certificate.seconds_left() < 0
    api.mood = Mood.BROKEN
    with pytest.raises(KeepstepError, match="leader changed"):
        async with kept_certificates(managed(api, tmp_path, begin_seconds=0.2), certificate):
            raise AssertionError("it has none")


async def test_a_fault_of_ours_ends_no_webhook_that_serves(
    api: FakeApiServer, tmp_path: Path, certificate: ServingCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def look(_: CertificateKeeper) -> None:
        nonlocal looks
        looks += 1
        raise RuntimeError("a bug")

    async with kept_certificates(managed(api, tmp_path), certificate):
        with monkeypatch.context() as patching:
            patching.setattr(CertificateKeeper, "look", look)
            await until(lambda: looks > 2, "it goes on")
        withdraw(api)
        await until(lambda: published(api), "it works again")


async def test_the_handshake_that_api_servers_make_fails_where_nothing_is_published(
    tmp_path: Path, api: FakeApiServer, certificate: ServingCertificate
) -> None:
    """What all this is for: the test of the tests."""
    put_old_pair(certificate)
    async with kept_certificates(managed(api, tmp_path), certificate):
        other = make_authority(datetime.now(UTC), CertificateLifetimes())
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(tmp_path / "again", kept_leaf(api), other.certificate_pem, SERVICE)
