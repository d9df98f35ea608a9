"""Answers reviews, and counts them.

Owns the limits on requests, of each one and of all together. `core.injection.admission_review` answers the review
itself.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from keepstep_agent.core.injection.admission_review import Outcome, answer
from keepstep_agent.webhook.settings import (
    MOST_ANSWER_BYTES,
    MOST_BODY_BYTES,
    MOST_LARGE_BODIES_BYTES,
    SMALL_BODY_BYTES,
    WebhookSettings,
)


class Metrics:
    """The webhook's Prometheus metrics. `certificate_seconds_left` is called at each scrape."""

    def __init__(self, certificate_seconds_left: Callable[[], float]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._reviews = Counter(
            "keepstep_webhook_reviews",
            "Reviews answered, by result",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in Outcome:
            self._reviews.labels(outcome.value)
        self._seconds = Histogram(
            "keepstep_webhook_review_seconds",
            "Seconds from a review's first byte to its answer",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5),
            registry=self.registry,
        )
        Gauge(
            "keepstep_webhook_certificate_seconds_left",
            "Seconds until the serving certificate expires",
            registry=self.registry,
        ).set_function(certificate_seconds_left)

    def answered(self, outcome: Outcome, seconds: float) -> None:
        self._reviews.labels(outcome.value).inc()
        self._seconds.observe(seconds)


log = structlog.get_logger("keepstep.webhook")


def reviewing(settings: WebhookSettings, metrics: Metrics) -> web.Application:
    """Make the application that answers POST /mutate with one AdmissionReview."""

    budget = _BodyBudget(MOST_LARGE_BODIES_BYTES)

    async def mutate(request: web.Request) -> web.Response:
        began_at = time.perf_counter()
        size = _announced_bytes(request)
        with budget.held(size):
            body = await _body(request, size, settings.read_seconds)
            async with budget.turn(size):
                review = _parsed(body)
        answered = answer(review, settings.defaults, settings.failure_policy)
        metrics.answered(answered.outcome, time.perf_counter() - began_at)
        log.info("review.answered", **answered.fields)
        text = json.dumps(answered.review)
        if len(text) > MOST_ANSWER_BYTES:  # it is ASCII, so characters are bytes
            raise web.HTTPInternalServerError(text=f"the answer has {len(text)} bytes, more than {MOST_ANSWER_BYTES}\n")
        return web.Response(text=text, content_type="application/json")

    application = web.Application()
    application.add_routes([web.post("/mutate", mutate)])
    return application


class _BodyBudget:
    """Bounds the bytes of large bodies in memory. Small ones never wait: the number of connections bounds them."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._turn = asyncio.Lock()

    def turn(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the context for parsing a body: large ones are parsed one at a time, small ones at once."""
        return self._turn if size > SMALL_BODY_BYTES else contextlib.nullcontext()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        held = size if size > SMALL_BODY_BYTES else 0
        if held > self._left:
            raise web.HTTPServiceUnavailable(text="too many large reviews at once\n", headers={"Retry-After": "1"})
        self._left -= held
        try:
            yield
        finally:
            self._left += held


def _announced_bytes(request: web.Request) -> int:
    """Return the body's size before any of it is read. Raises an HTTP error if it is missing or too large."""
    size = request.content_length
    if size is None:
        raise web.HTTPLengthRequired(text="a review needs a Content-Length\n")
    if size > MOST_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MOST_BODY_BYTES, size)
    return size


async def _body(request: web.Request, size: int, read_seconds: float) -> bytearray:
    """Read the whole body into a buffer of its size. A growing buffer would take up to twice as much memory."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send an AdmissionReview as application/json\n")
    body, at = bytearray(size), 0
    try:
        async with asyncio.timeout(read_seconds):
            async for piece in request.content.iter_any():
                body[at : at + len(piece)] = piece
                at += len(piece)
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the review did not arrive within {read_seconds:g} s\n") from None
    except (OSError, web.RequestPayloadError):
        raise web.HTTPBadRequest(text="the review ended too early\n") from None
    return body


def _parsed(body: bytearray) -> Any:
    """Parse the body. If it is no JSON, raise an HTTP error, which the API server treats by its failure policy."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text="the body is not JSON\n") from None
