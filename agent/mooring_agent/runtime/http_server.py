"""/metrics for Prometheus, /healthz (the process turns its loop) and /readyz (the API is served)."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.core.state import State
from mooring_agent.ports import Clock
from mooring_agent.runtime.telemetry import StateCollector

log = structlog.get_logger("mooring.http")


@asynccontextmanager
async def serve_http(address: str, state: Callable[[], State], clock: Clock) -> AsyncIterator[None]:
    """Serve while the context is open; `address` is host:port, empty: serve nothing."""
    if not address:
        yield
        return
    from aiohttp import web
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StateCollector(state, clock.now))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def fine(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        if state().termination.exiting:
            return web.Response(status=503, text="exiting\n")
        return web.Response(text="ok\n")

    application = web.Application()
    application.add_routes([web.get("/metrics", metrics), web.get("/healthz", fine), web.get("/readyz", ready)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    host, _, port = address.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
    except (OSError, ValueError) as error:
        await runner.cleanup()
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot serve /metrics on {address!r}: {error}",
            hint="give --http-address as host:port with a free port, or leave it empty",
        ) from error
    log.info("http.serving", address=address)
    try:
        yield
    finally:
        await runner.cleanup()
