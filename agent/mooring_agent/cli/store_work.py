"""Runs work on a destination from the command line: with a store that retries, a progress bar, and printed results.

Results go to stdout, as text or, with `--json`, as JSON. Progress, logs and errors go to stderr.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mooring_agent.adapters.open_store import open_store
from mooring_agent.adapters.retrying_store import RetryingStore
from mooring_agent.cli.formatting import errors_reported
from mooring_agent.core.settings.values import Settings, StoreSettings
from mooring_agent.ports import StoreWriter
from mooring_agent.runtime.engine.telemetry import configure_logs

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@asynccontextmanager
async def opened(settings: StoreSettings) -> AsyncIterator[StoreWriter]:
    """Open a store that retries, because somebody waits for the answer."""
    async with open_store(settings) as store:
        yield RetryingStore(store)


def run_work(settings: Settings, work: Coroutine[Any, Any, Any]) -> Any:
    configure_logs(settings.log_format)
    with errors_reported():
        return asyncio.run(work)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar if stderr is a terminal. Yields the function that updates it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
