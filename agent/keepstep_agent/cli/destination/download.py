"""`keepstep download`: fetches one checkpoint into a directory, for people. Owns its arguments and output."""

import asyncio
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import open_volume
from keepstep_agent.catalog.markers import list_committed, list_step, list_weights_only, with_last_commits
from keepstep_agent.catalog.reading import CommittedCheckpoint, load
from keepstep_agent.cli.formatting import progress_line
from keepstep_agent.cli.store_options import destination_options
from keepstep_agent.cli.store_work import as_json_option, opened, print_json, run_work
from keepstep_agent.core.errors import ErrorKind, StoreError, VolumeError, printable
from keepstep_agent.core.model import is_optimizer_file
from keepstep_agent.core.policies.restore_choice import CommittedSave, last_line
from keepstep_agent.core.quantities import amount
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import StoreReader
from keepstep_agent.restore import download as restoring


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """A checkpoint in its place. `weights_only`: the optimizer's files, of which it had some, are not in it."""

    path: Path
    name: str
    step: int
    save: str
    size_bytes: int
    weights_only: bool


@click.command()
@destination_options("transfer.max_concurrency", "retention.optimizer_files")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Fetch the checkpoint of this step instead of the newest.")
@click.option("--save", help="Fetch this save; `keepstep ls` shows their ids.")
@click.option("--weights-only", is_flag=True, help="Leave the optimizer's files out; take what has only weights left.")
@as_json_option
def download(
    settings: Settings, directory: Path, step: int | None, save: str | None, weights_only: bool, as_json: bool
) -> None:
    """Fetch one checkpoint at DEST into a new folder in DIR.

    Of a run with several output directories it is one of that which was saved to last. Every byte is verified. Nothing
    of a run is touched: to go on from a checkpoint is what `keepstep restore` is for.
    """
    if save is not None and step is not None:
        raise click.UsageError("give --step or --save, not both")
    fetched: _Fetched = run_work(settings, _download(settings, directory, step, save, weights_only=weights_only))
    if as_json:
        print_json(
            {
                "destination": settings.store.destination,
                "path": str(fetched.path),
                "name": fetched.name,
                "step": fetched.step,
                "save": fetched.save,
                "size_bytes": fetched.size_bytes,
                "weights_only": fetched.weights_only,
            }
        )
        return
    if weights_only and not fetched.weights_only:
        click.echo("warning: it has no file of --optimizer-files: nothing was left out", err=True)
    what = ", weights only" if fetched.weights_only else ""
    size = amount(fetched.size_bytes)
    click.echo(f"{fetched.name} (step {fetched.step}, {size}{what}) is in {printable(str(fetched.path))}")


async def _download(
    settings: Settings, directory: Path, step: int | None, save: str | None, *, weights_only: bool
) -> _Fetched:
    async with opened(settings.store) as store:
        checkpoint = await load(store, await _chosen(store, settings, step, save, weights_only=weights_only))
        whole = checkpoint
        if weights_only:
            checkpoint = _without_optimizer(whole, settings.retention.optimizer_patterns)
        info = checkpoint.marker.info
        path = directory / info.name
        with progress_line() as advance:
            await _fetch(store, checkpoint, directory, settings, partial(advance, info.name))
        return _Fetched(
            path=path,
            name=info.name,
            step=info.step,
            save=info.save,
            size_bytes=checkpoint.size_bytes,
            weights_only=whole.committed.weights_only or checkpoint.files != whole.files,
        )


async def _chosen(
    store: StoreReader, settings: Settings, step: int | None, save: str | None, *, weights_only: bool
) -> CommittedSave:
    listed = await (list_committed(store) if step is None else list_step(store, step))
    committed = last_line(await with_last_commits(store, [one for one in listed if save in {None, one.save}]))
    left = [one for one in await list_weights_only(store, step=step) if save in {None, one.save}]
    if committed:
        # With both markers, because a prune was interrupted or overtaken, its optimizer's files may be gone.
        second = next((one for one in left if one.save == committed[0].save), committed[0])
        return second if weights_only else committed[0]
    if left and weights_only:
        return left[0]
    which = "" if step is None else f" of step {step}"
    what = f"no committed checkpoint{which if save is None else f' with the id {save}'}"
    if left:
        raise StoreError(
            ErrorKind.NO_CHECKPOINT,
            f"{settings.store.destination} has {what} any more, only one without its optimizer's files",
            hint="add --weights-only to fetch what is left of it",
        )
    raise StoreError(
        ErrorKind.NO_CHECKPOINT, f"{settings.store.destination} has {what}", hint="`keepstep ls` lists the checkpoints"
    )


def _without_optimizer(checkpoint: CommittedCheckpoint, patterns: tuple[str, ...]) -> CommittedCheckpoint:
    files = checkpoint.files.only(lambda path: not is_optimizer_file(path, patterns))
    if not files:
        raise StoreError(
            ErrorKind.NO_CHECKPOINT,
            f"every file of {checkpoint.marker.info.name} is one of --optimizer-files",
            hint="name only files with the optimizer's state, or leave --weights-only out",
        )
    return replace(checkpoint, files=files)


async def _fetch(
    store: StoreReader,
    checkpoint: CommittedCheckpoint,
    directory: Path,
    settings: Settings,
    on_progress: Callable[[int, int], None],
) -> None:
    """Download into a folder of another name, and rename it when it is whole and on disk."""
    incoming = f".{checkpoint.marker.info.name}.{secrets.token_hex(4)}"
    with ThreadPoolExecutor(1, thread_name_prefix="keepstep-download-disk") as disk:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(disk, _make, directory, checkpoint.marker.info.name)
        try:
            await restoring.download(
                store,
                checkpoint,
                incoming,
                volume=directory,
                size_limit_bytes=0,
                disk=disk,
                concurrency=settings.transfer.max_concurrency,
                on_progress=on_progress,
            )
            await loop.run_in_executor(disk, _place, checkpoint, directory, incoming)
        finally:
            await asyncio.shield(loop.run_in_executor(disk, _remove, directory, incoming))


def _make(directory: Path, name: str) -> None:
    if os.path.lexists(directory / name):
        raise _is_there(directory / name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise volume_error(error, f"making {directory}") from error


def _place(checkpoint: CommittedCheckpoint, directory: Path, incoming: str) -> None:
    whole = f"{incoming}/{checkpoint.files[0].entry.path}" if checkpoint.single_file else incoming
    try:
        with open_volume(directory) as folder:
            if folder.exists(checkpoint.marker.info.name):
                raise _is_there(directory / checkpoint.marker.info.name)
            folder.rename(whole, folder, checkpoint.marker.info.name)
            folder.sync()
    except OSError as error:
        raise volume_error(error, f"writing to {directory}") from error


def _remove(directory: Path, incoming: str) -> None:
    """Remove what is left of a download. It has no part in the result, so a failure is only an unused folder."""
    with suppress(OSError), open_volume(directory) as folder:
        folder.remove(incoming)


def _is_there(path: Path) -> VolumeError:
    hint = "remove it, or give another directory"
    return VolumeError(ErrorKind.ALREADY_EXISTS, f"{path} is there already", hint=hint)
