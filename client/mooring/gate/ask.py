"""What a gate answers, and what it is asked by."""

from enum import StrEnum
from typing import Protocol, TypeAlias

Position: TypeAlias = tuple[int, int]
"""Optimizer steps that are complete, and ticks since then (batches of an evaluation). All ranks pass the same ones."""


class Ask(StrEnum):
    """What is asked at a position."""

    NOTHING = "nothing"
    SAVE = "save"
    STOP = "stop"
    """Save just in time, then leave."""


class Gate(Protocol):
    """May be asked several times at one position; there the answer only grows, and STOP stays for good."""

    def at(self, step: int, tick: int = 0) -> Ask:
        """What is asked of this process after `step` optimizer steps: the same on all ranks."""

    @property
    def noticed(self) -> bool:
        """A termination notice has reached this process; the other ranks may not know of it yet."""

    def notice(self) -> None:
        """Take a termination notice that came some other way."""

    def close(self) -> None:
        """Listen no more; idempotent."""
