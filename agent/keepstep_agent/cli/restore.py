"""`keepstep restore`, which an init container or a person runs before the program."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
import structlog

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.volume import identity
from keepstep_agent.adapters.volume.own_entries import RESTORE_NOTE
from keepstep_agent.adapters.volume.shared_folders import make_shared_folders, make_state_directory
from keepstep_agent.adapters.volume.work_note import WorkNote
from keepstep_agent.catalog.markers import newest_of_run
from keepstep_agent.cli.autoload import copy_autoload
from keepstep_agent.cli.formatting import errors_reported, progress_line
from keepstep_agent.cli.store_options import destination_options
from keepstep_agent.cli.store_work import as_json_option, opened, print_json, run_work
from keepstep_agent.core.errors import ErrorKind, StoreError, VolumeError, printable
from keepstep_agent.core.limits import UNIX_SECONDS
from keepstep_agent.core.mirror.base import series_of
from keepstep_agent.core.quantities import amount
from keepstep_agent.core.settings.table import spelled
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.core.stored.ledger import Resumed
from keepstep_agent.ports import StoreWriter
from keepstep_agent.restore import init_step
from keepstep_agent.restore.predecessors import Predecessors, pod_id, withdraw_own
from keepstep_agent.restore.run_lease import RunLease, lease_of_run
from keepstep_agent.restore.snapshots import RestoredSnapshot, RestoredSnapshots, restore_snapshots
from keepstep_agent.restore.start_record import StartRecord, write_start_record
from keepstep_agent.runtime.process.open_volume import void_notices
from keepstep_api.names import LAZY, OFF

_TAKE_OVER: Final = "take-over"
_ANSWER_SECONDS: Final = 15.0
"""How long a run that restores nothing waits for a store that does not answer."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger("keepstep.run")


@click.command()
@destination_options(
    "volume",
    "checkpoint_directory",
    "state_directory",
    "restore",
    "fall_back_after",
    "watch",
    "transfer.max_concurrency",
    "disk.size_limit_bytes",
    "attempt",
    "place",
    "node_rank",
    "log_format",
)
@click.option(
    "--autoload-to",
    type=click.Path(file_okay=False, path_type=Path),
    help="First copy autoload's files, for a trainer's PYTHONPATH, to this directory.",
)
@click.option("--lease", type=click.Choice(["acquire", _TAKE_OVER]), hidden=True)
@as_json_option
def restore(settings: Settings, autoload_to: Path | None, lease: str | None, as_json: bool) -> None:
    """Fetch the newest checkpoints at DEST that are intact.

    That is one for each output directory of the run, put back where it was saved. Then, for programs that do not
    announce checkpoints, the files of the newest snapshots go back to the directories of --watch, unless these have
    files of this run. Skips what is damaged and says so. It is no error if DEST has nothing: the run then starts from
    step 0. With --restore lazy only the volume and DEST are checked: the agent brings what the program asks for.
    """
    if autoload_to:
        with errors_reported():
            copy_autoload(autoload_to)
    if settings.restore == OFF:
        run_work(settings, _restore_nothing(settings, lease))
        click.echo(f"nothing is restored: {spelled('restore')} is off")
        return
    restored, snapshots = run_work(settings, _restore(settings, lease))
    if as_json:
        value = [{**asdict(one), "path": str(one.path)} for one in restored]
        destination = settings.store.destination
        print_json({"destination": destination, "restored": value, "snapshot": _as_json(snapshots)})
        return
    if settings.restore == LAZY:
        click.echo(f"the agent brings what the program asks for from {settings.store.destination}")
    elif not restored and snapshots is None:
        click.echo(f"nothing to restore from {settings.store.destination}: the run starts from step 0")
    for one in restored:
        for reason in one.skipped:
            click.echo(f"warning: skipped: {printable(reason)}", err=True)
        how = "restored to" if one.downloaded else "is already here:"
        place = printable(str(one.path))
        click.echo(f"{one.name} (step {one.step}, {amount(one.size_bytes)}) {how} {place}")
    if snapshots is not None:
        _show_snapshots(snapshots, series_of(settings.node_rank))


