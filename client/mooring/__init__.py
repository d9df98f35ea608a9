"""Mooring inside the trainer: keeps a training job's checkpoints safe when its pod goes away."""

from mooring.checkpoint_writer import CheckpointWriter
from mooring.checkpointer import Checkpointer
from mooring.checkpoints.records import Kind
from mooring.errors import AgentError, ErrorKind, MooringError, RanksError, RestoreError, UsageError, VolumeError
from mooring.protect import protect
from mooring_api import __version__ as __version__

__all__ = [
    "AgentError",
    "CheckpointWriter",
    "Checkpointer",
    "ErrorKind",
    "Kind",
    "MooringError",
    "RanksError",
    "RestoreError",
    "UsageError",
    "VolumeError",
    "protect",
]
