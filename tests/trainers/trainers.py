"""The trainers of the matrix: the very files in `examples/`, and at which moments each is told to stop.

A row says what a trainer has; what all of them must do is in `chain.py`.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).parents[2] / "examples"


class Notice(StrEnum):
    """By which way the news comes that the pod is ending."""

    LAUNCHER = "SIGTERM to torchrun"
    RANK_0 = "SIGTERM to rank 0"
    RANK_1 = "SIGTERM to rank 1"
    SIGNAL_FILE = "the signal file"


class Moment(StrEnum):
    """What the ranks are at when it comes; the value is a place of `paced.py`."""

    BACKWARD = "backward"
    """Before the optimizer's step: the warm-up at the first step, else in the midst of an accumulation."""
    STEP = "step"
    EVALUATION = "evaluation"
    SAVE = "save"
    """A periodic save, in the foreground or in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """`after`: optimizer steps of this attempt before it. `twice`: once more during the just-in-time save.

    `autoload`: with zero code; a trainer that has its own calls keeps them, and autoload must do nothing.
    """

    notice: Notice
    moment: Moment
    after: int
    twice: bool = False
    autoload: bool = False

    def __str__(self) -> str:
        return f"{self.notice}, {self.moment}" + ", twice" * self.twice + ", autoload" * self.autoload


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """`same_losses`, `same_tensors`: they are those of an uninterrupted run, bit by bit; the tensors of the last save.

    `evaluates_first`: once more before the first step of a run, where one rank alone is told and must not forget it.
    `zero_code`: it needs no line of Keepstep under autoload. `writers`: ranks that have a share in a checkpoint.
    """

    name: str
    arguments: tuple[str, ...] = ("--save-every", "5")
    zero_code: bool = True
    evaluates: bool = False
    evaluates_first: bool = False
    same_losses: bool = True
    same_tensors: bool = True
    notices: tuple[Notice, ...] = tuple(Notice)
    writers: int = 2

    @property
    def program(self) -> Path:
        return EXAMPLES / f"{self.name}.py"

    @property
    def stops(self) -> tuple[Stop, ...]:
        """One for each notice; the attempt that one of them ends begins where the one before it was stopped."""
        first = Stop(notice=Notice.RANK_1, moment=Moment.EVALUATION, after=0)
        evaluating = Moment.EVALUATION if self.evaluates else Moment.STEP
        stops = (
            *((first,) if self.evaluates_first else ()),
            Stop(notice=Notice.LAUNCHER, moment=Moment.BACKWARD, after=0),
            Stop(notice=Notice.RANK_0, moment=Moment.SAVE, after=1),
            Stop(notice=Notice.RANK_1, moment=Moment.BACKWARD, after=2, twice=True, autoload=True),
            Stop(notice=Notice.SIGNAL_FILE, moment=evaluating, after=2),
        )
        return tuple(stop for stop in stops if stop.notice in self.notices)


STEPS: Final = 24
"""Of an uninterrupted run; room for four stops with some steps between them."""

TRAINERS: Final = (
    Trainer(name="ddp", zero_code=False),
    Trainer(name="fsdp2", zero_code=False),
    Trainer(name="hugging_face", evaluates=True),
    Trainer(name="trl_sft"),
    Trainer(name="lightning_trainer", evaluates=True, evaluates_first=True),
    Trainer(name="accelerate_loop"),
    # What ZeRO pads a rank's share with is whatever was in memory.
    Trainer(name="deepspeed_zero3", same_tensors=False),
    # Rank 1 has no Checkpointer: a notice to it alone is heard by nobody.
    Trainer(
        name="horovod_style",
        zero_code=False,
        notices=(Notice.LAUNCHER, Notice.RANK_0, Notice.SIGNAL_FILE),
        writers=1,
    ),
)
