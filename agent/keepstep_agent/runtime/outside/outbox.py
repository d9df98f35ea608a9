"""Tells the outside, each receiver by a task of its own: waits until something is due, and sends it until it is taken.

Nothing in the agent waits for it. After a failure comes a pause that doubles; a problem is logged once, and once more
when it is over. At the agent's end a receiver has a moment for what is left. What is due, how much of that is kept, and
whether it outlives the agent in the journal, is the sender's.
"""

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from keepstep_agent.core.errors import KeepstepError

# The process has two seconds to close in, and SIGKILL may be near.
_LAST_SECONDS: Final = 0.5

log = structlog.get_logger("keepstep.outbox")


class Sender(Protocol):
    """What is to be told to one receiver."""

    @property
    def to(self) -> str:
        """Whom, for the log."""

    async def until_due(self) -> None:
        """Wait until something is to be sent now. Raises KeepstepError if it cannot be."""

    async def send(self) -> None:
        """Send what is due. Raises KeepstepError or TimeoutError, and then it is due again."""

    async def send_last(self) -> None:
        """Send what is left at the agent's end. Errors as above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`between_seconds` after what was taken; else a pause that doubles, from the shortest to the longest."""

    between_seconds: float = 0.0
    shortest_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0


class Outbox:
    """`run` runs for as long as the agent does."""

    def __init__(self, sender: Sender, pace: Pace) -> None:
        self._sender = sender
        self._pace = pace

    async def run(self) -> None:
        """Send whatever is due, until cancelled."""
        problem, pause_seconds = "", self._pace.shortest_pause_seconds
        while True:
            try:
                await self._sender.until_due()
                await self._sender.send()
            except (KeepstepError, TimeoutError) as error:
                if str(error) != problem:
                    problem = str(error)
                    hint = error.hint if isinstance(error, KeepstepError) else ""
                    log.warning(
                        "outbox.not_taken",
                        to=self._sender.to,
                        error=problem or "no answer in time",
                        hint=hint,
                        action="it is sent again; uploads go on",
                    )
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(self._pace.longest_pause_seconds, 2 * pause_seconds)
                continue
            if problem:
                log.info("outbox.taken_again", to=self._sender.to)
            problem, pause_seconds = "", self._pace.shortest_pause_seconds
            await asyncio.sleep(self._pace.between_seconds)

    async def last_words(self) -> None:
        """Send what is left. Takes only a moment, or gives up."""
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                await self._sender.send_last()
        except Exception as error:
            # Whatever it is, the agent exits with its own code.
            log.info("outbox.left", to=self._sender.to, error=str(error) or "no time left")
