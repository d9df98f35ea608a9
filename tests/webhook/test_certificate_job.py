"""The Job that makes and renews the certificates, against an API server with the chart's objects and rights."""

import asyncio
import base64
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.chart.rendering import certificate_pods, render
from tests.fakes.fake_api_server import FakeApiServer, Mood
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.installed_chart import (
    CONFIGURATION,
    CONFIGURATIONS,
    NAMES,
    SECRET,
    install,
    installed_chart,
    kept_in,
    made,
    publish,
    published,
    run_job,
    settings_in,
    withdraw,
)
from tests.runtime.patience import until
from tests.webhook.handshakes import serving, shake_hands

from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.webhook.certificate_job import renew_certificates
from keepstep_agent.webhook.certificates import SecretContent, bundle_of, read_bundle

NOW = datetime.now(UTC)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApiServer]:
    with installed_chart(tmp_path) as api:
        yield api


def check_served(api: FakeApiServer, folder: Path) -> None:
    """What the Secret holds is verified by what is published."""
    served = kept_in(api).served
    assert served is not None
    for name in NAMES:
        shake_hands(serving(folder, served), published(api), name)


def test_at_the_installation_it_publishes_a_certificate_and_then_writes_the_secret(
    api: FakeApiServer, tmp_path: Path
) -> None:
    done = run_job(api.url, tmp_path / "service-account")
    assert done.returncode == 0, done.stderr
    check_served(api, tmp_path)
    # Whether the Secret may be written is asked first.
    assert [one.resource for one in api.asked if one.verb == "patch"] == ["secrets", CONFIGURATIONS, "secrets"]
    assert {one.manager for one in api.asked if one.verb == "patch"} == {"keepstep-certificates"}
    used = {(one.verb, one.resource, one.name) for one in api.asked}
    objects = {"secrets": SECRET, CONFIGURATIONS: CONFIGURATION}
    assert used == {(verb, *one) for one in objects.items() for verb in ("get", "patch")}, "all the rights it has"
    key = api.shelf.get("secrets", SECRET)["data"]["tls.key"]
    assert key not in done.stdout + done.stderr
    assert "PRIVATE" not in done.stdout + done.stderr


def test_again_it_changes_nothing(api: FakeApiServer, tmp_path: Path) -> None:
    for _ in range(2):
        assert run_job(api.url, tmp_path / "service-account").returncode == 0
    assert [one.verb for one in api.asked].count("patch") == 3
    before = api.shelf.get("secrets", SECRET)
    before["data"]["note"] = "aGVsbG8="
    api.shelf.patch("secrets", SECRET, {"metadata": {"labels": {"team": "ours"}}, "data": {"note": "aGVsbG8="}})
    withdraw(api)
    assert run_job(api.url, tmp_path / "service-account").returncode == 0
    after = api.shelf.get("secrets", SECRET)
    assert (after["data"], after["metadata"]["labels"]["team"]) == (before["data"], "ours")
    check_served(api, tmp_path)


def test_a_renewal_takes_two_looks_and_each_serves_what_is_published(api: FakeApiServer, tmp_path: Path) -> None:
    old = made(days_ago=244)
    install(api, SecretContent(served=old))
    assert run_job(api.url, tmp_path / "service-account").returncode == 0
    kept = kept_in(api)
    assert kept.served == old
    assert kept.following is not None
    assert all(one.certificate_pem in published(api) for one in (old, kept.following))
    # A while later.
    following = made(days_ago=0.05)
    install(api, SecretContent(served=old, following=following))
    assert run_job(api.url, tmp_path / "service-account").returncode == 0
    assert kept_in(api).served == following
    assert "next.key" not in api.shelf.get("secrets", SECRET)["data"]
    assert old.certificate_pem in published(api), "a replica that lags still serves it"
    check_served(api, tmp_path)


@pytest.mark.parametrize("lost", ["emptied", "made anew"])
def test_a_secret_that_is_lost_is_filled_and_what_is_served_meanwhile_stays_trusted(
    api: FakeApiServer, tmp_path: Path, lost: str
) -> None:
    old = made()
    install(api, SecretContent(served=old))
    if lost == "emptied":
        api.shelf.patch("secrets", SECRET, {"data": None})
    else:
        # As `helm upgrade` does.
        api.shelf.delete("secrets", SECRET)
        api.shelf.create("secrets", {"metadata": {"name": SECRET}, "type": "Opaque"})
    assert run_job(api.url, tmp_path / "service-account").returncode == 0
    assert kept_in(api).served != old
    assert old.certificate_pem in published(api)
    check_served(api, tmp_path)


def test_past_the_end_a_new_one_is_served_at_once(api: FakeApiServer, tmp_path: Path) -> None:
    """A CronJob that was suspended for a year, or a clock that was wrong."""
    old = made(days_ago=400)
    install(api, SecretContent(served=old))
    assert run_job(api.url, tmp_path / "service-account").returncode == 0
    assert old.certificate_pem not in published(api)
    check_served(api, tmp_path)


