"""The keeper of the certificates against an API server with the chart's objects and rights, over HTTP."""

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog
from kubernetes.config import kube_config
from tests.fakes.fake_api_server import FakeApiServer, Mood
from tests.harness.installed_chart import MANAGED, SERVICE, installed_chart, published, withdraw
from tests.webhook.test_authority import shake_hands

from mooring_agent.core.certificate_plan import Lives
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.webhook import certificate_keeper
from mooring_agent.webhook.authority import make_authority, make_leaf
from mooring_agent.webhook.certificate_files import put_pair, serves_until
from mooring_agent.webhook.certificate_keeper import kept_certificates
from mooring_agent.webhook.certificate_round import CertificateRound, Look
from mooring_agent.webhook.certificate_secret import read_secret
from mooring_agent.webhook.settings import Pace, SelfManaged

SECONDS = 30.0
PACE = Pace(
    look_seconds=0.05,
    retry_seconds=0.05,
    lease_seconds=30,
    call_seconds=10,
    begin_seconds=60,
    publish_seconds=60,
)
"""Waits that end well are long, and those that a test sits out are set by it."""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    with installed_chart() as api:
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(api.kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield api


def managed(**pace: float) -> SelfManaged:
    return replace(MANAGED, pace=replace(PACE, **pace))


def put_old_pair(folder: Path) -> None:
    """Of a CA that nobody knows, valid for a day."""
    lives = Lives(leaf=timedelta(days=1))
    put_pair(folder, make_leaf(make_authority(datetime.now(UTC), lives), {SERVICE}, datetime.now(UTC), lives))


async def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}"
        await asyncio.sleep(0.01)


def leaf_in_secret(api: FakeApiServer) -> bytes:
    leaf = read_secret(api.shelf.get("secrets", MANAGED.secret)).leaf
    return b"" if leaf is None else leaf.certificate_pem


