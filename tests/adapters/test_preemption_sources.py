"""Each cloud's preemption source, over the cloud's own protocol, and how the cloud is detected."""

import asyncio
import datetime
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import pytest
from tests.fakes.fake_preemption_source import FakePreemptionSource
from tests.harness.bounds import HANG_SECONDS
from tests.servers.metadata_servers import AwsServer, AzureServer, GcpServer, MetadataServer
from tests.servers.process import free_port
from tests.servers.scripted import Asked, ScriptedServer, response

from keepstep_agent.adapters.preemption import clouds, the_one_that_answers
from keepstep_agent.adapters.preemption.aws import AwsPreemption
from keepstep_agent.adapters.preemption.azure import AzurePreemption
from keepstep_agent.adapters.preemption.gcp import GcpPreemption
from keepstep_agent.adapters.preemption.metadata_service import Answer, MetadataService
from keepstep_agent.core.errors import ErrorKind, PreemptionSourceError
from keepstep_agent.ports import PreemptionSource, TerminationNotice

SPOT_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
CLOUDS: dict[str, Callable[[MetadataService], PreemptionSource]] = {
    "aws": AwsPreemption,
    "gcp": GcpPreemption,
    "azure": AzurePreemption,
}
SERVERS: dict[str, Callable[[], MetadataServer]] = {"aws": AwsServer, "gcp": GcpServer, "azure": AzureServer}


class World(Protocol):
    """What happens to a machine; the servers and the fake have it alike."""

    def announce(self, seconds: float, now: float) -> float: ...
    def maintain(self, seconds: float, now: float) -> float: ...
    def spare(self) -> None: ...
    def take_back(self) -> None: ...


class FakeWorld:
    def __init__(self, source: FakePreemptionSource) -> None:
        self._source = source

    def announce(self, seconds: float, now: float) -> float:
        self._source.standing.append(TerminationNotice(key=f"spot {now}", left_seconds=seconds, source="fake spot"))
        return now + seconds

    maintain = announce

    def spare(self) -> None:
        pass

    def take_back(self) -> None:
        self._source.standing.clear()


@pytest.fixture(params=["fake", *SERVERS])
async def told(request: pytest.FixtureRequest) -> AsyncIterator[tuple[World, PreemptionSource]]:
    if request.param == "fake":
        fake = FakePreemptionSource()
        yield FakeWorld(fake), fake
        return
    with SERVERS[request.param]() as server:
        source = only(request.param, server.url)
        yield server, source
        await source.close()


def only(cloud: str, url: str) -> PreemptionSource:
    (found,) = clouds(cloud, url)
    return found


async def look(source: PreemptionSource) -> Sequence[TerminationNotice]:
    async with asyncio.timeout(HANG_SECONDS):
        return await source.look()


def was_left(notice: TerminationNotice, deadline: float, began: float) -> bool:
    """Until `deadline`, at some moment between `began` and now; clouds round by seconds."""
    return deadline - time.time() - 5 <= notice.left_seconds <= deadline - began + 5


async def test_a_machine_that_stays_has_no_notice_and_says_so_at_once(told: tuple[World, PreemptionSource]) -> None:
    _, source = told
    assert await source.answers()
    assert list(await look(source)) == []


async def test_the_end_of_a_spot_machine_is_told_with_its_deadline_for_as_long_as_it_stands(
    told: tuple[World, PreemptionSource],
) -> None:
    world, source = told
    began = time.time()
    deadline = world.announce(90, began)
    (first,) = await look(source)
    assert was_left(first, deadline, began)
    assert source.cloud in first.source


async def test_a_notice_comes_to_whoever_has_looked_before_and_keeps_its_key(
    told: tuple[World, PreemptionSource],
) -> None:
    world, source = told
    assert list(await look(source)) == []
    world.announce(90, time.time())
    (first,) = await look(source)
    world.maintain(90, time.time())
    again = await look(source)
    assert first.key in {notice.key for notice in again}


async def test_a_maintenance_that_ends_the_machine_is_a_notice_too(told: tuple[World, PreemptionSource]) -> None:
    world, source = told
    began = time.time()
    deadline = world.maintain(600, began)
    (notice,) = await look(source)
    assert was_left(notice, deadline, began)


