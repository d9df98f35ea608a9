"""Runs the console: the store, the reading in the background, and the port, until a signal."""

import asyncio
import gc
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog

from keepstep_agent import __version__
from keepstep_agent.adapters.http_server import serving
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.retrying_store import RetryingStore, RetryPolicy
from keepstep_agent.console.access import Access
from keepstep_agent.console.application import console_pages
from keepstep_agent.console.refresh import Runs
from keepstep_agent.console.settings import ASK_SECONDS, FINISH_SECONDS, MOST_CONNECTIONS, ConsoleSettings
from keepstep_agent.core.settings.values import StoreSettings

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger("keepstep.console")
_PATIENCE = RetryPolicy(attempts=3, longest_wait_seconds=2.0)
"""The next round tries again anyway, and the page should say soon that the store does not answer."""


async def serve_console(
    settings: ConsoleSettings, store_settings: StoreSettings, tell: Callable[[tuple[str, int]], None]
) -> None:
    """Serve until SIGTERM or SIGINT. `tell` is called with the address once it listens.

    Raises KeepstepError if it cannot start.
    """
    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leaving.set)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(store_settings))
        # What was loaded stays for good: the garbage collector need not look at it again.
        gc.freeze()
        access = Access(settings)
        runs = Runs(RetryingStore(store, _PATIENCE), settings)
        address = await stack.enter_async_context(
            serving(
                console_pages(runs, settings, access),
                settings.address,
                option="--address",
                most=MOST_CONNECTIONS,
                ask_seconds=ASK_SECONDS,
                finish_seconds=FINISH_SECONDS,
            )
        )
        tasks = [asyncio.create_task(runs.keep_reading())]
        if settings.token_file is not None:
            tasks.append(asyncio.create_task(access.keep_token()))
        left = asyncio.create_task(leaving.wait())
        stack.push_async_callback(_end, *tasks, left)
        tell(address)
        _log.info("console.serving", version=__version__, address=address, destination=settings.destination)
        # The others end by a bug alone, and pages that never change again would hide it.
        await asyncio.wait([*tasks, left], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()


async def _end(*tasks: asyncio.Task[object]) -> None:
    """Cancel tasks, and wait until they have left the store alone."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
