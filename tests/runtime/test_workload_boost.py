"""What Kueue is told of a run: cheap to preempt just after a commit, never above its own priority, in few patches."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs
from tests.core.play import Play
from tests.fakes.fake_api_server import FakeApiServer
from tests.runtime.patience import until
from tests.servers.tls import Certificate

from keepstep_agent.adapters.kubernetes import BOOST_ANNOTATION, JOB_LABEL
from keepstep_agent.core.errors import ClusterError, ErrorKind
from keepstep_agent.core.policies.priority_boost import priority_boost
from keepstep_agent.core.settings.values import ClusterSettings
from keepstep_agent.runtime.outside.outbox import Outbox, Pace, last_words
from keepstep_agent.runtime.outside.workload_boost import WorkloadBoost, workload_boost

DEPTH = 100
USUAL_SECONDS = 1800.0


@pytest.mark.parametrize(
    ("depth", "uncommitted_seconds", "boost"),
    [
        *((100, 0, -100), (100, 449, -100), (100, 450, -75), (100, 900, -50), (100, 1799, -25), (100, 1800, 0)),
        *((100, 10**9, 0), (100, -5, -100), (1, 0, -1), (0, 0, 0), (2**31 - 1, 0, -(2**31 - 1))),
    ],
)
def test_the_boost_rises_from_its_depth_to_nothing(depth: int, uncommitted_seconds: float, boost: int) -> None:
    found = priority_boost(depth, uncommitted_seconds=uncommitted_seconds, usual_seconds=USUAL_SECONDS)
    assert found == boost


class FakeWorkload:
    def __init__(self) -> None:
        self.boosts: list[int] = []
        self.problem: ErrorKind | None = None
        self.calls = 0

    async def boost(self, value: int) -> None:
        self.calls += 1
        if self.problem is not None:
            raise ClusterError(self.problem, "it may not", hint="a Role")
        self.boosts.append(value)

    async def close(self) -> None: ...


class Run:
    """A run whose commits and time a test moves."""

    def __init__(self) -> None:
        self.play = Play()
        cluster = ClusterSettings(cluster_events=True, priority_boost=DEPTH)
        self.play.state.settings = replace(self.play.state.settings, cluster=cluster)
        self.workload = FakeWorkload()
        self.boost = WorkloadBoost(
            workload=self.workload, state=lambda: self.play.state, clock=self, between_looks_seconds=0.001
        )

    def now(self) -> float:
        return self.play.now

    def commits(self, save: str) -> None:
        self.play.announce(save)
        self.play.finish()


@asynccontextmanager
async def kept(boost: WorkloadBoost) -> AsyncIterator[None]:
    task = asyncio.create_task(Outbox(boost, Pace(shortest_pause_seconds=0.001)).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_change_is_one_patch_and_the_end_takes_the_boost_back() -> None:
    run = Run()
    async with kept(run.boost):
        run.commits("a")
        await until(lambda: run.workload.boosts == [-DEPTH])
        run.play.now += USUAL_SECONDS / 2
        await until(lambda: run.workload.boosts == [-DEPTH, -DEPTH // 2])
        run.commits("b")
        await until(lambda: len(run.workload.boosts) > 2)
    await last_words(run.boost.to, run.boost.send_last, in_a_hurry=True)
    assert run.workload.boosts == [-DEPTH, -DEPTH // 2, -DEPTH, 0]


async def test_nothing_is_said_before_the_first_commit() -> None:
    run = Run()
    async with kept(run.boost):
        await asyncio.sleep(0.01)
    await last_words(run.boost.to, run.boost.send_last, in_a_hurry=True)
    assert run.workload.calls == 0


async def test_what_is_forbidden_is_said_once_and_tried_more_and_more_seldom() -> None:
    run = Run()
    run.workload.problem = ErrorKind.ACCESS_DENIED
    run.commits("a")
    with capture_logs() as lines:
        async with kept(run.boost):
            await until(lambda: run.workload.calls >= 4)
            run.workload.problem = None
            await until(lambda: bool(run.workload.boosts))
    assert [line["event"] for line in lines] == ["outbox.not_taken", "outbox.taken_again"]


@pytest.fixture
def server(certificate: Certificate) -> Iterator[FakeApiServer]:
    with FakeApiServer(namespace="ml", certificate=certificate) as server:
        for name, uid in (("other", "another"), ("job-llama", "job-uid")):
            server.shelf.create("workloads", {"metadata": {"name": name, "labels": {JOB_LABEL: uid}}})
        yield server


def boost_of(server: FakeApiServer, name: str) -> str | None:
    found: str | None = server.shelf.get("workloads", name)["metadata"].get("annotations", {}).get(BOOST_ANNOTATION)
    return found


@pytest.mark.parametrize("versions", [("v1beta1",), ("v1beta1", "v1beta2")])
@pytest.mark.parametrize(
    ("workload_name", "job_uid"),
    [("", "job-uid"), ("job-llama", "of-a-job-in-between"), ("made-anew-meanwhile", "job-uid")],
)
async def test_the_workload_of_the_pods_job_gets_the_annotation_and_no_other(
    server: FakeApiServer, tmp_path: Path, versions: tuple[str, ...], workload_name: str, job_uid: str
) -> None:
    server.versions = versions
    run = Run()
    run.commits("a")
    address = urlsplit(server.url)
    cluster = replace(
        run.play.state.settings.cluster,
        workload_name=workload_name,
        job_uid=job_uid,
        kubernetes_host=str(address.hostname),
        kubernetes_port=address.port or 0,
        service_account_directory=str(server.service_account(tmp_path / "account")),
    )
    settings = replace(run.play.state.settings, cluster=cluster)
    run.play.state.settings = settings
    with ThreadPoolExecutor(1) as executor:
        told = workload_boost(settings, state=lambda: run.play.state, clock=run, executor=executor)
        async with told as boost:
            assert boost is not None
            async with kept(boost):
                await until(lambda: boost_of(server, "job-llama") is not None)
    assert boost_of(server, "job-llama") == str(-DEPTH)
    assert boost_of(server, "other") is None


@pytest.mark.parametrize("other", ["another pod", "no cluster", "not asked"])
async def test_only_the_first_pod_of_a_job_in_a_cluster_tells_it(other: str) -> None:
    run = Run()
    settings = run.play.state.settings
    known = replace(settings.cluster, kubernetes_host="host", pod_uid="uid")
    told = {
        "another pod": replace(settings, node_rank=1, cluster=known),
        "no cluster": settings,
        "not asked": replace(settings, cluster=replace(known, priority_boost=0)),
    }
    with ThreadPoolExecutor(1) as executor:
        opened = workload_boost(told[other], state=lambda: run.play.state, clock=run, executor=executor)
        async with opened as boost:
            assert boost is None
