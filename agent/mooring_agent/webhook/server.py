"""The webhook from start to end: certificates, two ports, and a way out on which no review is lost."""

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

import structlog
from aiohttp import web

from mooring_agent import __version__
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.webhook.application import probing, reviewing
from mooring_agent.webhook.metrics import Metrics
from mooring_agent.webhook.serving_certificate import ServingCertificate
from mooring_agent.webhook.settings import WebhookSettings

_FINISH_SECONDS: Final = 10.0
_KEEP_ALIVE_SECONDS: Final = 120.0
"""Longer than the API server keeps an idle connection: it must never write into one that we are closing."""

log = structlog.get_logger("mooring.webhook")


async def serve_webhook(settings: WebhookSettings) -> None:
    """Until SIGTERM or SIGINT. Raises MooringError when it cannot begin."""
    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leaving.set)
    certificate = ServingCertificate(settings.certificates)
    async with contextlib.AsyncExitStack() as stack:
        if settings.self_managed is not None:
            # Imported here: `kubernetes` takes long, and who has cert-manager needs none of it.
            from mooring_agent.webhook.certificate_keeper import kept_certificates

            if not await _entered(stack, kept_certificates(settings.self_managed, settings.certificates), leaving):
                return
        await asyncio.to_thread(certificate.load)
        metrics = Metrics(certificate.seconds_left)
        loading = asyncio.create_task(certificate.keep_loading())
        stack.callback(loading.cancel)
        await stack.enter_async_context(_serving(reviewing(settings, metrics), settings.listen, certificate.context))
        # Who answers that it is ready takes reviews already.
        await stack.enter_async_context(
            _serving(probing(metrics, lambda: not leaving.is_set()), settings.http_listen, None)
        )
        log.info("webhook.serving", version=__version__, listen=settings.listen, failure_policy=settings.failure_policy)
        await leaving.wait()
        log.info("webhook.leaving", lame_duck_seconds=settings.lame_duck_seconds)
        # The Service still sends us reviews until everybody has heard that we are not ready.
        await asyncio.sleep(settings.lame_duck_seconds)


async def _entered(
    stack: contextlib.AsyncExitStack, context: AbstractAsyncContextManager[None], leaving: asyncio.Event
) -> bool:
    """False if we are told to end while it is still being entered."""
    entering = asyncio.create_task(stack.enter_async_context(context))
    told = asyncio.create_task(leaving.wait())
    try:
        await asyncio.wait([entering, told], return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        entering.cancel()  # nothing, where it is done
        await asyncio.wait([entering])
    if entering.cancelled():
        return False
    entering.result()
    return True


@contextlib.asynccontextmanager
async def _serving(
    application: web.Application, listen: tuple[str, int], context: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Serve while the context is open; on its way out what has begun is answered."""
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=_KEEP_ALIVE_SECONDS)
    await runner.setup()
    host, port = listen
    try:
        site = web.TCPSite(runner, host or None, port, ssl_context=context, shutdown_timeout=_FINISH_SECONDS)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot listen on {host}:{port}: {error}",
            hint="give another address, or end whatever holds this one",
        ) from error
    try:
        yield
    finally:
        await runner.cleanup()
