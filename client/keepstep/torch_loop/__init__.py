"""A PyTorch training loop that survives its pod: its whole state, saved while it trains, and resumed bit-identical."""

import torch

from keepstep.errors import ErrorKind, UsageError
from keepstep.torch_loop.loop import TorchLoop
from keepstep.torch_loop.state import TrainingState

# The oldest that it was written for. A pre-release counts as its release.
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
    raise UsageError(
        ErrorKind.UNSUPPORTED,
        f"torch {torch.__version__} is too old for keepstep.torch_loop",
        hint="install torch 2.9 or newer, or save with keepstep.Checkpointer",
    )

__all__ = ["TorchLoop", "TrainingState"]