def _show_snapshots(snapshots: RestoredSnapshots, own: str) -> None:
    for reason in snapshots.skipped:
        click.echo(f"warning: skipped: {printable(reason)}", err=True)
    for warning in snapshots.warnings:
        click.echo(f"warning: {printable(warning)}", err=True)
    for one in snapshots.snapshots:
        if one.files:
            count = "1 file" if one.files == 1 else f"{one.files:,} files"
            places = printable(" and ".join(map(str, one.directories)))
            what = _title(one, own)
            if one.put_in_place:
                click.echo(f"{what} ({count}, {amount(one.size_bytes)}) restored to {places}")
            else:
                click.echo(f"{count} of {what} ({amount(one.size_bytes)}) restored to {places}")
    for directory in snapshots.left:
        click.echo(f"{printable(str(directory))} is left alone: it has this run's newer files")


def _title(snapshot: RestoredSnapshot, own: str) -> str:
    """Name a snapshot by the time that its number says, and by its node if that is another one."""
    whose = "" if snapshot.series == own else f"{snapshot.series} of "
    if snapshot.number > UNIX_SECONDS:
        return f"snapshot of {whose}{snapshot.number}"
    return f"snapshot of {whose}{datetime.fromtimestamp(snapshot.number, UTC):%Y-%m-%d %H:%M} UTC"


def _as_json(snapshots: RestoredSnapshots | None) -> dict[str, object] | None:
    if snapshots is None:
        return None
    return {
        "snapshots": [{**asdict(one), "directories": list(map(str, one.directories))} for one in snapshots.snapshots],
        "left": list(map(str, snapshots.left)),
        "warnings": snapshots.warnings,
        "skipped": snapshots.skipped,
    }


async def _restore_nothing(settings: Settings, lease: str | None) -> None:
    began_at = time.time()
    if lease:
        await _take_lease(settings, lease)
    record = StartRecord(began_at=began_at, restored_at=time.time(), resumed=Resumed.UNKNOWN)
    await asyncio.to_thread(write_start_record, record, Path(settings.volume), Path(settings.state_directory))
    await asyncio.to_thread(_void_notices, settings)


def _void_notices(settings: Settings) -> None:
    try:
        void_notices(settings)
    except (OSError, VolumeError) as error:
        hint = "a trainer that starts now may leave before its first step, if a termination notice stands"
        _log.warning("restore.notices_stand", error=str(error), hint=hint)


async def _take_lease(settings: Settings, lease: str) -> None:
    try:
        # Without the retries that a download is worth.
        async with open_store(settings.store) as store:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await _find(store, settings.store.destination, Path(settings.volume))
            async with _held(store, settings, lease):
                pass
    except (StoreError, TimeoutError) as error:
        if isinstance(error, StoreError) and error.kind is ErrorKind.FORMAT_UNKNOWN:
            raise
        # Nothing is read from the destination, so the program can begin without it.
        _log.warning("run.lease_not_taken", error=str(error) or "the store did not answer in time")


@asynccontextmanager
async def _held(store: StoreWriter, settings: Settings, lease: str | None) -> AsyncIterator[None]:
    """Hold the destination's lease for the run that this restore is a part of, if there is one."""
    if lease is None:
        yield
        return
    own = await asyncio.to_thread(lease_of_run, settings)
    async with RunLease(store, own, renews=not settings.node_rank).held(take_over=lease == _TAKE_OVER):
        yield


@contextmanager
def _noted(volume: Path, state_directory: Path) -> Iterator[WorkNote]:
    """Keep the note of what is restored. A restore that ends with an error, or is told to end, has not died of it."""
    note = WorkNote(volume, state_directory, RESTORE_NOTE, now=time.time())
    loop = asyncio.get_running_loop()
    leave_at_once = signal.getsignal(signal.SIGTERM)

    def stop_listening() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, leave_at_once)

    def end() -> None:
        note.close(note.suspects)
        stop_listening()
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        yield note
    finally:
        stop_listening()
        note.close(note.suspects)


