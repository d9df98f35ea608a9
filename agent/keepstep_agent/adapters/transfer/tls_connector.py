"""Makes an aiohttp connector open its TLS connections as `tls_transport` does.

aiohttp has no public way to do this. So while a connector connects, it sees an event loop whose create_connection is
ours. The rest (addresses, time-outs, errors) stays aiohttp's. Behind a proxy, and where a connection is upgraded
later, the loop's own TLS is used. A test checks that ours is used where it should be.
"""

import asyncio
import errno
import socket
import ssl
from functools import partial
from typing import Any

from keepstep_agent.adapters.transfer.tls_transport import TlsTransport


async def open_tls_connection(
    protocol: asyncio.BaseProtocol, connection: socket.socket, context: ssl.SSLContext, server_hostname: str
) -> TlsTransport:
    """Take over a connected socket and do the TLS handshake. Raises ssl.SSLError or OSError if that fails."""
    encrypted = context.wrap_socket(connection, do_handshake_on_connect=False, server_hostname=server_hostname)
    try:
        while True:
            try:
                encrypted.do_handshake()
                break
            except ssl.SSLWantReadError:
                await until_ready(encrypted, writable=False)
            except ssl.SSLWantWriteError:
                await until_ready(encrypted, writable=True)
        return TlsTransport(encrypted, protocol)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:  # the latter on Debian 12's Python
        encrypted.close()
        raise ConnectionResetError(
            errno.ECONNRESET, "the server closed the connection during the TLS handshake"
        ) from error
    except BaseException:
        encrypted.close()
        raise


async def until_ready(connection: socket.socket, *, writable: bool) -> None:
    """Wait until the socket takes bytes, or has some."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    watch, forget = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    watch(connection, ready.set)
    try:
        await ready.wait()
    finally:
        forget(connection)


_CONNECT = "_wrap_create_connection"


def use_own_tls(connector: Any) -> None:
    """Make a connector open its TLS connections with `open_tls_connection`. Idempotent.

    Not for a connector whose proxy speaks TLS itself: the event loops can put TLS only inside their own TLS.
    """
    if _CONNECT not in vars(connector):
        setattr(connector, _CONNECT, partial(_connect, connector))


async def _connect(connector: Any, *arguments: Any, **options: Any) -> Any:
    loop = connector._loop
    view = _But(connector, _loop=_But(loop, create_connection=partial(_create_connection, loop)))
    return await getattr(type(connector), _CONNECT)(view, *arguments, **options)


class _But:
    """Another object with some attributes replaced.

    It is a view and not a copy, because a connector that is garbage-collected closes its connections.
    """

    def __init__(self, other: object, **attributes: object) -> None:
        self._other = other
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


async def _create_connection(
    loop: Any,
    factory: Any,
    *arguments: Any,
    sock: socket.socket | None = None,
    ssl: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    **options: Any,
) -> Any:
    """Like the loop's method of that name: return a transport and its protocol."""
    if sock is None or ssl is None or server_hostname is None:
        return await loop.create_connection(
            factory, *arguments, sock=sock, ssl=ssl, server_hostname=server_hostname, **options
        )
    protocol = factory()
    return await open_tls_connection(protocol, sock, ssl, server_hostname), protocol
