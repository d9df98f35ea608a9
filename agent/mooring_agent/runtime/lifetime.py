"""What runs for as long as the agent does, who asks it to end, and how it leaves when the core says so.

Invariants: a sense that fails is begun again and takes nothing else with it; once the core has said Exit, the process
ends within a bounded time, whatever hangs.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import structlog

from mooring_agent.core.commands import Command, Exit
from mooring_agent.core.events import Exited
from mooring_agent.ports import Clock
from mooring_agent.runtime.cluster_news import ClusterNews
from mooring_agent.runtime.dispatcher import Dispatcher
from mooring_agent.runtime.engine import Engine
from mooring_agent.runtime.telemetry import say

_PAUSE_AFTER_FAILURE_SECONDS: Final = 1.0
_CLOSING_SECONDS: Final = 2.0

log = structlog.get_logger("mooring.agent")

Forever = Callable[[], Coroutine[None, None, None]]
"""Work that has no end of its own."""


@contextmanager
def signals_to_end() -> Iterator["asyncio.Queue[str]"]:
    """Signals that ask us to end, by name, from now on; one that was blocked until now is the first."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str] = asyncio.Queue()
    wanted = (signal.SIGTERM, signal.SIGINT)
    for number in wanted:
        loop.add_signal_handler(number, queue.put_nowait, number.name)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    try:
        yield queue
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)


async def live(
    engine: Engine,
    dispatcher: Dispatcher,
    clock: Clock,
    forever: Sequence[Forever],
    leaving: "asyncio.Future[Exit]",
    news: ClusterNews | None,
) -> int:
    """Everything that runs for as long as the agent does; ends with the exit code of the core's Exit."""
    async with asyncio.TaskGroup() as tasks:

        def dispatch(command: Command) -> None:
            dispatcher.dispatch(tasks, command)

        deciding = tasks.create_task(engine.run(dispatch))
        senses = [tasks.create_task(_kept_going(one)) for one in forever]
        exit_command = await leaving
        _bound_the_closing(exit_command.code)
        # Said before anything is ended or closed: that takes time, and SIGKILL may be near.
        _say_goodbye(exit_command)
        for task in (deciding, *senses):
            task.cancel()
        dispatcher.cancel_all()
        await asyncio.wait({deciding})
        await engine.close(Exited(at=clock.now()))
        if news is not None:
            await news.last_words(exit_command.lost)
    return exit_command.code


async def _kept_going(work: Forever) -> None:
    """Begin again whatever happens: a sense that fails must not take the uploads down with it."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("sense.failed")
        await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)


def _bound_the_closing(code: int) -> None:
    """The process ends although something hangs: a thread in a dead mount, say, or whoever reads our log."""
    last_resort = threading.Timer(_CLOSING_SECONDS, os._exit, (code,))
    last_resort.daemon = True
    last_resort.start()


def _say_goodbye(command: Exit) -> None:
    """One line per checkpoint that is not durable."""
    log.info("agent.exiting", code=command.code, not_durable=len(command.lost))
    for line in command.lost:
        say(f"mooring: not durable: {line}")
