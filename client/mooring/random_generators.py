"""The global random generators of one process: Python's, NumPy's, PyTorch's, and that of its GPU.

Owns which generators there are. One that a program made for itself is its own to save. States are of the types that
`torch.load(weights_only=True)` takes. Imports torch when it is called: whoever calls it trains with it.
"""

import random
import sys
from typing import Any


def capture() -> dict[str, Any]:
    """Their states. NumPy's only if the program uses it, and of the GPUs the current one's alone."""
    import torch

    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    # A process that asks the other GPUs of the machine would make a context on each of them.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Go on where `capture` was. A GPU's state is left out where there is no GPU."""
    import torch

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy

        numpy.random.set_state(tuple(states["numpy"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())
