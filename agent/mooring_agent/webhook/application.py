"""What is answered on the webhook's two ports: reviews over HTTPS; probes and metrics over plain HTTP.

Owns the limits on what is sent to us. What a review means is `core.admission_review`'s.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from mooring_agent.core.admission_review import answer
from mooring_agent.webhook.metrics import Metrics
from mooring_agent.webhook.settings import MOST_BODY_BYTES, WebhookSettings

log = structlog.get_logger("mooring.webhook")


def reviewing(settings: WebhookSettings, metrics: Metrics) -> web.Application:
    """POST /mutate: one AdmissionReview."""

    async def mutate(request: web.Request) -> web.Response:
        began_at = time.perf_counter()
        review = await _review(request, settings.read_seconds)
        answered = answer(review, settings.defaults, settings.failure_policy)
        metrics.answered(answered.outcome, time.perf_counter() - began_at)
        log.info("review.answered", **answered.fields)
        return web.json_response(answered.review)

    application = web.Application(client_max_size=MOST_BODY_BYTES)
    application.add_routes([web.post("/mutate", mutate)])
    return application


def probing(metrics: Metrics, is_ready: Callable[[], bool]) -> web.Application:
    """GET /healthz, /readyz and /metrics."""

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if is_ready() else web.Response(status=503, text="leaving\n")

    async def measured(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes([web.get("/healthz", healthy), web.get("/readyz", ready), web.get("/metrics", measured)])
    return application


async def _review(request: web.Request, read_seconds: float) -> Any:
    """The body as JSON. What cannot be one gets an HTTP error, which the API server treats by its failure policy."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="an AdmissionReview as application/json is wanted\n")
    try:
        async with asyncio.timeout(read_seconds):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the review did not arrive within {read_seconds:g} s\n") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text="the body is no JSON\n") from None
