"""A PyTorch training loop that survives its pod: its whole state, saved while it trains, and resumed bit-identical."""

from keepstep.torch_loop.loop import TorchLoop
from keepstep.torch_loop.state import TrainingState

__all__ = ["TorchLoop", "TrainingState"]
