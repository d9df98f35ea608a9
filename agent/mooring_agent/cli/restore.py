"""`mooring restore`, which an init container or a person runs before the program."""

import asyncio
from dataclasses import asdict
from pathlib import Path

import click

from mooring_agent.adapters.volume import identity
from mooring_agent.adapters.volume.shared_folders import make_shared_folders
from mooring_agent.catalog.reading import list_committed
from mooring_agent.cli.autoload import copy_autoload
from mooring_agent.cli.formatting import amount, errors_reported, progress_line
from mooring_agent.cli.store_options import destination_options
from mooring_agent.cli.store_work import as_json_option, opened, print_json, run_work
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.settings.values import Settings
from mooring_agent.ports import StoreWriter
from mooring_agent.restore import init_step


@click.command()
@destination_options(
    "volume",
    "checkpoint_directory",
    "state_directory",
    "transfer.max_concurrency",
    "disk.size_limit_bytes",
    "attempt",
    "node_rank",
    "log_format",
)
@click.option(
    "--autoload-to",
    type=click.Path(file_okay=False, path_type=Path),
    help="First copy autoload's files, for a trainer's PYTHONPATH, to this directory.",
)
@as_json_option
def restore(settings: Settings, autoload_to: Path | None, as_json: bool) -> None:
    """Fetch the newest checkpoint at DEST that is intact.

    Skips damaged checkpoints and says so. It is no error if DEST has no checkpoint: the run then starts from step 0.
    """
    if autoload_to:
        with errors_reported():
            copy_autoload(autoload_to)
    restored = run_work(settings, _restore(settings))
    if as_json:
        value = {**asdict(restored), "path": str(restored.path)} if restored else None
        print_json({"destination": settings.store.destination, "restored": value})
        return
    if restored is None:
        click.echo(f"nothing to restore from {settings.store.destination}: the run starts from step 0")
        return
    for reason in restored.skipped:
        click.echo(f"warning: skipped: {reason}", err=True)
    how = "restored to" if restored.downloaded else "is already here:"
    click.echo(f"{restored.name} (step {restored.step}, {amount(restored.size_bytes)}) {how} {restored.path}")


async def _restore(settings: Settings) -> init_step.Restored | None:
    volume, directory = Path(settings.volume), Path(settings.checkpoint_directory)
    async with opened(settings.store) as store:
        # The volume must not be bound to a destination that does not answer: it may be mistyped.
        await _find(store, settings.store.destination, volume)
        await asyncio.to_thread(make_shared_folders, volume, directory)
        await asyncio.to_thread(identity.claim, volume, settings.store.destination)
        with progress_line() as advance:
            return await init_step.restore(
                store,
                checkpoint_directory=directory,
                volume=volume,
                state_directory=Path(settings.state_directory),
                attempt=settings.attempt,
                node_rank=settings.node_rank,
                concurrency=settings.transfer.max_concurrency,
                size_limit_bytes=settings.disk.size_limit_bytes,
                on_progress=advance,
            )


async def _find(store: StoreWriter, destination: str, volume: Path) -> None:
    """Make sure that the destination answers. Creates a missing folder, unless the volume was used with it before."""
    try:
        await list_committed(store)
    except StoreError as error:
        if error.kind is not ErrorKind.BUCKET_MISSING:
            raise
        if await asyncio.to_thread(identity.owner_of, volume) is not None:
            raise StoreError(
                error.kind,
                f"{error}, and the volume {volume} was used with it before",
                hint="mount it again, or create it yourself if you know that it holds no checkpoint",
            ) from error
        await store.probe()  # creates a missing folder; for a missing bucket it raises again
        click.echo(f"warning: {destination} did not exist and was created", err=True)