async def test_what_is_taken_back_stands_no_longer(told: tuple[World, PreemptionSource]) -> None:
    world, source = told
    world.maintain(600, time.time())
    assert len(await look(source)) == 1
    world.take_back()
    assert list(await look(source)) == []


async def test_what_does_not_end_this_machine_is_no_notice(told: tuple[World, PreemptionSource]) -> None:
    world, source = told
    world.spare()
    assert list(await look(source)) == []


async def test_nobody_is_polled_faster_than_once_a_second(told: tuple[World, PreemptionSource]) -> None:
    _, source = told
    assert source.pause_seconds >= (5 if source.cloud == "aws" else 1)


@pytest.mark.parametrize("cloud", SERVERS)
@pytest.mark.parametrize("status", [403, 429, 500, 503])
async def test_an_error_of_the_service_is_an_error_with_a_hint_and_passes(cloud: str, status: int) -> None:
    with SERVERS[cloud]() as server:
        source = only(cloud, server.url)
        server.fault = status
        assert not await source.answers()
        with pytest.raises(PreemptionSourceError, match=str(status)) as refusal:
            await look(source)
        assert refusal.value.hint
        server.fault = None
        assert list(await look(source)) == []
        await source.close()


@pytest.mark.parametrize("cloud", SERVERS)
async def test_where_nothing_listens_that_is_said_in_moments(cloud: str) -> None:
    source = only(cloud, f"http://127.0.0.1:{free_port()}")
    assert not await source.answers()
    with pytest.raises(PreemptionSourceError) as refusal:
        await look(source)
    assert refusal.value.kind is ErrorKind.UNREACHABLE
    await source.close()


