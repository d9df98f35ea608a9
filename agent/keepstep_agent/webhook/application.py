"""Answers reviews, and counts them.

Owns the limits on requests, of each one and of all together. `core.injection.admission_review` answers the review
itself.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from keepstep_agent.adapters.http_server import plain_answer
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


class _RefusedError(Exception):
    """Answers a request without a review. aiohttp keeps its own exceptions, and with them all that their frames hold,
    until the garbage collector runs or the connection brings its next request."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


def reviewing(settings: WebhookSettings, metrics: Metrics) -> web.Application:
    """Make the application that answers POST /mutate with one AdmissionReview."""

    budget = _BodyBudget(MOST_LARGE_BODIES_BYTES)

    async def mutate(request: web.Request) -> web.Response:
        began_at = time.perf_counter()
        try:
            with budget.body(_announced_bytes(request)) as body:
                await _receive(request, body, settings.read_seconds)
                review = _parsed(body)
            answered = answer(review, settings.defaults, settings.failure_policy)
            text = json.dumps(answered.review)
            if len(text) > MOST_ANSWER_BYTES:  # it is ASCII, so characters are bytes
                raise _RefusedError(500, f"the answer has {len(text)} bytes, more than {MOST_ANSWER_BYTES}")
        except _RefusedError as refused:
            return plain_answer(refused.status, str(refused), refused.headers)
        metrics.answered(answered.outcome, time.perf_counter() - began_at)
        log.info("review.answered", **answered.fields)
        return web.Response(text=text, content_type="application/json")

    application = web.Application()
    application.add_routes([web.post("/mutate", mutate)])
    return application


class _BodyBudget:
    """Bounds the bytes of large bodies in memory. Small ones never wait: the number of connections bounds them."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes

    @contextlib.contextmanager
    def body(self, size: int) -> Iterator[bytearray]:
        """Yield a buffer of this size. On exit it is freed, whoever still refers to it, and only then counted back."""
        held = size if size > SMALL_BODY_BYTES else 0
        if held > self._left:
            raise _RefusedError(503, "too many large reviews at once", {"Retry-After": "1"})
        self._left -= held
        body = bytearray(size)
        try:
            yield body
        finally:
            body.clear()
            self._left += held


def _announced_bytes(request: web.Request) -> int:
    """Return the body's size before any of it is read. Raises _RefusedError if it is missing or too large."""
    size = request.content_length
    if size is None:
        raise _RefusedError(411, "a review needs a Content-Length")
    if size > MOST_BODY_BYTES:
        raise _RefusedError(413, f"a review has at most {MOST_BODY_BYTES} bytes, and this one has {size}")
    return size


async def _receive(request: web.Request, body: bytearray, read_seconds: float) -> None:
    """Read the whole body into a buffer of its size. A growing buffer would take up to twice as much memory."""
    if request.content_type != "application/json":
        raise _RefusedError(415, "send an AdmissionReview as application/json")
    at = 0
    try:
        async with asyncio.timeout(read_seconds):
            async for piece in request.content.iter_any():
                body[at : at + len(piece)] = piece
                at += len(piece)
    except TimeoutError:
        raise _RefusedError(408, f"the review did not arrive within {read_seconds:g} s") from None
    except (OSError, web.RequestPayloadError):
        raise _RefusedError(400, "the review ended too early") from None


def _parsed(body: bytearray) -> Any:
    """Parse the body. If it is no JSON, raise an error, which the API server treats by its failure policy."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise _RefusedError(400, "the body is not JSON") from None
