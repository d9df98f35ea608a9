"""`mooring restore`, which an init container or a person runs before the program."""

import asyncio
from dataclasses import asdict
from pathlib import Path

import click

from mooring_agent import catalog
from mooring_agent import restore as restoring
from mooring_agent.adapters.volume import identity
from mooring_agent.adapters.volume.shared_folders import make_shared_folders
from mooring_agent.cli.formatting import amount, errors_reported
from mooring_agent.cli.run import copy_autoload
from mooring_agent.cli.store_options import store_options
from mooring_agent.cli.store_work import as_json_option, opened, print_json, progress_bar, run_work
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.settings.table import environment_variable, parse_bytes
from mooring_agent.core.settings.values import StoreSettings, TransferSettings
from mooring_agent.ports import ObjectStore
from mooring_api.names import (
    AGENT_STATE_DIRECTORY,
    CHECKPOINT_DIRECTORY,
    ENV_ATTEMPT,
    ENV_CHECKPOINT_DIRECTORY,
    ENV_STATE_DIRECTORY,
    ENV_VOLUME,
    RUN_VOLUME,
    STATE_DIRECTORY,
)


@click.command()
@store_options
@click.option(
    "--volume",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=ENV_VOLUME,
    default=RUN_VOLUME,
    help=f"Directory shared with the trainer. Default: ./{RUN_VOLUME}, as for `mooring run`.",
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=ENV_CHECKPOINT_DIRECTORY,
    help="Where to put the checkpoint; below the volume. Default: <volume>/checkpoints.",
)
@click.option(
    "--state-directory",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=ENV_STATE_DIRECTORY,
    help=f"As the agent's, see docs/settings.md. Default: <volume>/{STATE_DIRECTORY}/{AGENT_STATE_DIRECTORY}.",
)
@click.option(
    "--log-format",
    type=click.Choice(["json", "console"]),
    envvar=environment_variable("log_format"),
    help="Default: console in a terminal, else json.",
)
@click.option("--attempt", default="", envvar=ENV_ATTEMPT, help="Id of this start of the run, equal on all its pods.")
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    default=0,
    envvar=environment_variable("node_rank"),
    help="Index of this pod in the job; pod 0 decides where the store cannot.",
)
@click.option(
    "--max-concurrency",
    type=click.IntRange(min=1),
    default=TransferSettings().max_concurrency,
    envvar=environment_variable("transfer.max_concurrency"),
    help="Parts transferred at the same time.",
)
@click.option(
    "--size-limit-bytes",
    default="0",
    envvar=environment_variable("disk.size_limit_bytes"),
    callback=lambda context, parameter, value: _bytes(value),
    help="sizeLimit of the emptyDir, as 10GiB or in bytes; 0: none.",
)
@click.option(
    "--autoload-to",
    type=click.Path(file_okay=False, path_type=Path),
    help="First copy autoload's files, for a trainer's PYTHONPATH, to this directory.",
)
@as_json_option
def restore(
    store_settings: StoreSettings,
    volume: Path,
    directory: Path | None,
    state_directory: Path | None,
    log_format: str | None,
    attempt: str,
    node_rank: int,
    max_concurrency: int,
    size_limit_bytes: int,
    autoload_to: Path | None,
    as_json: bool,
) -> None:
    """Fetch the newest checkpoint at DEST that is intact.

    Skips damaged checkpoints and says so. It is no error if DEST has no checkpoint: the run then starts from step 0.
    """
    if autoload_to:
        with errors_reported():
            copy_autoload(autoload_to)
    volume = volume.absolute()
    place = directory.absolute() if directory else volume / CHECKPOINT_DIRECTORY
    if not place.is_relative_to(volume):
        raise click.UsageError(f"--directory {place} must lie below the volume {volume}")
    state = state_directory.absolute() if state_directory else volume / STATE_DIRECTORY / AGENT_STATE_DIRECTORY
    restored = run_work(
        _restore(store_settings, volume, place, state, attempt, node_rank, max_concurrency, size_limit_bytes),
        log_format,
    )
    if as_json:
        value = {**asdict(restored), "path": str(restored.path)} if restored else None
        print_json({"destination": store_settings.destination, "restored": value})
        return
    if restored is None:
        click.echo(f"nothing to restore from {store_settings.destination}: the run starts from step 0")
        return
    for reason in restored.skipped:
        click.echo(f"warning: skipped: {reason}", err=True)
    how = "restored to" if restored.downloaded else "is already here:"
    click.echo(f"{restored.name} (step {restored.step}, {amount(restored.size_bytes)}) {how} {restored.path}")


async def _restore(
    settings: StoreSettings,
    volume: Path,
    directory: Path,
    state_directory: Path,
    attempt: str,
    node_rank: int,
    max_concurrency: int,
    size_limit_bytes: int,
) -> restoring.Restored | None:
    async with opened(settings) as store:
        # The volume must not be bound to a destination that does not answer: it may be mistyped.
        await _find(store, settings.destination, volume)
        await asyncio.to_thread(make_shared_folders, volume, directory)
        await asyncio.to_thread(identity.claim, volume, settings.destination)
        with progress_bar() as advance:
            return await restoring.restore(
                store,
                checkpoint_directory=directory,
                volume=volume,
                state_directory=state_directory,
                attempt=attempt,
                node_rank=node_rank,
                concurrency=max_concurrency,
                size_limit_bytes=size_limit_bytes,
                on_progress=advance,
            )


async def _find(store: ObjectStore, destination: str, volume: Path) -> None:
    """Make sure that the destination answers. Creates a missing folder, unless the volume was used with it before."""
    try:
        await catalog.list_committed(store)
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


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
