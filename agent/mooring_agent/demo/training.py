"""One training run of the demo as seen from outside: what the program printed, what Mooring logged, how it ended.

Owns reading. Must not know the story: who interrupts what, and why.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mooring_agent.demo.processes import Child


@dataclass(slots=True, kw_only=True)
class Trained:
    """`losses` by step as hexadecimal text: equal text is equal bits."""

    begun: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    weights: str = ""
    exit_code: int = -1

    @property
    def last_step(self) -> int:
        return max(self.losses, default=self.begun)

    def loss(self, step: int) -> float:
        return float.fromhex(self.losses[step])


def read_along(program: Child, on_step: Callable[[int, float], None]) -> Trained:
    """Until the program and its agent have ended. `on_step` gets each step with its loss as it comes."""
    trained = Trained()
    for line in program.lines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        match said:
            case {"begun": int(step)}:
                trained.begun = step
            case {"step": int(step), "loss": str(loss)}:
                trained.losses[step] = loss
                on_step(step, float.fromhex(loss))
            case {"weights": str(digest)}:
                trained.weights = digest
            case _:
                continue
    trained.exit_code = program.exit_code()
    return trained


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One event of Mooring's log; `at` is Unix time in seconds."""

    event: str
    at: float
    fields: dict[str, Any]


def read_log(path: Path) -> list[LogLine]:
    return list(_parse(path.read_text(errors="replace").splitlines()))


def _parse(lines: Iterable[str]) -> Iterable[LogLine]:
    for line in lines:
        try:
            said = json.loads(line)
            at = datetime.fromisoformat(said["timestamp"]).timestamp()
            yield LogLine(event=said["event"], at=at, fields=said)
        except (ValueError, KeyError, TypeError):
            # Not Mooring's: the program's own words go to the same place.
            continue
