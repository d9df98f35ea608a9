"""What Kubernetes is told of checkpoints: little, in order, and never in anybody's way."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tests.core.play import Play
from tests.fakes.fake_cluster import FakeCluster
from tests.harness.bounds import HANG_SECONDS
from tests.runtime.patience import until

from keepstep_agent.core.agent.events import Committed, Failed, StepSeen, WorkFailed
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.progress import StepSign
from keepstep_agent.core.settings.values import Duration, ProgressSettings
from keepstep_agent.runtime.outside.kubernetes_events import KubernetesEvents
from keepstep_agent.runtime.outside.outbox import Outbox, Pace, last_words
from keepstep_agent.runtime.work.fetches import FetchProgress
from keepstep_api.names import ANNOTATION_LAST_COMMITTED

LONG_SECONDS = 3600.0


class StillClock:
    def now(self) -> float:
        return 0.0


class Pod:
    def __init__(self) -> None:
        self.play = Play()
        self.cluster = FakeCluster()

    def news(self, *, between_annotations_seconds: float = LONG_SECONDS) -> KubernetesEvents:
        return KubernetesEvents(
            cluster=self.cluster,
            clock=StillClock(),
            between_annotations_seconds=between_annotations_seconds,
        )

    def announce(self, save: str, step: int, kind: Kind = Kind.PERIODIC) -> None:
        self.play.steps[save] = step
        self.play.announce(save, kind=kind)

    def commit(self, news: KubernetesEvents, save: str, step: int, kind: Kind = Kind.PERIODIC) -> None:
        self.announce(save, step, kind)
        work = WorkId(operation=Operation.COMMIT, save=save)
        news.hear(self.play.state, Committed(at=0.0, work=work))

    def lose(self, news: KubernetesEvents, save: str) -> None:
        event = Failed(at=0.0, save=save, kind=ErrorKind.FILE_CHANGED, reason="its files changed", hint="leave them")
        news.hear(self.play.state, event)

    def reasons(self) -> list[str]:
        return [event.reason for event in self.cluster.events]


@asynccontextmanager
async def telling(news: KubernetesEvents) -> AsyncIterator[None]:
    task = asyncio.create_task(Outbox(news, Pace(shortest_pause_seconds=0.001)).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
async def pod() -> Pod:
    return Pod()


async def test_a_just_in_time_save_is_an_event_and_every_commit_the_annotation(pod: Pod) -> None:
    news = pod.news()
    async with telling(news):
        pod.commit(news, "a", 10, Kind.JUST_IN_TIME)
        await until(lambda: bool(pod.cluster.annotations))
    assert pod.reasons() == ["CheckpointCommitted"]
    said = json.loads(pod.cluster.annotations[ANNOTATION_LAST_COMMITTED])
    assert said["step"] == 10
    assert set(said) == {"name", "step", "at"}


async def test_a_periodic_save_is_no_event(pod: Pod) -> None:
    news = pod.news()
    async with telling(news):
        pod.commit(news, "a", 10)
        await until(lambda: bool(pod.cluster.annotations))
    assert pod.reasons() == []


async def test_the_annotation_changes_seldom_and_the_newest_wins(pod: Pod) -> None:
    news = pod.news(between_annotations_seconds=0.2)
    async with telling(news):
        pod.commit(news, "a", 10)
        await until(lambda: len(pod.cluster.annotated) == 1)
        for step in (20, 30, 40):
            pod.commit(news, str(step), step)
        await until(lambda: len(pod.cluster.annotated) == 2)
    assert [json.loads(one)["step"] for one in pod.cluster.annotated] == [10, 40]


async def test_a_checkpoint_that_is_lost_is_a_warning_with_its_reason(pod: Pod) -> None:
    news = pod.news()
    pod.announce("a", 10)
    async with telling(news):
        pod.lose(news, "a")
        await until(lambda: bool(pod.cluster.events))
    (event,) = pod.cluster.events
    assert event.reason == "CheckpointLost"
    assert "its files changed" in event.message
    assert "leave them" in event.message


async def test_a_store_in_trouble_is_one_warning_however_many_requests_fail(pod: Pod) -> None:
    news = pod.news()
    pod.announce("a", 10)
    async with telling(news):
        for number in range(1, 20):
            work = WorkId(operation=Operation.SEND_PART, save="a", number=number)
            pod.play.state.breaker.failed(work, ErrorKind.ACCESS_DENIED, 0.5, 0.0, ending=False)
            failed = WorkFailed(
                at=0.0, work=work, kind=ErrorKind.ACCESS_DENIED, message="denied", hint="a key", jitter=0.5
            )
            news.hear(pod.play.state, failed)
        await until(lambda: bool(pod.cluster.events))
    assert pod.reasons() == ["StorageError"]


async def test_one_request_that_fails_is_no_news(pod: Pod) -> None:
    news = pod.news()
    work = WorkId(operation=Operation.SEND_PART, save="a", number=1)
    pod.play.state.breaker.failed(work, ErrorKind.TIMED_OUT, 0.5, 0.0, ending=False)
    news.hear(
        pod.play.state,
        WorkFailed(at=0.0, work=work, kind=ErrorKind.TIMED_OUT, message="late", hint="", jitter=0.5),
    )
    await last_words(news.to, news.send_last, in_a_hurry=True)
    assert pod.reasons() == []


async def test_what_the_account_may_not_is_said_once_and_the_other_goes_on(pod: Pod) -> None:
    news = pod.news(between_annotations_seconds=0.0)
    pod.cluster.forbidden = {"events"}
    with capture_logs() as logs:
        async with telling(news):
            for step in (10, 20, 30):
                pod.commit(news, str(step), step, Kind.JUST_IN_TIME)
                await until(lambda: ANNOTATION_LAST_COMMITTED in pod.cluster.annotations)
                pod.cluster.annotations.clear()
    assert [line["event"] for line in logs] == ["kubernetes.forbidden"]
    assert len(pod.cluster.annotated) == 3


async def test_while_the_cluster_is_away_the_oldest_news_is_dropped_and_the_rest_comes_later(pod: Pod) -> None:
    news = pod.news()
    pod.cluster.problem = ErrorKind.UNREACHABLE
    with capture_logs() as logs:
        async with telling(news):
            for number in range(100):
                pod.announce(str(number), number)
                pod.lose(news, str(number))
            await until(lambda: pod.cluster.calls >= 3)
            pod.cluster.problem = None
            await until(lambda: len(pod.cluster.events) == 32)
    assert "99" in pod.cluster.events[-1].message
    assert [line["event"] for line in logs] == ["outbox.not_taken", "outbox.taken_again"]


async def test_the_last_words_say_what_is_lost_and_what_was_not_told_yet(pod: Pod) -> None:
    news = pod.news()
    pod.commit(news, "a", 10)
    news.note_lost(["checkpoint-20 (step 20) is staged"])
    await last_words(news.to, news.send_last, in_a_hurry=True)
    assert pod.reasons() == ["CheckpointLost"]
    assert "checkpoint-20" in pod.cluster.events[0].message
    assert json.loads(pod.cluster.annotations[ANNOTATION_LAST_COMMITTED])["step"] == 10


async def test_the_last_words_do_not_wait_for_a_cluster_that_does_not_answer(pod: Pod) -> None:
    class Deaf(FakeCluster):
        async def tell(self, _event: object) -> None:
            await asyncio.Event().wait()

    news = KubernetesEvents(cluster=Deaf(), clock=StillClock())
    async with asyncio.timeout(HANG_SECONDS):
        news.note_lost(["checkpoint-20"])
        await last_words(news.to, news.send_last, in_a_hurry=True)


@pytest.mark.parametrize("trouble", ["", "the store is away"])
async def test_a_restore_that_takes_long_is_reported_with_what_the_store_said(trouble: str) -> None:
    pod = Pod()
    news = KubernetesEvents(cluster=pod.cluster, clock=StillClock(), between_restores_seconds=0.001)
    gib = 1024**3
    at = FetchProgress(save="s", step=7, done_bytes=gib, total_bytes=4 * gib, storage_error=trouble)
    watching = asyncio.create_task(news.watch_restore(lambda: at))
    async with telling(news):
        await until(lambda: bool(pod.cluster.events))
    watching.cancel()
    event = pod.cluster.events[0]
    assert (event.reason, event.event_type) == ("RestoreProgress", "Warning" if trouble else "Normal")
    assert event.message.startswith("step 7: 1.0 of 4.0 GiB are here")
    assert trouble in event.message


async def test_a_trainer_that_is_stuck_is_one_event_until_it_goes_on(pod: Pod) -> None:
    news, state = pod.news(), pod.play.state
    state.settings = replace(state.settings, progress=ProgressSettings(step_timeout=Duration(60)))
    first, second = StepSign(at=state.now, step=7), StepSign(at=state.now + 80, step=8)
    async with telling(news):
        for seconds, sign in ((0, first), (70, first), (80, second), (150, second)):
            event = StepSeen(at=first.at + seconds, newest=sign)
            advance(state, event)
            news.hear(state, event)
            news.hear(state, event)
        await until(lambda: len(pod.cluster.events) == 2)
    assert pod.reasons() == ["TrainerStuck", "TrainerStuck"]
    assert pod.cluster.events[0].message == "no step for 70 s, the last was step 7"


async def test_each_directory_that_nobody_stores_is_one_event_that_names_the_annotation(pod: Pod) -> None:
    news = pod.news()
    async with telling(news):
        for number in (0, 0, 1, 2, 3, 4, 5):
            news.tell_unprotected(f"/data/out-{number}")
        await until(lambda: len(pod.cluster.events) == 4)
    # A program that names a new one at each save pushes out no other news.
    assert pod.reasons() == ["OutputNotStored"] * 4
    assert "annotate the pod with keepstep.dev/output: /data/out-0, or with" in pod.cluster.events[0].message
