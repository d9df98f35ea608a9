"""Hugging Face's Trainer and what derives from it, such as the trainers of TRL.

Owns where a Trainer is wrapped: its class once, for `train`, because subclasses override that and call it in turn; and
each object, for the methods around a step. What happens there is in `protection`. Only the first training of a process
is protected: a run is one training, and the first could not resume from what a second one saved.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from keepstep.integrations.ownership import Owner, claim, protect_new
from keepstep.private_members import require

_PROTECTION = "_keepstep_protection"


def install(trainer: Any) -> None:
    """Protect what this Trainer trains. Idempotent. Raises AttributeError in a version that is too different."""
    if _PROTECTION in vars(trainer):
        return
    from transformers.trainer import Trainer

    # These import torch and transformers, and autoload is called in the middle of that import.
    from keepstep.integrations.hugging_face.protection import Protection

    # Also for a Trainer that cannot be protected: it could not resume from what its Accelerator would save.
    claim(Owner.TRAINER)
    require("transformers.Trainer", trainer)
    _wrap_train(Trainer)
    protection = Protection(trainer)
    _wrap(trainer, "_maybe_log_save_evaluate", protection.after_step)
    _wrap(trainer, "_save_checkpoint", protection.save)
    if hasattr(trainer, "_run_epoch"):
        _wrap(trainer, "_run_epoch", protection.epoch)
    trainer.add_callback(protection)
    setattr(trainer, _PROTECTION, protection)


def autoload(module: ModuleType) -> None:
    """Protect every Trainer that is made from now on. `module` is transformers.trainer."""
    protect_new(module.Trainer, install)


def _wrap_train(trainer_class: Any) -> None:
    plain = trainer_class.train
    if hasattr(plain, _PROTECTION):
        return

    @functools.wraps(plain)
    def train(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        protection = vars(trainer).get(_PROTECTION)
        if protection is None:
            return plain(trainer, *arguments, **keywords)
        return protection.train(functools.partial(plain, trainer), *arguments, **keywords)

    setattr(train, _PROTECTION, True)
    trainer_class.train = train


def _wrap(trainer: Any, name: str, ours: Callable[..., None]) -> None:
    setattr(trainer, name, functools.partial(ours, getattr(trainer, name)))
