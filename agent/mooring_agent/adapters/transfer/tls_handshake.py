"""How a TLS connection of our own begins."""

import asyncio
import errno
import socket
import ssl

from mooring_agent.adapters.transfer.tls_transport import TlsTransport


async def open_tls_connection(
    protocol: asyncio.BaseProtocol, connection: socket.socket, context: ssl.SSLContext, server_hostname: str
) -> TlsTransport:
    """Shake hands over a connected socket, which is ours from now on. ssl.SSLError or OSError if that fails."""
    encrypted = context.wrap_socket(connection, do_handshake_on_connect=False, server_hostname=server_hostname)
    try:
        while True:
            try:
                encrypted.do_handshake()
                break
            except ssl.SSLWantReadError:
                await _until(encrypted, writable=False)
            except ssl.SSLWantWriteError:
                await _until(encrypted, writable=True)
        return TlsTransport(encrypted, protocol)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:  # the latter on Debian 12's Python
        encrypted.close()
        raise ConnectionResetError(
            errno.ECONNRESET, "the server closed the connection during the TLS handshake"
        ) from error
    except BaseException:
        encrypted.close()
        raise


async def _until(connection: socket.socket, *, writable: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    watch, forget = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    watch(connection, ready.set)
    try:
        await ready.wait()
    finally:
        forget(connection)
