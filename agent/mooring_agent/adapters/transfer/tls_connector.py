"""Makes an aiohttp connector open its TLS connections as `tls_transport` does.

There is no public way to say so: a connector asks its event loop for connections, so it gets one that knows better.
What aiohttp does around that (addresses, time-outs, errors) stays its own. Behind a proxy, where TLS begins on a
connection that is there already, and in an aiohttp that asks otherwise, the loop's own TLS is used; a test sees to it
that ours is, where it should be.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import aiohttp

from mooring_agent.adapters.transfer.tls_transport import open_tls_connection


def use_own_tls(connector: aiohttp.BaseConnector | None) -> None:
    """Idempotent."""
    loop = getattr(connector, "_loop", None)
    if loop is not None and not isinstance(loop, _Loop):
        connector._loop = _Loop(loop)  # type: ignore[union-attr]


class _Loop:
    """An event loop, but for how it connects."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        *arguments: Any,
        sock: socket.socket | None = None,
        ssl: ssl.SSLContext | None = None,  # asyncio's name
        server_hostname: str | None = None,
        **options: Any,
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        if sock is None or ssl is None or server_hostname is None:
            return await self._loop.create_connection(
                factory, *arguments, sock=sock, ssl=ssl, server_hostname=server_hostname, **options
            )
        protocol = factory()
        return await open_tls_connection(protocol, sock, ssl, server_hostname), protocol
