"""Which of several nested frameworks controls the training loop: the outermost.

Hugging Face's Trainer trains with an Accelerator, and that with a DeepSpeedEngine. Each is protected when it is made,
but only one may ask at a step, announce a checkpoint and choose what to resume from. The contract: an integration
calls `claim` for its framework in `install`, once and for all, even if it cannot protect what it was given, because the
outer framework could not resume from a checkpoint of the inner one; it asks `owns` at every step, save and load,
because the inner framework's object is made before the outer one's. Where `owns` is false it does what the framework
does without Keepstep. Also hooks constructors, so that every new trainer object is protected.
"""

import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from keepstep.autoload.post_import import reason, warn


class Owner(IntEnum):
    """Who may control the training, from the innermost to the outermost."""

    DCP = 1
    DEEPSPEED = 2
    ACCELERATE = 3
    TRAINER = 4
    """Hugging Face's or Lightning's."""
    CHECKPOINTER = 5
    """A loop that calls keepstep.Checkpointer itself, whatever it writes its files with."""


_outermost: Owner | None = None


def claim(owner: Owner) -> None:
    """Let `owner` control the training of this process, unless something further out claims it too."""
    global _outermost
    _outermost = owner if _outermost is None else max(_outermost, owner)


def owns(owner: Owner) -> bool:
    """Whether nothing further out than `owner` has claimed this process."""
    return _outermost is None or _outermost <= owner


def protect_new(cls: Any, install: Callable[[Any], None]) -> None:
    """Call `install` with every object of `cls` that is made from now on. What it raises becomes one warning."""
    make = cls.__init__

    @functools.wraps(make)
    def make_protected(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        try:
            install(self)
        except Exception as error:
            warn(f"{type(self).__qualname__} is not protected: {reason(error)}")

    cls.__init__ = make_protected
