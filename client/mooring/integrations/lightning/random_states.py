"""The random states of all ranks, which Lightning's checkpoints leave out.

In the types that `torch.load(weights_only=True)` takes. Imports torch when it is called: Lightning has imported it.
"""

import random
import sys
from typing import Any


def capture() -> dict[str, Any]:
    """This rank's, of the generators that a training step draws from."""
    import torch

    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    if _on_gpu():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of all ranks, by rank; all call it at the same place, as they do Lightning's own collectives there."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return [own]
    states = [own] * distributed.get_world_size()
    distributed.all_gather_object(states, own)
    return states


def restore(states: dict[str, Any]) -> None:
    """Put back what `capture` gave. A GPU's needs the same kind of device."""
    import torch

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"].cpu())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))
    if _on_gpu() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu())


def _on_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
