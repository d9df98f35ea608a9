"""Runs the core's commands as tasks; each ends in exactly one event, whatever happens to it.

Owns which task does which work; the core decides what work is done.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final, assert_never

import structlog

from keepstep_agent.adapters import priority
from keepstep_agent.catalog.object_reads import if_there
from keepstep_agent.core.agent.commands import (
    Abandon,
    Ask,
    CancelTermination,
    CancelWork,
    CheckSent,
    Command,
    Commit,
    CompleteUpload,
    CreateUpload,
    Exit,
    LiftBandwidthCap,
    Prune,
    PutFile,
    PutPack,
    Recall,
    Reconcile,
    Record,
    Release,
    RequestSave,
    SendPart,
    Stage,
    WorkCommand,
    WriteManifest,
)
from keepstep_agent.core.agent.events import (
    Abandoned,
    Answered,
    DurableEvent,
    Event,
    Recalled,
    Released,
    SentChecked,
    WorkCancelled,
    WorkFailed,
)
from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.errors import ErrorKind, KeepstepError, VolumeError
from keepstep_agent.core.model import Kind
from keepstep_agent.core.stored.object_layout import save_prefix
from keepstep_agent.ports import Clock, StagingArea, StoreWriter
from keepstep_agent.runtime.engine.telemetry import FailureLog
from keepstep_agent.runtime.work import transfers
from keepstep_agent.runtime.work.committer import Committer, sweep_uploads, write_manifest
from keepstep_agent.runtime.work.duplicate_save_guard import DuplicateSaveGuard
from keepstep_agent.runtime.work.pruner import Pruner
from keepstep_agent.runtime.work.ready_store import ReadyStore
from keepstep_agent.runtime.work.reconciler import Reconciler

_PACKS_IN_MEMORY: Final = 4

log = structlog.get_logger("keepstep.dispatcher")


class Dispatcher:
    """Runs commands in a TaskGroup. `post` takes the events; the `on_…` callbacks carry out commands without events.

    `readers` has the threads that read sent files again, while `may_read_again` allows it for the kind of save.
    """

    def __init__(
        self,
        *,
        store: ReadyStore,
        staging: StagingArea,
        reconciler: Reconciler,
        pruner: Pruner,
        duplicate_guard: DuplicateSaveGuard,
        clock: Clock,
        executor: Executor,
        readers: Executor,
        may_read_again: Callable[[Kind], bool],
        post: Callable[[Event], None],
        recall: Callable[[str], Awaitable[tuple[DurableEvent, ...]]],
        on_save_request: Callable[[RequestSave], None],
        on_lift_cap: Callable[[], None],
        on_cancelled: Callable[[], None],
        on_exit: Callable[[Exit], None],
    ) -> None:
        self._store = store
        self._staging = staging
        self._reconciler = reconciler
        self._pruner = pruner
        self._duplicate_guard = duplicate_guard
        self._clock = clock
        self._executor = executor
        self._readers = readers
        self._may_read_again = may_read_again
        self._post = post
        self._recall = recall
        self._on_save_request = on_save_request
        self._on_lift_cap = on_lift_cap
        self._on_cancelled = on_cancelled
        self._on_exit = on_exit
        self._committer = Committer(clock)
        self._pack_room = asyncio.Semaphore(_PACKS_IN_MEMORY)
        self._failures = FailureLog()
        self._tasks: dict[WorkId, asyncio.Task[None]] = {}

    def dispatch(self, tasks: asyncio.TaskGroup, command: Command) -> None:
        """Begin a command. Never blocks, and raises nothing but our own bugs."""
        match command:
            case CancelWork():
                task = self._tasks.get(command.work)
                if task is not None:
                    task.cancel()
            case RequestSave():
                self._on_save_request(command)
            case LiftBandwidthCap():
                self._on_lift_cap()
            case CancelTermination():
                self._on_cancelled()
            case Exit():
                self._on_exit(command)
            case Record():
                raise AssertionError("decisions are applied by the core, before commands come out")
            case _:
                self._begin(tasks, command)

    def _begin(self, tasks: asyncio.TaskGroup, command: WorkCommand) -> None:
        work = command.work

        def ended(task: asyncio.Task[None]) -> None:
            # A task that is cancelled before its first step never enters `_run`: the core would wait for it for ever.
            if task.cancelled():
                del self._tasks[work]
                self._post(WorkCancelled(at=self._clock.now(), work=work))

        self._tasks[work] = tasks.create_task(self._run(command), name=str(work))
        self._tasks[work].add_done_callback(ended)

    def cancel_all(self) -> None:
        """Cancel all work, because the agent ends. What is on the wire goes on after the next start."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def _run(self, command: WorkCommand) -> None:
        work = command.work
        event: Event
        try:
            event = await self._perform(command)
        except asyncio.CancelledError:
            # If the core cancelled the work, this is an outcome like others; at the agent's end nobody reads it.
            event = WorkCancelled(at=self._clock.now(), work=work)
        except KeepstepError as error:
            self._failures.failed(work, error)
            path = error.path if isinstance(error, VolumeError) else ""
            event = self._failure(work, error.kind, str(error), error.hint, path)
        except Exception as error:
            # A bug of our own must not take the other checkpoints down; the work is retried as if the store had failed.
            log.exception("work.crashed", operation=work.operation.value, save=work.save)
            hint = "please report this with the log"
            event = self._failure(work, ErrorKind.STORE_FAILED, f"{type(error).__name__}: {error}", hint)
        del self._tasks[work]
        self._post(event)

    def _failure(self, work: WorkId, kind: ErrorKind, message: str, hint: str, path: str = "") -> WorkFailed:
        jitter = random.random()  # noqa: S311 - spreads retries, guards nothing
        return WorkFailed(
            at=self._clock.now(), work=work, kind=kind, message=message, hint=hint, jitter=jitter, path=path
        )

    async def _perform(self, command: WorkCommand) -> Event:
        match command:
            case Stage():
                return await transfers.stage(self._staging, self._clock, self._executor, command)
            case Release():
                return await self._release(command)
            case CheckSent():
                return await self._check_sent(command)
            case Recall():
                events = await self._recall(command.work.save)
                return Recalled(at=self._clock.now(), work=command.work, events=events)
            case _:
                pass
        store = await self._store.get()
        if isinstance(command, CreateUpload | PutFile | PutPack | WriteManifest):
            # It may send the first byte of its save.
            await self._duplicate_guard.require_new(store, command.work.save)
        match command:
            case Abandon():
                return await self._abandon(store, command)
            case Reconcile():
                return await self._reconciler.reconcile(store, command)
            case CreateUpload():
                return await transfers.create_upload(store, self._clock, command)
            case SendPart():
                return await transfers.send_part(store, self._clock, self._executor, command)
            case PutFile():
                return await transfers.put_file(store, self._clock, self._executor, command)
            case PutPack():
                return await transfers.put_pack(store, self._clock, self._executor, self._pack_room, command)
            case CompleteUpload():
                return await transfers.complete_upload(store, self._clock, command)
            case WriteManifest():
                return await write_manifest(store, self._clock, command)
            case Commit():
                return await self._committer.commit(store, command)
            case Prune():
                return await self._pruner.prune(store, command)
            case Ask():
                await if_there(store.head(command.key))
                return Answered(at=self._clock.now(), work=command.work)
            case _:
                assert_never(command)

    async def _check_sent(self, command: CheckSent) -> SentChecked:
        may_read = partial(self._may_read_again, command.manifest.info.kind)
        check = partial(self._staging.check_sent, command.manifest, command.pins, may_read=may_read)
        # Reading takes seconds per GB, so it must not delay other work, nor saves that are not read again.
        executor = self._readers if may_read() else self._executor
        await asyncio.get_running_loop().run_in_executor(executor, check)
        return SentChecked(at=self._clock.now(), work=command.work)

    async def _abandon(self, store: StoreWriter, command: Abandon) -> Abandoned:
        for key, upload in command.uploads:
            await store.abort_upload(key, upload)
        if command.sweep_keys:
            ours = frozenset(command.sweep_keys)
            await sweep_uploads(store, save_prefix(command.info), of=ours, keep=frozenset())
        return Abandoned(at=self._clock.now(), work=command.work)

    async def _release(self, command: Release) -> Released:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._staging.release, command.work.save)
        self._duplicate_guard.forget(command.work.save)
        self._committer.forget(command.work.save)
        # The checkpoint's memory is free, but this process still holds it.
        await loop.run_in_executor(self._executor, priority.malloc_trim)
        return Released(at=self._clock.now(), work=command.work)