@pytest.mark.parametrize("resource", ["secrets", CONFIGURATIONS])
async def test_an_object_that_is_not_there_is_waited_for(api: FakeApiServer, tmp_path: Path, resource: str) -> None:
    """Helm makes the configuration after the Job."""
    name = {"secrets": SECRET}.get(resource, CONFIGURATION)
    there = api.shelf.get(resource, name)
    api.shelf.delete(resource, name)
    renewing = asyncio.create_task(renew_certificates(settings_in(api, tmp_path)))

    def missed() -> bool:
        return any(one.resource == resource and one.status == 404 for one in api.asked)

    await asyncio.to_thread(wait_until, missed, HANG_SECONDS, "it is missed")
    assert not any(one.verb == "patch" for one in api.asked), "nothing is half done"
    api.shelf.create(resource, there)
    await asyncio.wait_for(renewing, HANG_SECONDS)
    check_served(api, tmp_path)


@pytest.mark.parametrize("verb", ["get", "patch"])
@pytest.mark.parametrize("resource", ["secrets", CONFIGURATIONS])
def test_without_a_right_it_ends_with_an_error_that_names_it(
    api: FakeApiServer, tmp_path: Path, verb: str, resource: str
) -> None:
    allowed = api.allowed
    api.allowed = lambda *asked: asked[:2] != (verb, resource) and allowed(*asked)
    done = run_job(api.url, tmp_path / "service-account", "--wait-seconds=0")
    assert done.returncode == 1
    assert f'cannot {verb} resource "{resource}"' in done.stderr
    assert "`helm upgrade`" in done.stderr
    assert kept_in(api).served is None, "nothing is served that is not published"
    assert not published(api) or (verb, resource) == ("patch", CONFIGURATIONS)


@pytest.mark.parametrize("mood", [Mood.BROKEN, Mood.DEAF])
async def test_an_api_server_in_trouble_is_asked_again(api: FakeApiServer, tmp_path: Path, mood: Mood) -> None:
    api.mood = mood
    with capture_logs() as lines:
        renewing = asyncio.create_task(renew_certificates(settings_in(api, tmp_path)))
        await until(lambda: bool(lines))
        api.mood = Mood.WELL
        await asyncio.wait_for(renewing, HANG_SECONDS)
    assert lines[0]["event"] == "certificates.waiting"
    check_served(api, tmp_path)


async def test_it_gives_up_in_time_and_says_why(api: FakeApiServer, tmp_path: Path) -> None:
    api.mood = Mood.BROKEN
    with pytest.raises(KeepstepError, match=r"answers 500 .* etcdserver: leader changed") as caught:
        await renew_certificates(settings_in(api, tmp_path, wait_seconds=0.1))
    assert caught.value.kind is ErrorKind.UNREACHABLE


@pytest.mark.parametrize("does_half", [False, True])
async def test_one_that_is_overtaken_between_its_calls_begins_again(
    api: FakeApiServer, tmp_path: Path, does_half: bool
) -> None:
    """The Job of an upgrade and the CronJob's: before each call of one the other does its work, or only publishes."""
    allowed = api.allowed
    for number in range(5):
        calls = 0

        def overtaking(verb: str, resource: str, name: str, at: int = number) -> bool:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                other = SecretContent(served=made())
                if does_half:
                    publish(api, bundle_of(other, read_bundle(base64.b64encode(published(api)).decode()), NOW))
                else:
                    install(api, other)
            return allowed(verb, resource, name)

        api.shelf.patch("secrets", SECRET, {"data": None})
        api.allowed = overtaking
        await renew_certificates(settings_in(api, tmp_path))
        check_served(api, tmp_path)
    assert 409 in {one.status for one in api.asked}


async def test_while_the_secret_cannot_be_written_nothing_pushes_out_what_is_served(
    api: FakeApiServer, tmp_path: Path
) -> None:
    """It was emptied, and something refuses to have it filled: `immutable: true`, or a policy."""
    old = made()
    install(api, SecretContent(served=old))
    api.shelf.patch("secrets", SECRET, {"data": None})
    before = published(api)
    allowed = api.allowed
    api.allowed = lambda *asked: asked[:2] != ("patch", "secrets") and allowed(*asked)
    for _ in range(6):
        with pytest.raises(KeepstepError):
            await renew_certificates(settings_in(api, tmp_path, wait_seconds=0))
    assert published(api) == before


def test_it_stays_within_the_memory_that_the_chart_gives_it(api: FakeApiServer, tmp_path: Path) -> None:
    program = (
        "import sys; from keepstep_agent.cli import cli\n"
        "try: cli(sys.argv[1:])\n"
        "finally: print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    )
    settings = settings_in(api, tmp_path)
    flags = [f"--{name}={getattr(settings, name)}" for name in ("namespace", "service", "secret", "configuration")]
    flags += [f"--kubernetes-host={settings.kubernetes_host}", f"--kubernetes-port={settings.kubernetes_port}"]
    done = subprocess.run(
        [sys.executable, "-c", program, "certificates", *flags, f"--service-account={settings.service_account}"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    (container,) = certificate_pods(render())[0]["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) * 1024
    assert int(done.stderr.split()[-1]) < limit * 0.9