async def test_who_enters_has_a_pair_that_the_published_bundle_verifies(api: FakeApiServer, tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    async with kept_certificates(managed(), folder):
        leaf = read_secret(api.shelf.get("secrets", MANAGED.secret)).leaf
        assert leaf is not None
        assert (folder / "tls.crt").read_bytes() == leaf.certificate_pem
        assert (folder / "tls.key").read_bytes() == leaf.key_pem
        shake_hands(tmp_path / "again", leaf, published(api), SERVICE)
        shake_hands(tmp_path / "again", leaf, published(api), f"{SERVICE}.cluster.local")


async def test_the_lease_is_held_meanwhile_and_given_back_at_the_end(api: FakeApiServer, tmp_path: Path) -> None:
    async with kept_certificates(managed(), tmp_path / "certificates"):
        lease = api.shelf.get("leases", MANAGED.lease)["spec"]
        assert lease["holderIdentity"]
        await until(lambda: api.shelf.get("leases", MANAGED.lease)["spec"]["renewTime"] > lease["renewTime"], "renewed")
    assert "holderIdentity" not in api.shelf.get("leases", MANAGED.lease)["spec"]


async def test_it_uses_exactly_the_rights_that_its_docstring_names(api: FakeApiServer, tmp_path: Path) -> None:
    api.allowed = lambda _verb, _resource, _name: True
    async with kept_certificates(managed(), tmp_path / "certificates"):
        withdraw(api)
        await until(lambda: published(api), "published again")
    rows = re.findall(r"^\| .* \| (\w+) \| `(\w+)` \| ([a-z, ]+) \|$", certificate_keeper.__doc__ or "", re.MULTILINE)
    named = {(verb, resource, getattr(MANAGED, name)) for resource, name, verbs in rows for verb in verbs.split(", ")}
    assert len(named) == 6
    assert {(one.verb, one.resource, one.name) for one in api.asked} == named
    assert {one.manager for one in api.asked if one.verb == "patch"} == {"mooring-webhook"}


@pytest.mark.parametrize("resource", ["secrets", "leases"])
@pytest.mark.parametrize("verb", ["get", "patch"])
async def test_without_a_right_that_it_needs_to_begin_it_ends_and_names_it(
    api: FakeApiServer, tmp_path: Path, verb: str, resource: str
) -> None:
    allowed = api.allowed
    api.allowed = lambda *asked: asked[:2] != (verb, resource) and allowed(*asked)
    with pytest.raises(MooringError, match="no certificate to serve with") as caught:
        async with kept_certificates(managed(begin_seconds=0.2), tmp_path / "certificates"):
            raise AssertionError("it has none")
    assert caught.value.kind is ErrorKind.ACCESS_DENIED
    name = {"secrets": MANAGED.secret, "leases": MANAGED.lease}[resource]
    assert f"needs the rule: {verb} {resource} '{name}'" in caught.value.hint


@pytest.mark.parametrize("verb", ["get", "patch"])
async def test_without_the_right_to_publish_it_serves_and_says_so_once_until_all_is_well(
    api: FakeApiServer, tmp_path: Path, verb: str
) -> None:
    allowed = api.allowed
    api.allowed = lambda *asked: asked[:2] != (verb, "mutatingwebhookconfigurations") and allowed(*asked)
    with structlog.testing.capture_logs() as logs:
        async with kept_certificates(managed(publish_seconds=0.2), tmp_path / "certificates"):
            assert not published(api)
            await until(lambda: "certificates.problem" in {one["event"] for one in logs}, "it is said")
            asked = len(api.asked)
            await until(lambda: len(api.asked) > asked + 20, "it goes on")
            api.allowed = allowed
            await until(lambda: published(api), "published")
            await until(lambda: "certificates.well" in {one["event"] for one in logs}, "it is said")
    (problem,) = [one for one in logs if one["event"] == "certificates.problem"]
    assert f"needs the rule: {verb} mutatingwebhookconfigurations 'mooring'" in problem["hint"]
    assert problem["log_level"] == "error"


@pytest.mark.parametrize("resource", ["secrets", "leases", "mutatingwebhookconfigurations"])
async def test_an_object_that_is_not_there_is_named_and_waited_for(
    api: FakeApiServer, tmp_path: Path, resource: str
) -> None:
    name = {"secrets": MANAGED.secret, "leases": MANAGED.lease}.get(resource, MANAGED.configuration)
    there = api.shelf.get(resource, name)
    api.shelf.delete(resource, name)
    with structlog.testing.capture_logs() as logs:
        keeping = kept_certificates(managed(), tmp_path / "certificates")
        entering = asyncio.create_task(keeping.__aenter__())
        await until(lambda: any(one.resource == resource and one.status == 404 for one in api.asked), "it is missed")
        assert not entering.done()
        api.shelf.create(resource, there)
        await asyncio.wait_for(entering, SECONDS)
        await keeping.__aexit__(None, None, None)
    assert "certificates.problem" not in {one["event"] for one in logs}, "an installation takes a moment"
    assert published(api)


@pytest.mark.parametrize("mood", [Mood.BROKEN, Mood.DEAF])
async def test_who_has_a_valid_pair_serves_though_the_api_server_is_away_and_renews_it_later(
    api: FakeApiServer, tmp_path: Path, mood: Mood
) -> None:
    folder = tmp_path / "certificates"
    put_old_pair(folder)
    before = (folder / "tls.crt").read_bytes()
    api.mood = mood
    beats = 0

    async def beat() -> None:
        """As reviews are answered meanwhile."""
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    beating = asyncio.create_task(beat())
    async with kept_certificates(managed(call_seconds=2), folder):
        beating.cancel()
        assert (folder / "tls.crt").read_bytes() == before
        api.mood = Mood.WELL
        await until(lambda: (folder / "tls.crt").read_bytes() != before, "the files are renewed")
        assert (folder / "tls.crt").read_bytes() == leaf_in_secret(api)
    assert beats > 20 or mood is not Mood.DEAF, "two seconds in which nobody was held up"


async def test_without_a_pair_and_without_an_api_server_it_ends_and_says_why(
    tmp_path: Path, api: FakeApiServer
) -> None:
    api.mood = Mood.BROKEN
    with pytest.raises(MooringError, match="500: etcdserver: leader changed") as caught:
        async with kept_certificates(managed(begin_seconds=0.2), tmp_path / "certificates"):
            raise AssertionError("it has none")
    assert caught.value.kind is ErrorKind.UNREACHABLE


async def test_outside_of_any_cluster_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "nothing"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(MooringError) as caught:
        async with kept_certificates(managed(), tmp_path / "certificates"):
            raise AssertionError("it has none")
    assert "automountServiceAccountToken" in caught.value.hint


async def test_a_folder_that_cannot_be_written_is_said(api: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MooringError) as caught:
        async with kept_certificates(managed(begin_seconds=0.2), tmp_path / "file" / "certificates"):
            raise AssertionError("it has none")
    assert "must be writable" in caught.value.hint


async def test_an_expired_pair_is_none(api: FakeApiServer, tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    then = datetime.now(UTC) - timedelta(days=100)
    put_pair(folder, make_leaf(make_authority(then, Lives()), {SERVICE}, then, Lives()))
    ends_at = serves_until(folder)
    assert ends_at is not None
    assert ends_at < datetime.now(UTC)
    api.mood = Mood.BROKEN
    with pytest.raises(MooringError, match="no certificate to serve with"):
        async with kept_certificates(managed(begin_seconds=0.2), folder):
            raise AssertionError("it has none")


async def test_a_fault_of_ours_ends_no_webhook_that_serves(
    api: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "certificates"
    looks = 0

    async def look(_: CertificateRound) -> Look:
        nonlocal looks
        looks += 1
        raise RuntimeError("a bug")

    async with kept_certificates(managed(), folder):
        with monkeypatch.context() as patching:
            patching.setattr(CertificateRound, "look", look)
            await until(lambda: looks > 2, "it goes on")
        withdraw(api)
        await until(lambda: published(api), "it works again")


async def test_the_handshake_that_api_servers_make_fails_where_nothing_is_published(
    tmp_path: Path, api: FakeApiServer
) -> None:
    """What all this is for: the test of the tests."""
    put_old_pair(tmp_path / "certificates")
    async with kept_certificates(managed(), tmp_path / "certificates"):
        other = make_authority(datetime.now(UTC), Lives())
        leaf = read_secret(api.shelf.get("secrets", MANAGED.secret)).leaf
        assert leaf is not None
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(tmp_path / "again", leaf, other.certificate_pem, SERVICE)
