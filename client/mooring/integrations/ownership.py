"""Which of several nested frameworks speaks for the training loop: the outermost.

Hugging Face's Trainer trains with an Accelerator, and that with a DeepSpeedEngine; each of them is protected when it
is made, and only one may ask at a step, announce a checkpoint and choose what to resume from. The contract: an
integration calls `claim` for its framework in `install`, for good, as soon as it can protect what it was given; and
it asks `owns` at every step, save and load, not once, because the inner framework's object is made before the outer
one's. Where `owns` is false it does what the framework does without Mooring. Knows no framework.
"""

from enum import IntEnum


class Owner(IntEnum):
    """From the innermost to the outermost."""

    DCP = 1
    DEEPSPEED = 2
    ACCELERATE = 3
    TRAINER = 4
    """Hugging Face's or Lightning's."""
    CHECKPOINTER = 5
    """A loop that calls mooring.Checkpointer itself, whatever it writes its files with."""


_outermost: Owner | None = None


def claim(owner: Owner) -> None:
    """From now on this process trains by `owner`, unless something further out claims too."""
    global _outermost
    _outermost = owner if _outermost is None else max(_outermost, owner)


def owns(owner: Owner) -> bool:
    """Whether nothing further out than `owner` has claimed this process."""
    return _outermost is None or _outermost <= owner
