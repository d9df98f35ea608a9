"""Decides which work is set aside because a process died while it was under way, twice in a row. docs/design/0028.

Work is known by the id of its save, or by one of the names below, which no save can have. Nobody knows which of several
works killed the process, so all that were under way are suspects: a suspect that was not under way at the next death is
none any more. Work that is set aside is tried again last and alone, and then at longer and longer intervals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Final

from msgspec import Meta

from keepstep_agent.core.limits import Moment, NameText

DEATHS: Final = 2
"""So many deaths in a row set work aside."""
READING: Final = "read"
"""What is done to a save at the agent's start: its records in the journal and beside its pins are read."""
JOURNAL: Final = ":journal"
PRUNE: Final = ":prune"
OUTPUT_DIRECTORIES: Final = ":output-directories"
RECORDS: Final = ":records"
GUESS: Final = ":guess"
_ANNOUNCEMENT: Final = ":announcement:"
MEMORY_HINT: Final = "if the agent ran out of memory, raise keepstep.dev/memory"

_FIRST_PAUSE_SECONDS: Final = 30.0
_LONGEST_PAUSE_SECONDS: Final = 6 * 3600.0
_DOUBLINGS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is done to a work at the moment. `title` is the work's name for people.

    `left`: what is left to do of a checkpoint, as in `Checkpoint.left`; None if nobody counts it.
    """

    doing: NameText
    title: NameText
    left: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Work that was under way when the process died. `noted_at`: when the last of these deaths was noted, unix time."""

    deaths: Annotated[int, Meta(ge=1, le=2**31)]
    last: Task
    noted_at: Moment

    @property
    def is_set_aside(self) -> bool:
        return self.deaths >= DEATHS

    @property
    def is_unread(self) -> bool:
        """Whether it is a save whose records are not read at the agent's start, or the journal."""
        return self.is_set_aside and self.last.doing == READING

    @property
    def was_tried_again(self) -> bool:
        """Whether the process died once more when the work was tried last."""
        return self.deaths > DEATHS

    @property
    def due_at(self) -> float:
        """When it may be tried again, if nothing else is left to do; unix time."""
        if not self.was_tried_again:
            return self.noted_at
        # Without one, the agent would be dead for most of the time: containers are started again ever more slowly.
        pause_seconds = _FIRST_PAUSE_SECONDS * 2.0 ** min(self.deaths - DEATHS - 1, _DOUBLINGS)
        return self.noted_at + min(pause_seconds, _LONGEST_PAUSE_SECONDS)

    def __str__(self) -> str:
        return (
            f"set aside and tried again last: at {self.deaths} deaths in a row this was under way ({self.last.doing})"
        )


def announcement_of(path: str) -> str:
    """Return the work of looking at an announced path, before its files are staged."""
    return _ANNOUNCEMENT + blake2b(path.encode(), digest_size=8).hexdigest()


def is_announcement(work: str) -> bool:
    return work.startswith(_ANNOUNCEMENT)


def after_death(
    suspects: Mapping[str, Suspect], under_way: Mapping[str, Task], noted_at: float
) -> Mapping[str, Suspect]:
    """Return the suspects after a death with this work under way.

    What is set aside and was not tried stays so: it does not count as innocent. A checkpoint that got further between
    two deaths begins anew: whatever kills the agent does not keep it from being stored.
    """
    waiting = {work: one for work, one in suspects.items() if one.is_set_aside and work not in under_way}
    counted = {}
    for work, task in under_way.items():
        deaths, left = 1, task.left
        if (before := suspects.get(work)) is not None:
            if left is None or before.last.left is None or left >= before.last.left:
                deaths = before.deaths + 1
            left = before.last.left if left is None else left
        counted[work] = Suspect(deaths=deaths, last=replace(task, left=left), noted_at=noted_at)
    return waiting | counted


def after_orderly_end(suspects: Mapping[str, Suspect]) -> Mapping[str, Suspect]:
    """Return the suspects after an end that was no death: those that are set aside."""
    return {work: one for work, one in suspects.items() if one.is_set_aside}
