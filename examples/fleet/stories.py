"""What becomes of the fleet's twelve runs: their starts, and how each of these ends."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_SHORT_STEPS: Final = 100
_FOR_EVER: Final = 1_000_000
"""Steps."""


class End(StrEnum):
    """How a start of a run ends."""

    DONE = "trains to its end"
    NOTICE = "is told that its machine ends"
    POWER = "loses its machine without notice"
    ERROR = "fails by an error of its own"
    NEVER = "goes on until the fleet ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run. `step` is the one after which a notice, the loss of the machine or the error comes."""

    end: End
    step: int = 0

    @property
    def is_short(self) -> bool:
        """Whether it takes seconds rather than minutes."""
        return self.end is not End.NEVER and self.step < _SHORT_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One run. `knows_keepstep` is false for a program that only writes files into a directory."""

    name: str
    starts: tuple[Start, ...]
    steps: int = 60
    save_every: int = 10
    step_seconds: float = 0.05
    state_kib: int = 64
    options: tuple[str, ...] = ()
    knows_keepstep: bool = True


def _starts(*ends: tuple[End, int] | End) -> tuple[Start, ...]:
    return tuple(Start(end=end) if isinstance(end, End) else Start(end=end[0], step=end[1]) for end in ends)


STORIES: Final = (
    Story(name="vision/baseline", starts=_starts(End.DONE), state_kib=256),
    Story(name="vision/long-warmup", starts=_starts((End.NOTICE, 23), End.DONE), state_kib=512),
    Story(name="vision/segmentation", starts=_starts((End.POWER, 27), End.DONE), state_kib=2048),
    Story(
        name="language/small",
        starts=_starts(End.NEVER),
        steps=_FOR_EVER,
        save_every=20,
        step_seconds=0.25,
        options=("--keep-last", "20"),
    ),
    Story(
        name="language/medium",
        starts=_starts((End.POWER, 33), (End.NOTICE, 47), (End.POWER, 430), End.NEVER),
        steps=_FOR_EVER,
        save_every=20,
        step_seconds=0.25,
        state_kib=1024,
        options=("--keep-last", "20"),
    ),
    Story(name="language/distilled", starts=_starts((End.NOTICE, 35)), state_kib=4096),
    Story(
        name="language/broken-data",
        starts=_starts((End.ERROR, 24), (End.ERROR, 700)),
        steps=_FOR_EVER,
        step_seconds=0.25,
        save_every=20,
    ),
    Story(name="speech/wrong-path", starts=_starts((End.ERROR, 2))),
    Story(name="speech/bad-machine", starts=_starts((End.POWER, 14), (End.POWER, 26), (End.POWER, 38), End.DONE)),
    Story(name="speech/unchanged-program", starts=_starts((End.POWER, 31), End.DONE), knows_keepstep=False),
    Story(name="robots/grasping", starts=_starts((End.NOTICE, 12), (End.NOTICE, 31), End.DONE), state_kib=128),
    Story(
        name="robots/walking",
        starts=_starts((End.NOTICE, 17), (End.NOTICE, 640), End.NEVER),
        steps=_FOR_EVER,
        # It saves because the agent asks for it.
        save_every=_FOR_EVER,
        step_seconds=0.25,
        options=("--recovery-point", "10s", "--max-overhead", "20%", "--keep-last", "20"),
    ),
)