async def _restore(
    settings: Settings, lease: str | None
) -> tuple[tuple[init_step.Restored, ...], RestoredSnapshots | None]:
    volume, directory = Path(settings.volume), Path(settings.checkpoint_directory)
    began_at = time.time()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(settings.store))
        # The volume must not be bound to a destination that does not answer: it may be mistyped.
        await _find(store, settings.store.destination, volume)
        # Nor to one that is another run's.
        await stack.enter_async_context(_held(store, settings, lease))
        await asyncio.to_thread(make_shared_folders, volume, directory)
        await asyncio.to_thread(identity.claim, volume, settings.store.destination)
        await asyncio.to_thread(make_state_directory, volume, Path(settings.state_directory))
        note = stack.enter_context(_noted(volume, Path(settings.state_directory)))
        predecessors = None
        if lease is None:
            # `keepstep run` has the lease, and nobody to wait for.
            pod = await asyncio.to_thread(pod_id, volume, Path(settings.state_directory))
            await withdraw_own(store, pod)
            predecessors = Predecessors(pod)
        with progress_line() as advance:
            restored: tuple[init_step.Restored, ...] = ()
            if settings.restore != LAZY:
                restored = await init_step.restore(
                    store,
                    checkpoint_directory=directory,
                    volume=volume,
                    state_directory=Path(settings.state_directory),
                    attempt=settings.attempt,
                    place=settings.place,
                    node_rank=settings.node_rank,
                    concurrency=settings.transfer.max_concurrency,
                    size_limit_bytes=settings.disk.size_limit_bytes,
                    predecessors=predecessors,
                    note=note,
                    on_progress=advance,
                )
            elif predecessors is not None:
                # The agent lists the checkpoints when this has ended.
                await predecessors.wait(store)
            snapshots = await restore_snapshots(
                store,
                volume=volume,
                directories=settings.watch,
                state_directory=Path(settings.state_directory),
                checkpoint_directory=directory,
                node_rank=settings.node_rank,
                fall_back_after=settings.fall_back_after,
                concurrency=settings.transfer.max_concurrency,
                size_limit_bytes=settings.disk.size_limit_bytes,
                predecessors=predecessors,
                note=note,
                on_progress=advance,
            )
    record = _start_record(settings, began_at, restored[0] if restored else None, snapshots)
    await asyncio.to_thread(write_start_record, record, volume, Path(settings.state_directory))
    await asyncio.to_thread(_void_notices, settings)
    return restored, snapshots


def _start_record(
    settings: Settings, began_at: float, restored: init_step.Restored | None, snapshots: RestoredSnapshots | None
) -> StartRecord:
    own = series_of(settings.node_rank)
    save = next((one.save for one in (snapshots.snapshots if snapshots else ()) if one.series == own), "")
    resumed = Resumed.SAVE if save else Resumed.NOTHING
    if restored is not None:
        resumed, save = Resumed.SAVE, restored.save
    elif settings.restore == LAZY:
        resumed = Resumed.UNKNOWN
    return StartRecord(
        began_at=began_at,
        restored_at=time.time(),
        resumed=resumed,
        step=restored.step if restored else 0,
        save=save,
    )


async def _find(store: StoreWriter, destination: str, volume: Path) -> None:
    """Make sure that the destination answers. Creates a missing folder, unless the volume was used with it before."""
    try:
        await newest_of_run(store, "", most=1)
    except StoreError as error:
        if error.kind is not ErrorKind.BUCKET_MISSING:
            raise
        if await asyncio.to_thread(identity.owner_of, volume) is not None:
            # It may be another destination's.
            await asyncio.to_thread(identity.claim, volume, destination)
            raise StoreError(
                error.kind,
                f"{error}, and the volume {volume} was used with it before",
                hint="mount it again, or create it yourself if you know that it holds no checkpoint",
            ) from error
        await store.probe()  # creates a missing folder; for a missing bucket it raises again
        click.echo(f"warning: {destination} did not exist and was created", err=True)
