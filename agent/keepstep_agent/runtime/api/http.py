"""Serves /metrics for Prometheus, /healthz (the event loop runs), /readyz (the agent is not exiting) and /progressz.

/progressz is for the trainer's own liveness probe: the trainers are not stuck, or nobody knows. People see the agent's
timeline at /, if the packages of the console are installed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final

import structlog

from keepstep_agent.core.agent.state import State
from keepstep_agent.core.stored.ledger import AgentLife
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.api.whole_run import WholeRun
from keepstep_agent.runtime.engine.telemetry import StateCollector

if TYPE_CHECKING:
    from aiohttp import web
    from prometheus_client import CollectorRegistry

_MOST_CONNECTIONS: Final = 64
_ASK_SECONDS: Final = 5.0
_FINISH_SECONDS: Final = 0.5
"""SIGKILL may be near."""

log = structlog.get_logger("keepstep.http")


@asynccontextmanager
async def serve_http(
    address: str, state: Callable[[], State], clock: Clock, life: Callable[[], AgentLife], run: WholeRun
) -> AsyncIterator[None]:
    """Serve while the context is open. `address` is host:port; if it is empty, nothing is served.

    `life` returns what the agent has noted for the ledger; `run` knows the rest of its run.
    """
    if not address:
        yield
        return
    # In a thread, because calls are served already. Here, because an agent without these pages and without S3 need not
    # hold the ten megabytes that aiohttp takes.
    await asyncio.to_thread(import_module, "keepstep_agent.adapters.http_server")
    from keepstep_agent.adapters import http_server

    def registry() -> "CollectorRegistry":
        from prometheus_client import CollectorRegistry

        metrics = CollectorRegistry(auto_describe=False)
        metrics.register(StateCollector(state, clock.now))
        return metrics

    async def timeline(request: "web.Request") -> "web.StreamResponse":
        try:
            await asyncio.to_thread(import_module, "keepstep_agent.console.agent_page")
        except ImportError:
            return http_server.plain_answer(501, "this page needs the packages of keepstep-agent[console]")
        from keepstep_agent.console.agent_page import AgentNow, answer

        seen, newest = await run.look(), state().progress.newest
        return await answer(
            request,
            AgentNow(
                life=life(),
                lives=seen.lives,
                committed=seen.committed,
                all_listed=seen.all_listed,
                damaged=seen.damaged,
                problem=seen.problem,
                at=clock.now(),
                ranks=len(state().alive_ranks),
                step=None if newest is None else newest.step,
            ),
        )

    pages = http_server.probe_pages(
        registry,
        {
            "/readyz": lambda: "exiting" if state().termination.exiting else "",
            "/progressz": lambda: "stuck" if state().progress.stuck else "",
        },
    )
    for path in ("/", "/static/{name}"):
        pages.router.add_get(path, timeline, allow_head=False)
    host, _, port = address.rpartition(":")
    async with http_server.serving(
        pages,
        (host.strip("[]"), int(port)),
        option="--http-address",
        most=_MOST_CONNECTIONS,
        ask_seconds=_ASK_SECONDS,
        finish_seconds=_FINISH_SECONDS,
    ):
        log.info("http.serving", address=address)
        yield
