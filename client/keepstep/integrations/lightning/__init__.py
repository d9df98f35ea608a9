"""Lightning: announces a Trainer's checkpoints, saves just in time and leaves, and resumes.

Owns where a Trainer is wrapped: one callback, and its `fit`. What happens there is in `protection`.
"""

import functools
import inspect
from types import ModuleType
from typing import Any, Final

from keepstep.integrations.lightning.protection import Protection, make_protection
from keepstep.integrations.ownership import Owner, claim, protect_new

_MODULE: Final = ".trainer.trainer"
"""The module in which both packages have their Trainer, after the package's name."""


def install(trainer: Any) -> None:
    """Protect the training of a `lightning.pytorch.Trainer` or a `pytorch_lightning.Trainer`; idempotent."""
    if any(isinstance(callback, Protection) for callback in trainer.callbacks):
        return
    package = next(cls.__module__ for cls in type(trainer).__mro__ if cls.__module__.endswith(_MODULE))
    protection = make_protection(package.removesuffix(_MODULE))
    # Not a closure: a strategy that spawns its ranks pickles the Trainer for them.
    trainer.fit = functools.update_wrapper(functools.partial(_fit, protection, trainer.fit), trainer.fit)
    trainer.callbacks.append(protection)
    protection.choose_directory(trainer)


def autoload(module: ModuleType) -> None:
    """Protect every Trainer that is made from now on. `module` is that of the class."""
    protect_new(module.Trainer, install)


def _fit(protection: Protection, fit: Any, *arguments: Any, **keywords: Any) -> Any:
    if any(getattr(callback, "_early_exit", False) for callback in fit.__self__.callbacks):
        # A Tuner's trial is not a training.
        return fit(*arguments, **keywords)
    claim(Owner.TRAINER)
    given = inspect.signature(fit).bind(*arguments, **keywords).arguments
    protection.arm(fit.__self__, resumes=given.get("ckpt_path") in (None, "last"))
    has_ended = False
    try:
        result = fit(*arguments, **keywords)
        has_ended = True
        return result
    finally:
        protection.end(ended=has_ended)
