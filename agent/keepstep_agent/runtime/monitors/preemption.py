"""Watches for the end of the machine and passes it on as the pod's, so that the trainers save and leave before it.

A notice far ahead, such as a maintenance next week, is held back until it is near. A metadata service that fails is
asked less and less often, and its error is logged once. If no cloud answers, the watcher does nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from keepstep_agent.core.errors import PreemptionSourceError
from keepstep_agent.core.settings.values import TerminationSettings
from keepstep_agent.ports import PreemptionSource, TerminationNotice

# More than a spot machine gets on any cloud, so its notice is never held back.
_NEAR_SECONDS: Final = 180.0
# For a machine that should have ended already: a moment may be left.
_AT_ONCE_SECONDS: Final = 5.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
# A pod's network may come up after its containers.
_SEARCH_PAUSES_SECONDS: Final = (0.0, 5.0, 30.0)

log = structlog.get_logger("keepstep.preemption")

Notify = Callable[[str, float], Awaitable[None]]
"""Takes the source of a notice and the seconds that are left."""


class PreemptionWatcher:
    """Watches one of the sources that each call of `candidates` makes. If `named`, there is only one."""

    def __init__(
        self,
        *,
        candidates: Callable[[], Sequence[PreemptionSource]],
        named: bool,
        notify: Notify,
        near_seconds: float = _NEAR_SECONDS,
        search_pauses_seconds: Sequence[float] = _SEARCH_PAUSES_SECONDS,
    ) -> None:
        self._candidates = candidates
        self._named = named
        self._notify = notify
        self._near_seconds = near_seconds
        self._search_pauses_seconds = search_pauses_seconds
        self._told: set[str] = set()
        self._held_back: set[str] = set()
        self._last_problem = ""

    async def watch(self) -> None:
        """Find the source that answers and watch it, until cancelled."""
        source = self._candidates()[0] if self._named else await self._search()
        if source is None:
            log.info("preemption.no_cloud", action="only Kubernetes' own notice of the end counts")
            await asyncio.Event().wait()
            return
        log.info("preemption.watching", cloud=source.cloud)
        try:
            pause_seconds = source.pause_seconds
            while True:
                pause_seconds = await self._look(source, pause_seconds)
                await asyncio.sleep(pause_seconds)
        finally:
            await source.close()

    async def _search(self) -> PreemptionSource | None:
        from keepstep_agent.adapters.preemption import the_one_that_answers

        for pause_seconds in self._search_pauses_seconds:
            await asyncio.sleep(pause_seconds)
            found = await the_one_that_answers(self._candidates())
            if found is not None:
                return found
        return None

    async def _look(self, source: PreemptionSource, pause_seconds: float) -> float:
        """Look once; return how long to wait before the next look."""
        try:
            standing = await source.look()
        except PreemptionSourceError as error:
            if str(error) != self._last_problem:
                self._last_problem = str(error)
                log.warning("preemption.source_failed", cloud=source.cloud, error=str(error), hint=error.hint)
            return min(_LONGEST_PAUSE_SECONDS, 2 * pause_seconds)
        if self._last_problem:
            self._last_problem = ""
            log.info("preemption.source_recovered", cloud=source.cloud)
        for notice in standing:
            await self._take(notice)
        return source.pause_seconds

    async def _take(self, notice: TerminationNotice) -> None:
        if notice.key in self._told:
            return
        if notice.left_seconds > self._near_seconds:
            if notice.key not in self._held_back:
                self._held_back.add(notice.key)
                log.info("preemption.notice_held_back", source=notice.source, left_seconds=round(notice.left_seconds))
            return
        self._told.add(notice.key)
        await self._notify(notice.source, max(notice.left_seconds, _AT_ONCE_SECONDS))


def preemption_watcher(settings: TerminationSettings, *, notify: Notify) -> PreemptionWatcher | None:
    """Make the watcher that the settings ask for; None if they turn it off."""
    if settings.preemption_source == "off":
        return None
    # Imported here and in `_search`: aiohttp takes ten megabytes, which an agent that does not watch need not hold.
    from keepstep_agent.adapters.preemption import clouds

    return PreemptionWatcher(
        candidates=lambda: clouds(settings.preemption_source, settings.preemption_endpoint),
        named=settings.preemption_source != "auto",
        notify=notify,
        near_seconds=max(_NEAR_SECONDS, settings.grace_seconds),
    )
