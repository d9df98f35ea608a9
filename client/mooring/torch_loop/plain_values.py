"""What a checkpoint holds unless its owner says otherwise: tensors and plain values, and nothing that is code.

A pickle runs whatever it names, and a checkpoint comes from a bucket that others may write. So what is saved is such
that `torch.load(weights_only=True)` takes it, and what is loaded is read by nothing else; DCP itself would unpickle its
metadata and every value that is no tensor. Owns what counts as plain. Must not know what belongs to a training.
"""

import io
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PosixPath
from typing import IO, Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from mooring.errors import ErrorKind, UsageError

_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_MAPPINGS: Final = (dict, OrderedDict, Counter)
_SEQUENCES: Final = (list, tuple, set)
_METADATA_MODULES: Final = frozenset({Metadata.__module__, FileSystemReader.__module__})
"""Whose records and enums a DCP checkpoint's metadata is made of."""


def require_plain(value: Any, name: str, *, taken_apart: bool = False) -> None:
    """Raises UsageError when `value`, which is called `name`, could not be read again: it names the part at fault.

    `taken_apart`: DCP stores it item by item, so that it does not matter what kind of mapping holds them.
    """
    found = _first_pickled(value, name, mappings=Mapping if taken_apart else ())
    if found is not None:
        raise _refused(f"not saved: {found}, which only pickle can store")


def encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def decode(encoded: bytes | IO[bytes], name: str, *, trust_pickle: bool = False) -> Any:
    """What `encode` was given. Raises UsageError for what would run code, and for what is damaged."""
    file = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    try:
        return torch.load(file, map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:
        raise _refused(f"not loaded: {name} is no plain value{_names_in(file)}") from error


class PlainReader(FileSystemReader):
    """Reads a DCP checkpoint's metadata without running anything, and no file but those of its directory."""

    # Without DCP's `kwargs`, by which it would look for the metadata of one rank alone, that we never write.
    def read_metadata(self) -> Metadata:
        """Raises UnpicklingError, OSError."""
        with Path(self.path, ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"the metadata is a {type(metadata).__qualname__}")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise pickle.UnpicklingError(f"{stored.relative_path!r} is not a file of the checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Loads what is no tensor as a plain value, or not at all."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # DCP unpickles what it is given here: bytes of our own.
        super().load_bytes(read_item, io.BytesIO(encode(decode(value, read_item.dest_index.fqn))))


class _MetadataUnpickler(pickle.Unpickler):
    """Makes DCP's own records, sizes, dtypes and paths; calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        if module == "torch" and (found is torch.Size or isinstance(found, torch.dtype)):
            return found
        # What the module has imported is not its own.
        if module in _METADATA_MODULES and getattr(found, "__module__", "") == module and _is_record(found):
            return found
        match module, name:
            case "torch.serialization", "_get_layout":
                return _layout
            # How Python 3.11 before 3.11.4 pickles a member of an enum.
            case "builtins", "getattr":
                return _enum_member
            # Which of the two depends on the Python that saved.
            case "pathlib" | "pathlib._local", "PosixPath":
                return PosixPath
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}")


def _is_record(found: object) -> bool:
    return isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))


def _enum_member(enum: object, name: object) -> Enum:
    """What `getattr` may be asked for."""
    if not (isinstance(enum, type) and issubclass(enum, Enum) and isinstance(name, str) and name in enum.__members__):
        raise pickle.UnpicklingError(f"its metadata asks for {name!r} of {enum!r}")
    return enum[name]


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"its metadata names {name}")
    return layout


def _first_pickled(value: Any, name: str, *, mappings: Any = ()) -> str | None:
    """The first part of `value` that is no plain value, in words; None if there is none. `mappings`: others that do."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, torch.Tensor):
        return None
    if kind in _MAPPINGS or isinstance(value, mappings):
        parts = [(key, f"a key of {name}") for key in value] + [(one, f"{name}.{key}") for key, one in value.items()]
    elif kind in _SEQUENCES:
        parts = [(one, f"{name}.{place}") for place, one in enumerate(value)]
    elif _is_known_safe(value):
        return None
    else:
        return f"{name} is a {kind.__module__}.{kind.__qualname__}"
    found = (_first_pickled(part, place, mappings=mappings) for part, place in parts)
    return next((one for one in found if one is not None), None)


def _is_known_safe(value: Any) -> bool:
    """For the rest there is torch's own word, and `torch.serialization.add_safe_globals`."""
    try:
        torch.load(io.BytesIO(encode(value)), weights_only=True)
    except Exception:
        return False
    return True


def _names_in(file: IO[bytes]) -> str:
    """What a torch.save names that is not safe, in words, where that can be told."""
    try:
        file.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:
        return ""
    return f", it names {', '.join(sorted(names))}" if names else ""


def _refused(message: str) -> UsageError:
    return UsageError(
        ErrorKind.PICKLE_REFUSED,
        message,
        hint="make it a plain value (numbers, strings, lists, dicts, tensors); or, if you trust everybody who can "
        "write to the destination, give trust_pickle=True, which loads as torch.load(weights_only=False) does: a "
        "checkpoint can run any code then",
    )
