"""The transition table of one checkpoint on one agent. A transition without a row here is a bug.

`python -m keepstep_agent.core.agent.lifecycle` prints it as the diagram in docs/lifecycle.md.
"""

from enum import StrEnum
from typing import Final

from keepstep_agent.core.model import Phase


class Trigger(StrEnum):
    """What moves a checkpoint to another phase."""

    RANK_STAGED = "a rank is staged"
    TRANSFER_BEGAN = "a transfer began"
    ALL_SEALED = "every local rank is sealed"
    RANK_ANNOUNCED = "another local rank announced"
    OBJECT_LOST = "a stored object is missing"
    MARKER_READ_BACK = "the commit marker was read back"
    PINS_DROPPED = "the staged links are gone"
    GIVEN_UP = "superseded and given up"
    BROKEN = "cannot become durable"


TRANSITIONS: Final[dict[tuple[Phase, Trigger], Phase]] = {
    (Phase.ANNOUNCED, Trigger.RANK_STAGED): Phase.STAGED,
    (Phase.ANNOUNCED, Trigger.RANK_ANNOUNCED): Phase.ANNOUNCED,
    (Phase.ANNOUNCED, Trigger.GIVEN_UP): Phase.SHED,
    (Phase.ANNOUNCED, Trigger.BROKEN): Phase.FAILED,
    (Phase.STAGED, Trigger.RANK_STAGED): Phase.STAGED,
    (Phase.STAGED, Trigger.RANK_ANNOUNCED): Phase.STAGED,
    (Phase.STAGED, Trigger.TRANSFER_BEGAN): Phase.UPLOADING,
    (Phase.STAGED, Trigger.ALL_SEALED): Phase.SEALED,
    (Phase.STAGED, Trigger.MARKER_READ_BACK): Phase.COMMITTED,
    (Phase.STAGED, Trigger.GIVEN_UP): Phase.SHED,
    (Phase.STAGED, Trigger.BROKEN): Phase.FAILED,
    (Phase.UPLOADING, Trigger.RANK_STAGED): Phase.UPLOADING,
    (Phase.UPLOADING, Trigger.RANK_ANNOUNCED): Phase.UPLOADING,
    (Phase.UPLOADING, Trigger.TRANSFER_BEGAN): Phase.UPLOADING,
    (Phase.UPLOADING, Trigger.OBJECT_LOST): Phase.UPLOADING,
    (Phase.UPLOADING, Trigger.ALL_SEALED): Phase.SEALED,
    (Phase.UPLOADING, Trigger.MARKER_READ_BACK): Phase.COMMITTED,
    (Phase.UPLOADING, Trigger.GIVEN_UP): Phase.SHED,
    (Phase.UPLOADING, Trigger.BROKEN): Phase.FAILED,
    (Phase.SEALED, Trigger.RANK_ANNOUNCED): Phase.UPLOADING,
    (Phase.SEALED, Trigger.OBJECT_LOST): Phase.UPLOADING,
    (Phase.SEALED, Trigger.ALL_SEALED): Phase.SEALED,
    (Phase.SEALED, Trigger.MARKER_READ_BACK): Phase.COMMITTED,
    (Phase.SEALED, Trigger.GIVEN_UP): Phase.SHED,
    (Phase.SEALED, Trigger.BROKEN): Phase.FAILED,
    (Phase.COMMITTED, Trigger.PINS_DROPPED): Phase.RELEASED,
}

DURABLE_PHASES: Final = frozenset({Phase.COMMITTED, Phase.RELEASED})
LOST_PHASES: Final = frozenset({Phase.SHED, Phase.FAILED})
FINAL_PHASES: Final = LOST_PHASES | {Phase.RELEASED}
ENDED_PHASES: Final = DURABLE_PHASES | FINAL_PHASES
"""Phases in which nothing is left to upload."""


def advance(phase: Phase, trigger: Trigger) -> Phase:
    """Return the phase after `trigger`. A KeyError is a bug of the reducer."""
    return TRANSITIONS[phase, trigger]


def mermaid() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.ANNOUNCED}"]
    lines += [f"    {before} --> {after}: {trigger}" for (before, trigger), after in TRANSITIONS.items()]
    lines += [f"    {phase} --> [*]" for phase in sorted(FINAL_PHASES)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(mermaid(), end="")  # noqa: T201 - the user asked for the diagram
