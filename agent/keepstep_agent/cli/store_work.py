"""Runs work on a destination from the command line: with a store that retries, and printed results.

Results go to stdout, as text or, with `--json`, as JSON. Progress, logs and errors go to stderr.
"""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import click

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.retrying_store import RetryingStore
from keepstep_agent.cli.formatting import errors_reported
from keepstep_agent.core.settings.values import Settings, StoreSettings
from keepstep_agent.ports import StoreWriter
from keepstep_agent.runtime.engine.logs import configure_logs

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@asynccontextmanager
async def opened(settings: StoreSettings) -> AsyncIterator[StoreWriter]:
    """Open a store that retries, because somebody waits for the answer."""
    async with open_store(settings) as store:
        # What a store keeps stays for good. The garbage collector would look at it again and again, and twice when the
        # process ends, which would then take 0.15 s longer.
        gc.freeze()
        yield RetryingStore(store)


def run_work(settings: Settings, work: Coroutine[Any, Any, Any]) -> Any:
    configure_logs(settings.log_format)
    with errors_reported():
        return asyncio.run(work)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
