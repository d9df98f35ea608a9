"""Mooring inside the trainer: keeps a training job's checkpoints safe when its pod is not."""

from importlib.metadata import version

from mooring.checkpointer import Checkpointer
from mooring.errors import AgentError, ErrorKind, MooringError, UsageError, VolumeError
from mooring.records import Kind

__all__ = ["AgentError", "Checkpointer", "ErrorKind", "Kind", "MooringError", "UsageError", "VolumeError"]
__version__ = version("mooring")
