"""Tells the outside, each receiver by a task of its own: waits until something is due, and sends it until it is taken.

Nothing in the agent waits for it. After a failure comes a pause that doubles; a problem of one kind is logged once, and
once more when it is over. What is due, how much of it is kept, and whether it outlives the agent, is the sender's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from keepstep_agent.core.errors import ErrorKind, KeepstepError

# Once somebody has said that the machine ends, SIGKILL may be near. Else an end without words would cost what they say.
_LAST_SECONDS_IN_A_HURRY: Final = 0.5
_LAST_SECONDS: Final = 5.0

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
        problem: tuple[type[BaseException], ErrorKind] | None = None
        pause_seconds = self._pace.shortest_pause_seconds
        while True:
            try:
                await self._sender.until_due()
                await self._sender.send()
            except (KeepstepError, TimeoutError) as error:
                # By its kind, because a text may name an object that is another one at each try.
                kind = error.kind if isinstance(error, KeepstepError) else ErrorKind.TIMED_OUT
                if problem != (type(error), kind):
                    problem = (type(error), kind)
                    log.warning(
                        "outbox.not_taken",
                        to=self._sender.to,
                        error=str(error) or "no answer in time",
                        hint=error.hint if isinstance(error, KeepstepError) else "",
                        action="it is sent again; uploads go on",
                    )
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(self._pace.longest_pause_seconds, 2 * pause_seconds)
                continue
            if problem is not None:
                log.info("outbox.taken_again", to=self._sender.to)
            problem, pause_seconds = None, self._pace.shortest_pause_seconds
            await asyncio.sleep(self._pace.between_seconds)


async def last_words(to: str, send: Callable[[], Awaitable[None]], *, in_a_hurry: bool) -> None:
    """Send at the agent's end what is left for this receiver. Takes only a moment, or gives up."""
    try:
        async with asyncio.timeout(_LAST_SECONDS_IN_A_HURRY if in_a_hurry else _LAST_SECONDS):
            await send()
    except Exception as error:
        # Whatever it is, the agent exits with its own code.
        log.info("outbox.left", to=to, error=str(error) or "no time left")
