"""The global random generators of one process: Python's, NumPy's, PyTorch's, and that of its GPU.

Owns which generators there are. One that a program made for itself is its own to save.
"""

import hashlib
import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Their states. NumPy's only if the program uses it, and of the GPUs the current one's alone."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    # A process that asks the other GPUs of the machine would make a context on each of them.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def apply(states: dict[str, Any]) -> None:
    """Go on where `capture` was. A GPU's state is left out where there is no GPU."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_anew(*parts: int) -> None:
    """Seed all of them from these numbers: for a process that has nothing to go on from."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
