"""Sends an event to a URL.

The URL may hold a secret in its path, in its query or before its host: errors name the host alone.
"""

import asyncio
import ssl
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from keepstep_agent.adapters.transfer.proxy import proxy_for
from keepstep_agent.adapters.transfer.tls_connector import use_own_tls
from keepstep_agent.core.errors import ErrorKind, EventReceiverError
from keepstep_agent.core.settings.table import spelled

_CONTENT_TYPE: Final = "application/cloudevents+json; charset=utf-8"


async def post_event(url: str, body: bytes, limit_seconds: float) -> None:
    """Send the event; return once the receiver has answered 2xx. Raises EventReceiverError."""
    host, proxy = urlsplit(url).hostname, proxy_for(url)
    # Not aiohttp's, which reads the authorities once: their file may be replaced while the agent runs.
    context = await asyncio.to_thread(ssl.create_default_context)
    connector = aiohttp.TCPConnector(limit=1, ssl=context)
    if not (proxy or "").startswith("https:"):
        use_own_tls(connector)
    try:
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=limit_seconds), trust_env=False
            ) as session,
            session.post(
                url, data=body, headers={"Content-Type": _CONTENT_TYPE}, allow_redirects=False, proxy=proxy
            ) as response,
        ):
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        # Their texts may have the URL in them.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        hint = f"check {spelled('events.event_url')} and its receiver"
        hint += ", and HTTP_PROXY, HTTPS_PROXY and NO_PROXY" if proxy else ""
        raise EventReceiverError(
            ErrorKind.UNREACHABLE, f"{host} does not take the event: {reason}", hint=hint
        ) from None
    if 300 <= status < 400:
        raise EventReceiverError(
            ErrorKind.REQUEST_REFUSED,
            f"{host} answers {status}, and redirects are not followed",
            hint=f"set {spelled('events.event_url')} to where it leads",
        )
    if not 200 <= status < 300:
        raise EventReceiverError(
            ErrorKind.REQUEST_REFUSED, f"{host} answers {status}", hint="the receiver's log says why it refuses events"
        )
