"""Keepstep inside the trainer: keeps a training job's checkpoints safe when its pod goes away."""

from keepstep.checkpoint_writer import CheckpointWriter
from keepstep.checkpointer import Checkpointer
from keepstep.checkpoints.records import Kind
from keepstep.errors import AgentError, ErrorKind, KeepstepError, RanksError, RestoreError, UsageError, VolumeError
from keepstep.protect import protect
from keepstep_api import __version__ as __version__

__all__ = [
    "AgentError",
    "CheckpointWriter",
    "Checkpointer",
    "ErrorKind",
    "KeepstepError",
    "Kind",
    "RanksError",
    "RestoreError",
    "UsageError",
    "VolumeError",
    "protect",
]
