"""Mooring inside the trainer: keeps a training job's checkpoints safe when its pod goes away."""

from mooring.checkpoint_writer import CheckpointWriter
from mooring.checkpointer import Checkpointer
from mooring.checkpoints.records import Kind
from mooring.errors import AgentError, ErrorKind, MooringError, RanksError, UsageError, VolumeError
from mooring.protect import protect

__all__ = [
    "AgentError",
    "CheckpointWriter",
    "Checkpointer",
    "ErrorKind",
    "Kind",
    "MooringError",
    "RanksError",
    "UsageError",
    "VolumeError",
    "protect",
]


def __getattr__(name: str) -> str:
    # Looked up on demand, because an injected client lies in a volume and is not installed, so it has no version.
    if name == "__version__":
        from importlib.metadata import version

        return version("mooring")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
