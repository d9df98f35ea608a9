"""Puts the checkpoints of a program that names no directory where Keepstep stores them.

Lightning would write them to `lightning_logs/version_N/checkpoints` below the working directory, outside the volume.
Whatever the program chose stays: a callback's `dirpath`, a Trainer's `default_root_dir`, a logger's `save_dir`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from keepstep.errors import UsageError
from keepstep.settings import read_settings
from keepstep_api import names

_CHOSEN_BY_LIGHTNING: Final = "_keepstep_undecided"


def directory_for(trainer: Any) -> Path | None:
    """Return the directory for checkpoints of this Trainer; None if they stay where they are.

    Call it where the Trainer was made: later the working directory may be another.
    """
    if trainer.fast_dev_run or not (names.ENV_VOLUME in os.environ or names.ENV_CHECKPOINT_DIRECTORY in os.environ):
        return None
    try:
        settings, here = read_settings(os.environ), Path.cwd()
    except (UsageError, OSError):
        # The training will not be protected, and a warning will say why.
        return None
    directory, volume = settings.checkpoint_directory, settings.volume
    if here.is_relative_to(volume) or not directory.is_relative_to(volume):
        return None
    roots = [trainer.default_root_dir, *(logger.save_dir for logger in trainer.loggers[:1])]
    has_chosen = any(root is not None and Path(root).absolute() != here for root in roots)
    return None if has_chosen else directory


def has_numbered_versions(trainer: Any) -> bool:
    """Whether a logger will number the folder of this Trainer's checkpoints anew at each start."""
    logger = next(iter(trainer.loggers), None)
    return logger is not None and all(getattr(logger, name, None) is None for name in ("_version", "_id", "_run_id"))


def outputs_of(trainer: Any, *, numbered: bool) -> list[Path]:
    """Return the output directory of each ModelCheckpoint: where it writes, without the number of a version.

    As Lightning itself chooses it in `ModelCheckpoint.setup`, where the program has not. The same on all ranks.
    """
    logger = next(iter(trainer.loggers), None)
    if logger is None:
        default = Path(trainer.default_root_dir, "checkpoints")
    else:
        default = Path(logger.save_dir or trainer.default_root_dir, str(logger.name))
        if not numbered:
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            default = default / version / "checkpoints"
    outputs = [
        default if callback.dirpath is None or hasattr(callback, _CHOSEN_BY_LIGHTNING) else Path(callback.dirpath)
        for callback in model_checkpoints(trainer)
    ]
    broadcast: list[Path] = trainer.strategy.broadcast(outputs)
    return broadcast


def mark_undecided(trainer: Any) -> None:
    """Mark the ModelCheckpoints whose directory Lightning itself will choose. Call it before the fit."""
    for callback in model_checkpoints(trainer):
        if callback.dirpath is None:
            setattr(callback, _CHOSEN_BY_LIGHTNING, True)


def put_into(directory: Path, trainer: Any) -> list[Any]:
    """Let each ModelCheckpoint that has no directory write to this one, as all share one without Keepstep; return them.

    On every rank, before Lightning resolves the directory in their `setup`.
    """
    moved = [callback for callback in model_checkpoints(trainer) if callback.dirpath is None]
    for callback in moved:
        callback.dirpath = str(directory)
    return moved


def model_checkpoints(trainer: Any) -> Iterator[Any]:
    for callback in trainer.callbacks:
        if any(cls.__name__ == "ModelCheckpoint" for cls in type(callback).__mro__):
            yield callback