@pytest.mark.parametrize("cloud", SERVERS)
async def test_no_proxy_is_asked_for_an_address_of_the_machine_itself(
    cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with SERVERS[cloud]() as server:
        source = only(cloud, server.url)
        assert list(await look(source)) == []
        await source.close()


@pytest.mark.parametrize("cloud", SERVERS)
async def test_auto_finds_the_cloud_that_answers(cloud: str) -> None:
    with SERVERS[cloud]() as server:
        found = await the_one_that_answers(clouds("auto", server.url))
        assert found is not None
        assert found.cloud == cloud
        await found.close()


async def test_auto_finds_nobody_elsewhere() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert await the_one_that_answers(clouds("auto", nowhere)) is None


async def test_a_token_of_aws_is_used_until_it_has_expired_and_then_renewed() -> None:
    with AwsServer() as server:
        source = AwsPreemption(MetadataService(server.url))
        for _ in range(3):
            await look(source)
        assert len(server.times_asked("/token")) == 1
        server.expire_tokens()
        assert list(await look(source)) == []
        assert len(server.times_asked("/token")) == 2
        await source.close()


async def test_a_pod_beyond_the_hop_limit_of_aws_is_told_how_to_mend_it() -> None:
    with AwsServer(hop_limit_reached=True) as server:
        source = AwsPreemption(MetadataService(server.url))
        assert await source.answers()
        with pytest.raises(PreemptionSourceError) as refusal:
            await look(source)
        assert "HttpPutResponseHopLimit" in refusal.value.hint
        await source.close()


async def test_version_1_of_aws_is_enough_where_the_token_is_lost_on_the_way() -> None:
    with AwsServer(hop_limit_reached=True, tokens_required=False) as server:
        source = AwsPreemption(MetadataService(server.url))
        server.announce(90, time.time())
        assert len(await look(source)) == 1
        await look(source)
        # It takes its time to find out, so not at every look.
        assert len(server.times_asked("/token")) == 1
        await source.close()


async def test_a_metadata_service_of_aws_that_is_switched_off_is_said_to_be() -> None:
    with AwsServer() as server:
        server.disabled = True
        source = AwsPreemption(MetadataService(server.url))
        assert not await source.answers()
        with pytest.raises(PreemptionSourceError) as refusal:
            await look(source)
        assert refusal.value.kind is ErrorKind.ACCESS_DENIED
        await source.close()


@pytest.mark.parametrize(
    "spot",
    [[], "soon", {"action": "terminate"}, {"action": "terminate", "time": "soon"}, {"action": "stop", "time": 3}],
)
async def test_what_nobody_understands_is_an_error_and_not_the_end(spot: object) -> None:
    with AwsServer() as server:
        server.spot = spot
        source = AwsPreemption(MetadataService(server.url))
        with pytest.raises(PreemptionSourceError, match="cannot parse"):
            await look(source)
        await source.close()


async def test_gcp_is_waited_for_rather_than_polled() -> None:
    with GcpServer() as server:
        source = GcpPreemption(MetadataService(server.url))
        assert list(await look(source)) == []
        waiting = asyncio.create_task(look(source))
        await _until(lambda: len(server.times_asked("preempted")) == 2)
        assert not waiting.done()
        server.announce(30, time.time())
        assert len(await waiting) == 1
        assert len(server.times_asked("preempted")) == 2
        await source.close()


async def test_one_key_that_gcps_server_does_not_know_hides_not_the_other() -> None:
    with GcpServer() as server:
        del server.values["maintenance-event"]
        source = GcpPreemption(MetadataService(server.url))
        assert list(await look(source)) == []
        server.announce(30, time.time())
        assert len(await look(source)) == 1
        assert len(server.times_asked("maintenance-event")) == 1
        await source.close()


async def test_a_metadata_server_that_knows_none_of_the_keys_is_an_error() -> None:
    with GcpServer() as server:
        server.values.clear()
        source = GcpPreemption(MetadataService(server.url))
        with pytest.raises(PreemptionSourceError) as refusal:
            await look(source)
        assert refusal.value.kind is ErrorKind.NOT_FOUND
        await source.close()


async def test_an_event_of_azure_that_has_begun_is_due_now() -> None:
    with AzureServer() as server:
        source = AzurePreemption(MetadataService(server.url))
        server.maintain(600, time.time())
        (scheduled,) = await look(source)
        server.begin()
        (begun,) = await look(source)
        assert begun.key == scheduled.key
        assert begun.left_seconds < scheduled.left_seconds - 60
        await source.close()


async def test_a_machine_of_azure_is_known_whatever_the_case_of_its_name() -> None:
    with AzureServer() as server:
        source = AzurePreemption(MetadataService(server.url))
        await look(source)
        server.name = server.name.upper()
        server.announce(30, time.time())
        assert len(await look(source)) == 1
        await source.close()


@pytest.mark.parametrize("wrong_by_seconds", [-100.0, 100.0])
@pytest.mark.parametrize("cloud", SERVERS)
async def test_a_machines_clock_that_is_wrong_changes_nothing_of_the_time_that_is_left(
    cloud: str, wrong_by_seconds: float
) -> None:
    """The service tells the date with every answer; what a clock was when the agent started is of no matter at all."""
    with SERVERS[cloud]() as server:
        source = CLOUDS[cloud](MetadataService(server.url, wall=lambda: time.time() + wrong_by_seconds))
        assert list(await look(source)) == []
        began = time.time()
        deadline = server.announce(SPOT_SECONDS[cloud], began)
        (notice,) = await look(source)
        assert was_left(notice, deadline, began)
        await source.close()


@pytest.mark.parametrize(("wrong_by_seconds", "left_seconds"), [(-100.0, 120), (0.0, 120), (100.0, 20)])
async def test_a_spot_notice_without_a_date_never_seems_farther_ahead_than_it_can_be(
    wrong_by_seconds: float, left_seconds: float
) -> None:
    began = time.time()
    ends = datetime.datetime.fromtimestamp(began + 120, datetime.UTC)

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        told = json.dumps({"action": "terminate", "time": ends.isoformat()})
        writer.write(response(200, told.encode() if asked.method == "GET" else b"token"))

    async with ScriptedServer(answer) as server:
        source = AwsPreemption(MetadataService(server.url, wall=lambda: time.time() + wrong_by_seconds))
        (notice,) = await look(source)
        assert was_left(notice, began + left_seconds, began)
        await source.close()


def test_an_address_without_scheme_is_taken_as_gces_variable_has_it() -> None:
    assert MetadataService("metadata.google.internal").url == "http://metadata.google.internal"
    assert MetadataService("http://127.0.0.1:1338/").url == "http://127.0.0.1:1338"
    assert MetadataService().url == "http://169.254.169.254"


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not holds():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.001)


def test_an_answer_of_any_depth_is_not_understood() -> None:
    answer = Answer(status=200, headers={}, text="[" * 100_000, at=0.0)
    with pytest.raises(PreemptionSourceError, match="cannot parse"):
        answer.json()
