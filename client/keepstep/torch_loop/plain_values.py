"""What a checkpoint holds by default: tensors and plain values, and nothing that is code.

A pickle runs whatever it names, and a checkpoint comes from a bucket that others may write to. So only values that
`torch.load(weights_only=True)` takes are saved, and values are loaded in no other way. DCP itself would unpickle its
metadata and every value that is not a tensor. Owns what counts as plain. Must not know what belongs to a training.
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

from keepstep.errors import ErrorKind, UsageError

_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_MAPPINGS: Final = (dict, OrderedDict, Counter)
_SEQUENCES: Final = (list, tuple, set)
_METADATA_MODULES: Final = frozenset({Metadata.__module__, FileSystemReader.__module__})
"""The modules of the dataclasses and enums in a DCP checkpoint's metadata."""


def require_plain(value: Any, name: str, *, taken_apart: bool = False) -> None:
    """Raise UsageError if `value`, which is called `name`, could not be loaded again. The error names the part.

    `taken_apart`: DCP stores `value` item by item, so it does not matter what kind of mapping holds the items.
    """
    found = _first_pickled(value, name, mappings=Mapping if taken_apart else ())
    if found is not None:
        raise _refused(f"not saved: {found}, which only pickle can store")


def encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def decode(encoded: bytes | IO[bytes], name: str, *, trust_pickle: bool = False) -> Any:
    """Return what `encode` was given. Raises UsageError for what would run code, and for what is damaged."""
    file = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    try:
        return torch.load(file, map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:
        raise _refused(f"not loaded: {name} is not a plain value{_names_in(file)}") from error


class PlainReader(FileSystemReader):
    """Reads a DCP checkpoint's metadata without running code, and only files of the checkpoint's directory."""

    # Without DCP's `kwargs`, with which it would look for the metadata of a single rank: Keepstep never writes that.
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
    """Loads what is not a tensor as a plain value, or not at all."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # DCP unpickles what it is given here, so it is given bytes that were just encoded from plain values.
        super().load_bytes(read_item, io.BytesIO(encode(decode(value, read_item.dest_index.fqn))))


class _MetadataUnpickler(pickle.Unpickler):
    """Makes DCP's own dataclasses and enums, sizes, dtypes, layouts and paths; calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        if module == "torch" and (found is torch.Size or isinstance(found, torch.dtype)):
            return found
        # A name that the module has only imported does not count.
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
    """Takes the place of `getattr`: gives members of enums, and nothing else."""
    if not (isinstance(enum, type) and issubclass(enum, Enum) and isinstance(name, str) and name in enum.__members__):
        raise pickle.UnpicklingError(f"its metadata asks for {name!r} of {enum!r}")
    return enum[name]


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"its metadata names {name}")
    return layout


def _first_pickled(value: Any, name: str, *, mappings: Any = ()) -> str | None:
    """Return in words the first part of `value` that is not plain, or None. `mappings`: further types allowed."""
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
    """Whether torch itself, with what `torch.serialization.add_safe_globals` added, loads any other value as safe."""
    try:
        torch.load(io.BytesIO(encode(value)), weights_only=True)
    except Exception:
        return False
    return True


def _names_in(file: IO[bytes]) -> str:
    """Return in words the unsafe names in what torch.save wrote; empty where they cannot be told."""
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
