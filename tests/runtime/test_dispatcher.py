"""The dispatcher's promise: every command ends in exactly one event, whatever happens to its task."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.agent.commands import CancelWork, CheckSent, Command, CreateUpload, PutFile, Release
from keepstep_agent.core.agent.events import DurableEvent, Event, Released, SentChecked, WorkCancelled, WorkFailed
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.file_lists import staged_files
from keepstep_agent.core.model import Fingerprint, Kind, RankManifest, Region, SaveInfo, StagedFile
from keepstep_agent.core.settings.values import Settings, StoreSettings
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.dispatcher import Dispatcher
from keepstep_agent.runtime.work.duplicate_save_guard import DuplicateSaveGuard
from keepstep_agent.runtime.work.pruner import Pruner
from keepstep_agent.runtime.work.ready_store import ReadyStore
from keepstep_agent.runtime.work.reconciler import Reconciler


async def _events_of(
    tmp_path: Path,
    *commands: Command,
    staging: LocalStagingArea | None = None,
    happened: Callable[[Event], None] = lambda _: None,
) -> list[Event]:
    """What came of the commands; `happened` hears each event at once."""
    clock = SystemClock()
    store_settings = StoreSettings(destination=f"file://{tmp_path}/destination")
    settings = Settings(volume=str(tmp_path), checkpoint_directory=str(tmp_path), socket="", store=store_settings)
    state = State(settings=settings)
    events: list[Event] = []

    def post(event: Event) -> None:
        events.append(event)
        happened(event)

    staging = staging or LocalStagingArea(tmp_path)
    with ThreadPoolExecutor(2) as executor, ThreadPoolExecutor(2) as readers:
        store = ReadyStore(store_settings, RateLimiter(0))
        dispatcher = Dispatcher(
            store=store,
            staging=staging,
            reconciler=Reconciler(staging=staging, clock=clock, executor=executor, volume=tmp_path),
            pruner=Pruner(state=lambda: state, clock=clock, state_directory=tmp_path),
            duplicate_guard=DuplicateSaveGuard(lambda: state),
            clock=clock,
            executor=executor,
            readers=readers,
            may_read_again=lambda kind: kind is not Kind.JUST_IN_TIME,
            post=post,
            recall=_recall_nothing,
            on_save_request=lambda _: None,
            on_lift_cap=lambda: None,
            on_cancelled=lambda: None,
            on_exit=lambda _: None,
        )
        async with asyncio.TaskGroup() as tasks:
            for command in commands:
                dispatcher.dispatch(tasks, command)
        # Callbacks of tasks that ended last run in the loop's next turn.
        await asyncio.sleep(0)
        await store.close()
    return events


async def _recall_nothing(save: str) -> tuple[DurableEvent, ...]:
    raise AssertionError(f"nobody set {save} aside")


async def test_work_that_is_cancelled_before_its_first_step_ends_too(tmp_path: Path) -> None:
    work = WorkId(Operation.CREATE_UPLOAD, "save", 0, "file")
    events = await _events_of(tmp_path, CreateUpload(work=work, key="name/save/file"), CancelWork(work=work))
    assert [(type(event), event.work) for event in events if isinstance(event, WorkCancelled)] == [
        (WorkCancelled, work)
    ]
    assert len(events) == 1


async def test_a_file_that_is_gone_is_a_classified_failure(tmp_path: Path) -> None:
    work = WorkId(Operation.PUT_FILE, "save", 0, "file")
    region = Region(
        volume=str(tmp_path),
        path="gone",
        offset_bytes=0,
        size_bytes=5,
        fingerprint=Fingerprint(size_bytes=5, mtime_ns=1, inode=1),
    )
    events = await _events_of(tmp_path, PutFile(work=work, key="name/save/file", region=region))
    assert [event.kind for event in events if isinstance(event, WorkFailed)] == [ErrorKind.FILE_MISSING]
    assert len(events) == 1


class _SlowReading(LocalStagingArea):
    """Reading again what was sent ends when `go_on` is set."""

    def __init__(self, volume: Path, go_on: threading.Event) -> None:
        super().__init__(volume)
        self._go_on = go_on

    def check_sent(self, manifest: RankManifest, files: Sequence[StagedFile], *, may_read: Callable[[], bool]) -> None:
        if may_read() and not self._go_on.wait(HANG_SECONDS):
            self._go_on.set()
            raise AssertionError("what must not wait waits for a reading")


def _check_sent(save: str, kind: Kind) -> CheckSent:
    info = SaveInfo(save=save, name="checkpoint-1", step=1, kind=kind, world_size=1)
    manifest = RankManifest(info=info, rank=0, saved_at=0.0, files=())
    return CheckSent(work=WorkId(Operation.CHECK_SENT, save, 0), manifest=manifest, pins=staged_files(()))


async def test_neither_other_work_nor_a_just_in_time_save_waits_for_a_second_reading(tmp_path: Path) -> None:
    periodic = [_check_sent(f"periodic-{number}", Kind.PERIODIC) for number in range(8)]
    release = Release(work=WorkId(Operation.RELEASE, "over"), is_committed=True)
    last = _check_sent("last", Kind.JUST_IN_TIME)
    go_on, awaited = threading.Event(), {release.work, last.work}

    def happened(event: Event) -> None:
        if isinstance(event, Released | SentChecked):
            awaited.discard(event.work)
        if not awaited:
            go_on.set()

    commands: tuple[Command, ...] = (*periodic, release, last)
    events = await _events_of(tmp_path, *commands, staging=_SlowReading(tmp_path, go_on), happened=happened)
    assert [event for event in events if isinstance(event, WorkFailed)] == []
    assert len(events) == len(commands)
