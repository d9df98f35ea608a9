"""Writes the format of safetensors into an open file: its own library opens the files that it writes by itself.

The file is the same byte by byte. The library makes the header, of empty tensors: the order, the names of the types and
the metadata are its own.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import safetensors.torch
import torch

_LENGTH_BYTES: Final = 8


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Any, metadata: Mapping[str, str] | None) -> None:
    """Write dense tensors of the host's memory. Raises OSError, and what safetensors raises for a header."""
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    header = json.loads(safetensors.torch.save(empty, None if metadata is None else dict(metadata))[_LENGTH_BYTES:])
    names = [name for name in header if name != "__metadata__"]
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name].update(shape=list(tensors[name].shape), data_offsets=[begin, end])
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    file.write(text)
    for name in names:
        file.write(tensors[name].reshape(-1).view(torch.uint8).numpy())
