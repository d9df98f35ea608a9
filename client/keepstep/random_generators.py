"""The global random generators of one process: Python's, NumPy's, PyTorch's, and that of its GPU.

Owns the list of generators. A program must save those that it made itself. States are of types that
`torch.load(weights_only=True)` takes. Imports torch only when called, by a program that trains with it.
"""

import random
import sys
from typing import Any


def capture() -> dict[str, Any]:
    """Return their states: NumPy's only if the program uses it, and of the GPUs only the current one's."""
    import torch

    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    # Asking the other GPUs of the machine would make a context on each of them.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Continue from the states that `capture` returned. A GPU's state is skipped where there is no GPU."""
    import torch

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy

        numpy.random.set_state(tuple(states["numpy"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())
