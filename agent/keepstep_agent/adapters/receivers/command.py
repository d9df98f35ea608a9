"""Runs a command with an event on its standard input."""

import asyncio
import contextlib
import os
import shlex
import signal
from typing import Final

from keepstep_agent.core.errors import ErrorKind, EventReceiverError

_STDERR: Final = 2
_REAP_SECONDS: Final = 1.0
"""A killed process is over at once, unless its disk or its network share hangs."""


async def run_event_command(command: str, body: bytes, limit_seconds: float) -> None:
    """Run the command with the event on its standard input; return once it has exited with 0.

    What it prints goes to the agent's stderr. It gets its own session, which is killed when the time is over. Raises
    EventReceiverError.
    """
    words = shlex.split(command)
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=_STDERR, start_new_session=True
        )
    except OSError as error:
        raise EventReceiverError(
            ErrorKind.BAD_CONFIGURATION,
            f"the event command {words[0]!r} cannot be started: {error.strerror}",
            hint="give --event-command a program and its arguments; for a shell's syntax, sh -c '…'",
        ) from None
    try:
        async with asyncio.timeout(limit_seconds):
            await process.communicate(body)
    except TimeoutError:
        raise EventReceiverError(
            ErrorKind.TIMED_OUT,
            f"the event command {words[0]!r} did not end within {limit_seconds:g} s, and was killed",
            hint="raise --event-timeout-seconds, or let it hand its work on",
        ) from None
    finally:
        # Also what it has left behind.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_SECONDS):
                await process.wait()
    if process.returncode:
        raise EventReceiverError(
            ErrorKind.REQUEST_REFUSED,
            f"the event command {words[0]!r} exited with {process.returncode}",
            hint="what it printed is above in this log; the event is sent again until it exits with 0",
        )
