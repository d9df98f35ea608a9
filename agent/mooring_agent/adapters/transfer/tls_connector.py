"""Makes an aiohttp connector open its TLS connections as `tls_transport` does.

There is no public way to say so: while it connects, a connector is shown an event loop that knows better. What aiohttp
does around that (addresses, time-outs, errors) stays its own. Where TLS begins on a connection that is there already,
behind a proxy, and in an aiohttp that asks otherwise, the loop's own TLS is used; a test sees to it that ours is, where
it should be.
"""

import socket
import ssl
from functools import partial
from typing import Any

from mooring_agent.adapters.transfer.tls_handshake import open_tls_connection

_CONNECT = "_wrap_create_connection"


def use_own_tls(connector: Any) -> None:
    """Idempotent. Not for a connector whose proxy speaks TLS itself: the loops put TLS in TLS of their own only."""
    if _CONNECT not in vars(connector):
        setattr(connector, _CONNECT, partial(_connect, connector))


async def _connect(connector: Any, *arguments: Any, **options: Any) -> Any:
    loop = connector._loop
    view = _But(connector, _loop=_But(loop, create_connection=partial(_create_connection, loop)))
    return await getattr(type(connector), _CONNECT)(view, *arguments, **options)


class _But:
    """Another object, but for some of its attributes. Not a copy: a connector that is collected closes connections."""

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
    """As the loop's method of that name: a transport and its protocol."""
    if sock is None or ssl is None or server_hostname is None:
        return await loop.create_connection(
            factory, *arguments, sock=sock, ssl=ssl, server_hostname=server_hostname, **options
        )
    protocol = factory()
    return await open_tls_connection(protocol, sock, ssl, server_hostname), protocol
