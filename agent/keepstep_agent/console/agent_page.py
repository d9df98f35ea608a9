"""The page that an agent serves on its own port: the timeline of its run, live by what the agent has noted itself.

It shows no destination, because whoever reaches the port may see it.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from keepstep_agent.console.access import add_headers
from keepstep_agent.console.pages import render
from keepstep_agent.console.static_files import STATIC_FILES, static_file
from keepstep_agent.console.timeline import timeline_of
from keepstep_agent.core.mirror.base import series_of
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.restore_choice import CommittedSave, newest_first
from keepstep_agent.core.policies.run_overview import overview_of
from keepstep_agent.core.stored.ledger import AgentLife, SaveCommitted, Saved, joined_lives

_REFRESH_SECONDS: Final = 5
_one_at_a_time: Final = asyncio.Semaphore(1)
"""A page takes tens of milliseconds of CPU, beside uploads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNow:
    """What an agent has noted of its life, and how things stand `at` that moment (unix seconds).

    `lives` are those in the run's ledger, and `committed` the newest committed saves, both as they were read last, all
    of them if `all_listed`; a restore has found those in `damaged` so. `problem` says why that was long ago. `step` is
    the newest that a trainer tells; None if none does.
    """

    life: AgentLife
    lives: tuple[AgentLife, ...] = ()
    committed: tuple[CommittedSave, ...] = ()
    all_listed: bool = False
    damaged: frozenset[str] = frozenset()
    problem: str = ""
    at: float
    ranks: int
    step: int | None


async def answer(request: web.Request, now: AgentNow) -> web.Response:
    """Answer a request for the page or for one of its files."""
    name = request.match_info.get("name")
    if name is None:
        async with _one_at_a_time:
            text = await asyncio.to_thread(agent_page, now)
        response = web.Response(text=text, content_type="text/html", charset="utf-8")
    elif name in STATIC_FILES:
        response = static_file(name)
    else:
        response = web.Response(status=404, text="there is no such file\n")
    await add_headers(request, response)
    return response


def agent_page(now: AgentNow) -> str:
    """Render the page."""
    lives = joined_lives([now.life, *now.lives])
    known = {one.save for one in now.committed}
    own = [one for one in _committed(now.life) if one.save not in known]
    listed = newest_first([*own, *now.committed])
    overview, details = overview_of(listed, None, lives, damaged=now.damaged, all_listed=now.all_listed)
    return render(
        "agent",
        life=now.life,
        problem=now.problem,
        ranks=now.ranks,
        step=now.step,
        one=overview,
        details=details,
        line=timeline_of(details, running_at=now.at),
        now=now.at,
        destination="",
        user="",
        can_sign_out=False,
        refresh_seconds=_REFRESH_SECONDS,
    )


def _committed(life: AgentLife) -> list[CommittedSave]:
    """Return what the agent has seen committed, newest first."""
    saved = {entry.save: entry for entry in life.entries if isinstance(entry, Saved)}
    return [
        CommittedSave(
            key="",
            step=saved[entry.save].step,
            save=entry.save,
            series=series_of(life.node_rank) if saved[entry.save].save_kind == Kind.SNAPSHOT else "",
            modified_at=entry.at,
        )
        for entry in reversed(life.entries)
        if isinstance(entry, SaveCommitted) and entry.save in saved
    ]
