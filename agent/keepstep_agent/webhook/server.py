"""Runs the webhook: certificates, two ports, and a shutdown that loses no review."""

import asyncio
import contextlib
import functools
import signal

import structlog

from keepstep_agent import __version__
from keepstep_agent.adapters.http_server import probe_pages, serving
from keepstep_agent.webhook.application import Metrics, reviewing
from keepstep_agent.webhook.serving_certificate import ServingCertificate
from keepstep_agent.webhook.settings import (
    ANSWER_SECONDS,
    FINISH_SECONDS,
    MOST_CONNECTIONS,
    MOST_PROBES,
    WebhookSettings,
)

log = structlog.get_logger("keepstep.webhook")


async def serve_webhook(settings: WebhookSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises KeepstepError if it cannot start."""
    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leaving.set)
    async with contextlib.AsyncExitStack() as stack:
        certificate = await asyncio.to_thread(ServingCertificate, settings.certificates)
        loading = asyncio.create_task(certificate.keep_loading())
        stack.callback(loading.cancel)
        metrics = Metrics(certificate.seconds_left)
        bounded = functools.partial(
            serving, ask_seconds=settings.read_seconds + ANSWER_SECONDS, finish_seconds=FINISH_SECONDS
        )
        reviews = bounded(
            reviewing(settings, metrics),
            settings.listen,
            certificate.context,
            option="--listen",
            most=MOST_CONNECTIONS,
        )
        await stack.enter_async_context(reviews)
        # Started after the review port, so that a replica that says it is ready takes reviews.
        pages = probe_pages(lambda: metrics.registry, {"/readyz": lambda: "exiting" if leaving.is_set() else ""})
        await stack.enter_async_context(bounded(pages, settings.http_listen, option="--http-listen", most=MOST_PROBES))
        log.info("webhook.serving", version=__version__, listen=settings.listen, failure_policy=settings.failure_policy)
        await leaving.wait()
        log.info("webhook.leaving", lame_duck_seconds=settings.lame_duck_seconds)
        # The Service still sends reviews until the cluster has learned that this replica is not ready.
        await asyncio.sleep(settings.lame_duck_seconds)
