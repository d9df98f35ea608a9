"""TLS over a socket of our own: OpenSSL reads and writes the socket itself, and a worker thread may do the bulk of it.

The event loops' own TLS encrypts on the loop, and copies the encrypted bytes twice before they are sent. Here only the
small work happens on the loop. For a body the loop lends the connection to a thread (`lend`) and does not touch it
until the thread is done. To aiohttp it looks like any other transport.

Invariants: one thread at a time uses OpenSSL's object; bytes that OpenSSL has begun to send are offered to it again
unchanged, as it insists; the socket is closed only when no thread has it.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, Final

from keepstep_agent.adapters.transfer.thread_sockets import break_off

_TURN_BYTES: Final = 256 * 1024
"""After this many bytes others get a turn on the event loop."""
_HIGH_WATER_BYTES: Final = 64 * 1024
_CLOSE_SECONDS: Final = 30.0
"""How long a closed connection may take to send what is left; as long as with the event loops' own TLS."""
_WAIT: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsTransport(asyncio.Transport):
    """One connection. For one event loop; not thread-safe, except for the function that `lend` runs."""

    def __init__(self, connection: ssl.SSLSocket, protocol: asyncio.BaseProtocol) -> None:
        super().__init__(
            {
                "socket": connection,
                "ssl_object": connection,
                "sslcontext": connection.context,
                "peername": _peer(connection),
                "sockname": connection.getsockname(),
            }
        )
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = protocol
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._room = asyncio.Event()
        self._high, self._low = _HIGH_WATER_BYTES, _HIGH_WATER_BYTES // 4
        self._writing_paused = False
        self._reading = True
        self._reads_on = False
        self._lent = False
        self._closing = False
        self._close_timer: asyncio.TimerHandle | None = None
        self._protocol.connection_made(self)
        # Bytes that came with the handshake are already in OpenSSL and do not make the socket readable.
        self._loop.call_soon(self._resume)

    async def lend(self, executor: Executor, function: Callable[..., int], *arguments: object) -> int:
        """Run a function in a thread, which has the connection to itself meanwhile. Nothing may be unsent.

        Raises ConnectionResetError if the connection is closed. A cancelled caller leaves the thread behind: to close
        the connection breaks it off, so that the thread is soon done, and only then is it torn down.
        """
        assert not self._unsent
        assert not self._lent
        if self._closing:
            raise ConnectionResetError("the connection was closed before the body was sent")
        work: Future[int] = executor.submit(function, *arguments)
        self._lent = True
        self._loop.remove_reader(self._connection.fileno())
        work.add_done_callback(self._call_take_back)
        return await asyncio.wrap_future(work)

    async def writable(self) -> None:
        """Wait until the socket takes more, or the connection is closed."""
        self._room.clear()
        if self._closing:
            return
        self._loop.add_writer(self._connection.fileno(), self._room.set)
        try:
            await self._room.wait()
        finally:
            if not self._closing:
                self._loop.remove_writer(self._connection.fileno())

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._lent
        if self._closing or not data:
            return
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self._flush()
            if self._unsent:
                self._loop.add_writer(self._connection.fileno(), self._flush)
        if self._unsent:
            # Copy the rest: the caller may reuse its memory.
            self._unsent[-1] = memoryview(bytes(self._unsent[-1]))
        self._regulate()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low
        self._regulate()

    def can_write_eof(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False
        if not self._lent and not self._closing:
            self._loop.remove_reader(self._connection.fileno())

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._resume)

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Close the connection after sending what is unsent.

        While a thread has the connection, this is `abort`: what the thread sends is incomplete anyway.
        """
        if not self._closing:
            self._closing = True
            self._room.set()
            if self._lent:
                break_off(self._connection)
            else:
                self._loop.remove_reader(self._connection.fileno())
                if self._unsent:
                    self._close_timer = self._loop.call_later(_CLOSE_SECONDS, self.abort)
                else:
                    self._say_goodbye()
                    self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._lose(None)

    def _call_take_back(self, _: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take_back)
        except RuntimeError:  # the loop has ended, so nothing else closes the connection
            self._connection.close()

    def _take_back(self) -> None:
        self._lent = False
        if self._closing:
            self._end(None)
        else:
            self._resume()

    def _resume(self) -> None:
        """Read what OpenSSL already holds and what has arrived meanwhile, then wait for more."""
        if self.is_reading() and not self._lent:
            self._loop.add_reader(self._connection.fileno(), self._read)
            self._read()

    def _read(self) -> None:
        """Read one record, and more after others had a turn: who hears the head of an answer may lend the body away."""
        self._receive(1)

    def _read_on(self) -> None:
        self._reads_on = False
        if not self._lent:
            self._receive(_TURN_BYTES)

    def _receive(self, enough_bytes: int) -> None:
        taken = 0
        try:
            while self.is_reading() and taken < enough_bytes:
                count = self._take()
                if not count:
                    self._hear_end()
                taken += count
        except _WAIT:
            return
        except OSError as error:
            self._lose(error)
            return
        if self.is_reading() and not self._reads_on:
            # What OpenSSL holds does not make the socket readable. Once: a socket that is readable too adds a turn each
            # time.
            self._reads_on = True
            self._loop.call_soon(self._read_on)

    def _take(self) -> int:
        """Pass received bytes to the protocol; return how many, 0 at the end of the stream.

        Raises SSLWantReadError if there are none yet.
        """
        data = self._connection.recv(_TURN_BYTES)
        if data:
            self._protocol.data_received(data)
        return len(data)

    def _hear_end(self) -> None:
        # Python's OpenSSL reports a reset like any other end. Only the socket knows that the peer is gone.
        if _peer(self._connection) is None:
            self._lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
            return
        self._protocol.eof_received()
        self.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                data = self._unsent[0]
                count = self._connection.send(data)
                self._unsent_bytes -= count
                if count == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = data[count:]
        except _WAIT:
            pass
        except OSError as error:
            self._lose(error)
            return
        self._regulate()
        if not self._unsent:
            self._loop.remove_writer(self._connection.fileno())
            if self._closing:
                self._say_goodbye()
                self._loop.call_soon(self._end, None)

    def _regulate(self) -> None:
        if self._closing:
            return
        if not self._writing_paused and self._unsent_bytes > self._high:
            self._writing_paused = True
            self._protocol.pause_writing()
        elif self._writing_paused and self._unsent_bytes <= self._low:
            self._writing_paused = False
            self._protocol.resume_writing()

    def _say_goodbye(self) -> None:
        with suppress(OSError, ValueError):  # raised because the other side has not answered yet
            self._connection.unwrap()

    def _lose(self, error: Exception | None) -> None:
        """Close without sending what is unsent."""
        ending = self._closing and not self._unsent
        self._closing = True
        self._unsent.clear()
        self._room.set()
        if self._lent:
            break_off(self._connection)
        if ending or self._lent:
            return
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        # A loop that still watches a closed descriptor mistakes the next socket with that number for it.
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        if self._close_timer:
            self._close_timer.cancel()
        try:
            self._protocol.connection_lost(error)
        finally:
            self._connection.close()


def _peer(connection: socket.socket) -> object:
    """Return the peer's address; None if the peer is gone."""
    try:
        return connection.getpeername()
    except OSError:
        return None
