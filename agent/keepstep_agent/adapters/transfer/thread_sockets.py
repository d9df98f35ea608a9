"""Lets worker threads use the non-blocking sockets of an event loop, and wait for them.

A thread that moves megabytes waits for its socket itself: to wake the event loop for every few hundred kilobytes would
cost the loop more than it costs the kernel to move them.
"""

import asyncio
import os
import select
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Final

BUSY: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a non-blocking socket raises if it has no bytes, or takes none."""

_LONGEST_WAIT_MILLISECONDS: Final = 1000


def wait_until_ready(connection: socket.socket, events: int) -> int:
    """Wait for any of the events of `select.poll`, or for the end of the connection; return those that came.

    Blocks. Returns 0 after a second without any, so that the caller can look whether it was told to stop.
    """
    poll = select.poll()
    poll.register(connection, events)
    ready = poll.poll(_LONGEST_WAIT_MILLISECONDS)
    return ready[0][1] if ready else 0


def break_off(connection: socket.socket) -> None:
    """End the connection, so that a thread which waits for it goes on at once. Never blocks."""
    with suppress(OSError):  # it has ended already
        # Not SSLSocket's own method, which takes OpenSSL's object away from the thread.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class LentSocket:
    """A connection's socket without TLS, to be lent to one worker thread at a time. For one event loop."""

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        """Makes a duplicate: when the transport closes its own, that number may soon belong to another file."""
        self.connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self.connection.setblocking(False)
        self._work: Future[int] | None = None

    async def lend(self, executor: Executor, function: Callable[..., int], *arguments: object) -> int:
        """Run a function in a thread, which uses the socket meanwhile. A cancelled caller leaves the thread behind."""
        self._work = executor.submit(function, *arguments)
        return await asyncio.wrap_future(self._work)

    def close(self) -> None:
        """Close the duplicate. If a thread has it, break the connection off, and close it when the thread is done."""
        if self._work is None or self._work.done():
            self.connection.close()
        else:
            break_off(self.connection)
            self._work.add_done_callback(lambda _: self.connection.close())
