"""What a run of chaos counts: lives, kills, faults, commits, and every kind of loss, of which none may ever happen."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Loss(StrEnum):
    """What Keepstep promises never to happen."""

    VANISHED = "a committed checkpoint vanished against retention"
    BROKEN = "a marker whose files are missing or wrong"
    WRONG_RESTORE = "a restore that brought wrong bytes"
    OLD_RESTORE = "a restore of an older one although the newest was good"
    FORGOTTEN = "an acknowledged checkpoint neither committed nor reported"
    HUNG = "a process that hung"
    FALSE_ALARM = "verify called a good checkpoint damaged"
    FAILED = "a command that failed though nothing was broken any more"
    TRACEBACK = "a traceback of a command or an agent"


@dataclass(slots=True)
class Report:
    """`losses`: the kind with what was seen, in the order it was found."""

    counts: Counter[str] = field(default_factory=Counter)
    losses: list[tuple[Loss, str]] = field(default_factory=list)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] += number

    def lose(self, loss: Loss, evidence: str) -> None:
        self.losses.append((loss, evidence))
        print(f"LOSS: {loss}: {evidence}", flush=True)

    def add(self, other: "Report") -> None:
        self.counts += other.counts
        self.losses += other.losses

    def lines(self) -> list[str]:
        """A table in Markdown: first what was done, then what was lost."""
        rows = [(what, number) for what, number in sorted(self.counts.items())]
        rows += [(str(loss), sum(kind is loss for kind, _ in self.losses)) for loss in Loss]
        return ["| what | times |", "|---|---|", *(f"| {what} | {number:,} |" for what, number in rows)]
