"""How large a training's state is, found out at its first steps: by then the optimizers have made theirs.

So the memory for the first copy can be made before the first save, which then costs no more than later ones.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

_hooked: Final[set[int]] = set()
"""The modules of optimizers that tell us of their steps. One hook stays for ever: to remove it within a step fails."""
_asking: Final[list[tuple[Callable[[int], object], Any]]] = []
_stepped: Final[list[Any]] = []


def when_known(tell: Callable[[int], object], model: Any = None) -> None:
    """Call `tell` once with the bytes of what this process's optimizers train and keep, after each one's first step.

    `model`: a torch module whose tensors are saved beside those, if they are others, as where optimizers train copies.
    Never, if the program has not imported torch.optim, or trains without it.
    """
    optimizers: Any = sys.modules.get("torch.optim.optimizer")
    if not hasattr(optimizers, "register_optimizer_step_post_hook"):
        return
    _asking.append((tell, model))
    if id(optimizers) not in _hooked:
        _hooked.add(id(optimizers))
        optimizers.register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Any, *_: Any) -> None:
    if not _asking or _is_captured():
        return
    if not any(one is optimizer for one in _stepped):
        _stepped.append(optimizer)
        return
    # The first one steps again.
    sizes = _sizes(tensor for one in _stepped for tensor in _tensors(one))
    asking = list(_asking)
    _asking.clear()
    _stepped.clear()
    for tell, model in asking:
        beside = [] if model is None else [*model.parameters(), *model.buffers()]
        tell(sum((sizes | _sizes(beside)).values()))


def _is_captured() -> bool:
    """Whether this step is recorded in a CUDA graph, or compiled: to pin memory within would end that."""
    import torch

    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return is_capturing or torch.compiler.is_compiling()


def _sizes(tensors: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes; of a sharded tensor those of this rank's part."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return {part.data_ptr(): part.nbytes for part in parts}


def _tensors(optimizer: Any) -> Iterator[Any]:
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            for one in (parameter, *(kept.values() if isinstance(kept, dict) else ())):
                if isinstance(one, torch.Tensor):
                    yield one
