"""Tells receivers of commits: in order, one at a time, until each has taken its event.

What is due is in the journal: it survives the agent, and a receiver that was told just before an agent died is told
again. The drain waits for it for a moment, and the next agent on this volume tells what is still due.
"""

from collections.abc import Awaitable, Callable

import structlog

from keepstep_agent.core.agent.events import NewsTaken
from keepstep_agent.core.model import Receiver
from keepstep_agent.core.policies.commit_news import cloud_event
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.engine.engine import Engine

Send = Callable[[str, bytes, float], Awaitable[None]]
"""(URL or command, event, time-out in seconds): returns once it is taken. Raises EventReceiverError."""

log = structlog.get_logger("keepstep.events")


class CommitEvents:
    """The outbox's sender to one receiver that the settings name."""

    def __init__(self, engine: Engine, clock: Clock, receiver: Receiver) -> None:
        self._engine = engine
        self._clock = clock
        self._settings = engine.state.settings
        self._receiver = receiver
        self._dropped = 0

    @property
    def to(self) -> str:
        return f"event-{self._receiver.value}"

    async def until_due(self) -> None:
        # Holds only after the turn that has journaled it.
        await self._engine.until(lambda state: state.untold_news.next_of(self._receiver) is not None)

    async def send(self) -> None:
        # Imported here, because most agents tell nobody.
        from keepstep_agent.adapters.receivers.command import run_event_command
        from keepstep_agent.adapters.receivers.url import post_event

        events, untold = self._settings.events, self._engine.state.untold_news
        news = untold.next_of(self._receiver)
        assert news is not None
        if untold.dropped > self._dropped:
            self._dropped = untold.dropped
            log.warning("event.dropped", count=untold.dropped, hint="receivers have been away for too long")
        is_url = self._receiver is Receiver.URL
        send: Send = post_event if is_url else run_event_command
        target = events.event_url if is_url else events.event_command
        await send(target, cloud_event(news, self._settings.store.destination), events.event_timeout_seconds)
        await self._engine.submit(NewsTaken(at=self._clock.now(), save=news.info.save, receiver=self._receiver))
