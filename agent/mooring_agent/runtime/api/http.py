"""Serves /metrics for Prometheus, /healthz (the event loop runs), /readyz (the agent is not exiting) and /progressz.

/progressz is for the trainer's own liveness probe: the trainers are not stuck, or nobody knows.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final

import structlog

from mooring_agent.core.agent.state import State
from mooring_agent.ports import Clock
from mooring_agent.runtime.engine.telemetry import StateCollector

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_MOST_CONNECTIONS: Final = 64
_ASK_SECONDS: Final = 5.0
_FINISH_SECONDS: Final = 0.5
"""SIGKILL may be near."""

log = structlog.get_logger("mooring.http")


@asynccontextmanager
async def serve_http(address: str, state: Callable[[], State], clock: Clock) -> AsyncIterator[None]:
    """Serve while the context is open. `address` is host:port; if it is empty, nothing is served."""
    if not address:
        yield
        return
    # In a thread, because calls are served already. Here, because an agent without these pages and without S3 need not
    # hold the ten megabytes that aiohttp takes.
    await asyncio.to_thread(import_module, "mooring_agent.adapters.http_server")
    from mooring_agent.adapters.http_server import probe_pages, serving

    def registry() -> "CollectorRegistry":
        from prometheus_client import CollectorRegistry

        metrics = CollectorRegistry(auto_describe=False)
        metrics.register(StateCollector(state, clock.now))
        return metrics

    host, _, port = address.rpartition(":")
    async with serving(
        probe_pages(
            registry,
            {
                "/readyz": lambda: "exiting" if state().termination.exiting else "",
                "/progressz": lambda: "stuck" if state().progress.stuck else "",
            },
        ),
        (host.strip("[]"), int(port)),
        option="--http-address",
        most=_MOST_CONNECTIONS,
        ask_seconds=_ASK_SECONDS,
        finish_seconds=_FINISH_SECONDS,
    ):
        log.info("http.serving", address=address)
        yield
