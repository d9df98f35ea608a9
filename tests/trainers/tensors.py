"""Every tensor in a checkpoint, whatever wrote it: two checkpoints are compared by what training goes on from.

Files are read with the libraries that wrote them; their bytes may differ where the tensors do not.
"""

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def digests(checkpoint: Path) -> dict[str, str]:
    """Where a tensor is -> what it is: its type, shape and bytes."""
    # They are imported, and warn, only where such a file is found.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(_digests(checkpoint))


def _digests(checkpoint: Path) -> Iterator[tuple[str, str]]:
    import torch
    from safetensors.torch import load_file

    for path in sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]:
        place = path.relative_to(checkpoint).as_posix()
        if path.name == ".metadata":
            yield from _of(_load_dcp(path.parent), place)
        elif path.suffix == ".safetensors":
            yield from _of(load_file(path), place)
        elif path.suffix in (".pt", ".pth", ".bin", ".ckpt") and path.name != "training_args.bin":
            yield from _of(torch.load(path, map_location="cpu", weights_only=False), place)


def _load_dcp(directory: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def _of(value: Any, place: str) -> Iterator[tuple[str, str]]:
    import torch

    if isinstance(value, torch.Tensor):
        local = value.detach().cpu().contiguous()
        raw = local.view(torch.uint8) if local.dim() else local.reshape(1).view(torch.uint8)
        content = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
        yield place, f"{local.dtype} {tuple(local.shape)} {content}"
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _of(one, f"{place}/{key}")
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _of(one, f"{place}/{index}")
