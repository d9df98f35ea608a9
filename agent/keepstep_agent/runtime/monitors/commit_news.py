"""Tells receivers of commits: in order, one at a time, again and again until each has taken its event.

Nothing in the agent waits for it but an exit, for a moment. What is due is in the journal: it survives the agent, and
a receiver that was told just before an agent died is told again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from keepstep_agent.core.agent.events import NewsTaken
from keepstep_agent.core.errors import EventReceiverError
from keepstep_agent.core.model import Receiver
from keepstep_agent.core.policies.commit_news import cloud_event, receivers_of
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.engine.engine import Engine

_SHORTEST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0

Send = Callable[[str, bytes, float], Awaitable[None]]
"""(URL or command, event, time-out in seconds): returns once it is taken. Raises EventReceiverError."""

log = structlog.get_logger("keepstep.events")


class CommitTeller:
    """`tell` runs for as long as the agent does, for each receiver that the settings name."""

    def __init__(
        self, engine: Engine, clock: Clock, *, shortest_pause_seconds: float = _SHORTEST_PAUSE_SECONDS
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._settings = engine.state.settings
        self._shortest_pause_seconds = shortest_pause_seconds

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        return receivers_of(self._settings.events)

    async def tell(self, receiver: Receiver) -> None:
        """Tell this receiver what is due, until cancelled."""
        events = self._settings.events
        # Imported here, because most agents tell nobody.
        from keepstep_agent.adapters.receivers.command import run_event_command
        from keepstep_agent.adapters.receivers.url import post_event

        send: Send = post_event if receiver is Receiver.URL else run_event_command
        target = events.event_url if receiver is Receiver.URL else events.event_command
        problem, pause_seconds, dropped = "", self._shortest_pause_seconds, 0
        while True:
            # Holds only after the turn that has journaled it.
            untold = self._engine.state.untold_news
            await self._engine.until(lambda state: state.untold_news.next_of(receiver) is not None)
            news = untold.next_of(receiver)
            assert news is not None
            if untold.dropped > dropped:
                dropped = untold.dropped
                log.warning("event.dropped", count=dropped, hint="receivers have been away for too long")
            try:
                await send(target, cloud_event(news, self._settings.store.destination), events.event_timeout_seconds)
            except EventReceiverError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("event.not_taken", receiver=receiver.value, error=problem, hint=error.hint)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * pause_seconds)
                continue
            if problem:
                log.info("event.taken_again", receiver=receiver.value, due=untold.count)
            problem, pause_seconds = "", self._shortest_pause_seconds
            await self._engine.submit(NewsTaken(at=self._clock.now(), save=news.info.save, receiver=receiver))
