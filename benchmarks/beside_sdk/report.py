"""The page of `benchmarks.beside_sdk`, the goals, and what the notes of a training say."""

import itertools
import os
import platform
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

REPORT: Final = Path(__file__).parents[1] / "BESIDE_SDK.md"


class Note(NamedTuple):
    """A step has begun, or its optimizer's step has ended; in seconds of the machine's monotonic clock."""

    what: str
    step: int
    seconds: float


def notes_of(text: str) -> list[Note]:
    """Read what `program.py` has written until now; its last line may not be whole."""
    words = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Note(what, int(step), float(seconds)) for what, step, seconds in words]


def stalls(notes: Sequence[Note], save_every: int) -> list[float]:
    """Return how long training stood still for each save: from a step's end to the next begin, less the usual."""
    pauses = [
        (earlier.step, later.seconds - earlier.seconds)
        for earlier, later in itertools.pairwise(notes)
        if earlier.what == "end" and later.what == "begin"
    ]
    usual = statistics.median(seconds for step, seconds in pauses if step % save_every)
    return [seconds - usual for step, seconds in pauses if step % save_every == 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one contestant's trainings took in one round, in seconds."""

    first_stall: float
    later_stall: float
    to_durable: float
    resumed_start: float


FIGURES: Final = {
    "first_stall": "training stands still for the first save",
    "later_stall": "training stands still for a later save",
    "to_durable": "SIGTERM to the end, when all is stored",
    "resumed_start": "start to the first step of a resumed run",
}
"""By the fields of `Turn`."""
GOALS: Final = {"later_stall": 1.0, "to_durable": 1.0, "resumed_start": 1.2}
"""How many times as long as with the SDK it may take at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The turns of both, round by round."""

    keepstep: Sequence[Turn]
    sdk: Sequence[Turn]

    def ratio(self, field: str) -> float:
        """Return the median of the ratios of all rounds."""
        pairs = zip(_seconds(self.keepstep, field), _seconds(self.sdk, field), strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def goals(self) -> Iterator[tuple[str, str, bool]]:
        """What is to be, what was measured, and whether it is met."""
        for field, goal in GOALS.items():
            ratio = self.ratio(field)
            yield f"{FIGURES[field]}: ≤ {goal:g} x the SDK's", f"{ratio:.2f} x", ratio <= goal


def page(rounds: Rounds, versions: Mapping[str, str]) -> str:
    lines = [
        "# Beside the OpenShift AI SDK",
        "",
        "Made by `python -m benchmarks.beside_sdk --sdk DIR`, with DIR a checkout of",
        "[opendatahub-io/kubeflow-sdk](https://github.com/opendatahub-io/kubeflow-sdk); do not edit.",
        "",
        *_what_was_measured(len(rounds.sdk), versions),
        "",
        "| seconds: median, least and most | Keepstep | SDK | x, median of the rounds |",
        "|---|---|---|---|",
        *(
            f"| {name} | {_cell(rounds.keepstep, field)} | {_cell(rounds.sdk, field)} | {rounds.ratio(field):.2f} |"
            for field, name in FIGURES.items()
        ),
        "",
        "Training stands still from the end of an optimizer's step to the next forward pass, less what that takes",
        "without a save. Keepstep makes the memory for its copy in the first two steps, which is not in it.",
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(f"| {goal} | {measured} | {'yes' if met else 'no'} |" for goal, measured, met in rounds.goals()),
    ]
    return "\n".join(lines) + "\n"


def _what_was_measured(rounds: int, versions: Mapping[str, str]) -> Sequence[str]:
    text = (
        "One Hugging Face Trainer on one rank, a checkpoint of 85 MB in its six files, and the same program for both. "
        "Keepstep: `keepstep run --autoload`. A save is asynchronous, its files are synced before they are uploaded, "
        "and a restore checks every byte and syncs it before the program starts. SDK: the code that its "
        "`TransformersTrainer` puts around the program, with its defaults. The Trainer saves as ever, and a thread of "
        "the training uploads with s3fs. It syncs nothing, and of checksums it has those that botocore adds to "
        "uploads; their check in downloads is off, because rclone sends that of a whole object with a part of it. Both "
        "resume by themselves on an empty disk, at the step after the one that was saved just in time. "
        f"{rounds} rounds, in each of which both have their turn, now one first and now the other; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}; `rclone serve s3` on loopback; "
        f"{os.cpu_count()} cores ({platform.machine()}), and at the end {os.getloadavg()[1]:.1f} processes to run."
    )
    return textwrap.wrap(text, 118)


def _cell(turns: Sequence[Turn], field: str) -> str:
    seconds = _seconds(turns, field)
    digits = 2 if min(seconds) >= 1 else 3
    return f"{statistics.median(seconds):.{digits}f}, {min(seconds):.{digits}f} to {max(seconds):.{digits}f}"


def _seconds(turns: Sequence[Turn], field: str) -> list[float]:
    return [getattr(turn, field) for turn in turns]
