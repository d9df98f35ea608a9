"""The dispatcher's promise: every command ends in exactly one event, whatever happens to its task."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mooring_agent.adapters.clock import SystemClock
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.volume.staging_area import LocalStagingArea
from mooring_agent.core.commands import CancelWork, CreateUpload, PutFile
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.events import Event, WorkCancelled, WorkFailed
from mooring_agent.core.model import Fingerprint, Region
from mooring_agent.core.settings import Settings, StoreSettings
from mooring_agent.core.state import State
from mooring_agent.core.work import Operation, WorkId
from mooring_agent.runtime.dispatcher import Dispatcher
from mooring_agent.runtime.first_look import FirstLook
from mooring_agent.runtime.pruner import Pruner
from mooring_agent.runtime.ready_store import ReadyStore
from mooring_agent.runtime.reconciler import Reconciler


async def _events_of(tmp_path: Path, *commands: PutFile | CreateUpload | CancelWork) -> list[Event]:
    clock = SystemClock()
    store_settings = StoreSettings(destination=f"file://{tmp_path}/destination")
    settings = Settings(volume=str(tmp_path), checkpoint_directory=str(tmp_path), socket="", store=store_settings)
    state = State(settings=settings)
    events: list[Event] = []
    with ThreadPoolExecutor(2) as executor:
        staging = LocalStagingArea(tmp_path)
        store = ReadyStore(store_settings, RateLimiter(0))
        dispatcher = Dispatcher(
            store=store,
            staging=staging,
            reconciler=Reconciler(staging=staging, clock=clock, executor=executor, volume=tmp_path),
            pruner=Pruner(state=lambda: state, clock=clock, state_directory=tmp_path),
            first_look=FirstLook(lambda: state),
            clock=clock,
            executor=executor,
            post=events.append,
            on_ring=lambda _: None,
            on_lift_cap=lambda: None,
            on_spared=lambda: None,
            on_exit=lambda _: None,
        )
        async with asyncio.TaskGroup() as tasks:
            for command in commands:
                dispatcher.dispatch(tasks, command)
        # Callbacks of tasks that ended last run in the loop's next turn.
        await asyncio.sleep(0)
        await store.close()
    return events


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
