"""Sends an event to a URL, or to a command on its standard input. Each try is bounded, and names no secret.

A URL may hold a secret in its path, its query or before its host: errors name the host alone.
"""

import asyncio
import contextlib
import os
import shlex
import signal
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from mooring_agent.adapters.transfer.tls_connector import use_own_tls
from mooring_agent.core.errors import ErrorKind, EventReceiverError

_CONTENT_TYPE: Final = "application/cloudevents+json; charset=utf-8"
_STDERR: Final = 2


async def post_event(url: str, body: bytes, limit_seconds: float) -> None:
    """Send the event; return once the receiver has answered 2xx. Raises EventReceiverError."""
    host = urlsplit(url).hostname
    connector = aiohttp.TCPConnector(limit=1)
    use_own_tls(connector)
    try:
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=limit_seconds), trust_env=False
            ) as session,
            session.post(url, data=body, headers={"Content-Type": _CONTENT_TYPE}, allow_redirects=False) as response,
        ):
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        # Their texts may have the URL in them.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise EventReceiverError(
            ErrorKind.UNREACHABLE, f"{host} does not take the event: {reason}", hint="check event_url and its receiver"
        ) from None
    if 300 <= status < 400:
        raise EventReceiverError(
            ErrorKind.REQUEST_REFUSED,
            f"{host} answers {status}, and redirects are not followed",
            hint="set event_url to where it leads",
        )
    if not 200 <= status < 300:
        raise EventReceiverError(
            ErrorKind.REQUEST_REFUSED, f"{host} answers {status}", hint="the receiver's log says why it refuses events"
        )


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
            hint="give event_command as a program and its arguments; for a shell's syntax, sh -c '…'",
        ) from None
    try:
        async with asyncio.timeout(limit_seconds):
            await process.communicate(body)
    except TimeoutError:
        raise EventReceiverError(
            ErrorKind.TIMED_OUT,
            f"the event command {words[0]!r} did not end within {limit_seconds:g} s, and was killed",
            hint="raise event_timeout_seconds, or let it hand its work on",
        ) from None
    finally:
        # Also what it has left behind.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise EventReceiverError(
            ErrorKind.REQUEST_REFUSED,
            f"the event command {words[0]!r} exited with {process.returncode}",
            hint="what it printed is above in this log; the event is sent again until it exits with 0",
        )
