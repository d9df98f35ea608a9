"""A copy of anything that `torch.save` takes, whose tensors are in memory that is kept from save to save.

The value is taken apart as `torch.save` itself does it: pickled, with each storage in a place of its own. So tensors
that share a storage share its copy, a view stays a view, what is not a tensor becomes a copy too, and the file that is
written from the copy is the one that would have been written from the value. What was copied before and has not changed
is not copied again: a framework may save one state twice. The copy of a GPU's tensor lies in the host's memory, and its
file still names the GPU. The copy of a rank's shard of a tensor belongs to the same mesh of devices. Imports torch, so
it is imported by programs that use it.
"""

import functools
import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from keepstep.asynchronous_saves.host_memory import HostMemory, aligned
from keepstep.private_members import require

_PROTOCOL: Final = 2
"""The protocol of `torch.save`: with another one, an object may be pickled in another way."""
_FIRST: Final = -1
"""Priority of our tags: before those of torch."""
_COMPARED_BYTES: Final = 16 * 1024 * 1024
"""At once: what differs mostly differs soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """`value`: what was copied. `size_bytes`: of its tensors."""

    value: Any
    size_bytes: int


def copy_to_host(value: Any, memory: HostMemory) -> HostCopy | None:
    """Return the copy; None where there is no room for it.

    Args:
        value: What `torch.save` takes.
        memory: Where the copy shall be.

    Raises:
        Exception: What pickling raises, as `torch.save` would, and what unpickling it again raises.
    """
    pickled = io.BytesIO()
    splitter = _Splitter(pickled)
    splitter.dump(value)
    copies = _copied([_bytes_of(storage) for storage in splitter.storages], memory)
    if copies is None:
        return None
    copied = [copy.untyped_storage() for copy in copies]
    for storage, copy in zip(splitter.storages, copied, strict=True):
        _keep_location(storage, copy)
    joined = _Joiner(pickled.getvalue(), copied, splitter.meshes).load()
    return HostCopy(value=joined, size_bytes=sum(storage.nbytes() for storage in splitter.storages))


def copied_bytes(value: Any) -> int:
    """Return how much memory a copy takes. Raises what pickling raises."""
    splitter = _Splitter(io.BytesIO())
    splitter.dump(value)
    return sum(aligned(storage.nbytes()) for storage in splitter.storages)


class _Splitter(pickle.Pickler):
    """Pickles a value without its storages and meshes of devices, and collects these."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self.meshes: list[Any] = []
        self._numbers: dict[int, int] = {}
        # A program that has not imported it has no mesh.
        module = sys.modules.get("torch.distributed.device_mesh")
        self._mesh: type | tuple[()] = getattr(module, "DeviceMesh", ())

    def persistent_id(self, found: Any) -> int | tuple[int, torch.dtype | None] | None:
        storage: Any
        if isinstance(found, self._mesh):
            # Unpickled, it would have lost its process groups.
            self.meshes.append(found)
            return len(self.meshes) - 1
        if isinstance(found, torch.storage.TypedStorage):
            # Its public way to this warns that there will be no TypedStorage some day.
            require("torch.storage.TypedStorage", found)
            storage, dtype = found._untyped_storage, found.dtype
        elif torch.is_storage(found):
            storage, dtype = found, None
        else:
            return None
        # Several objects of Python may stand for one storage.
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number, dtype


class _Joiner(pickle.Unpickler):
    """Makes the value again, over copies of its storages. The pickle is this process's own."""

    def __init__(self, pickled: bytes, copies: Sequence[Any], meshes: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._copies = copies
        self._meshes = meshes

    def persistent_load(self, found: int | tuple[int, torch.dtype | None]) -> Any:
        if isinstance(found, int):
            return self._meshes[found]
        number, dtype = found
        copy = self._copies[number]
        if dtype is None:
            # Where newer types of tensors are loaded, torch looks for this, as each storage is a TypedStorage there.
            copy._untyped_storage = copy
            return copy
        typed: Any = torch.storage.TypedStorage
        return typed(wrap_storage=copy, dtype=dtype, _internal=True)


def _keep_location(storage: torch.UntypedStorage, copy: Any) -> None:
    """Have the file of `copy` name the device of `storage`."""
    if storage.device.type != "cpu":
        _tell_locations()
        copy.keepstep_location = torch.serialization.location_tag(storage)


@functools.cache
def _tell_locations() -> None:
    torch.serialization.register_package(_FIRST, _location, lambda *_: None)


def _location(storage: Any) -> str | None:
    return getattr(storage, "keepstep_location", None)


def copy_tensors_to_host(tensors: Mapping[str, torch.Tensor], memory: HostMemory) -> HostCopy | None:
    """Return copies of dense tensors, by name, each in a storage of its own; None where there is no room for them."""
    copies = _copied([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors.values()], memory)
    if copies is None:
        return None
    copied = {
        name: copy.view(tensor.dtype).view(tensor.shape)
        for (name, tensor), copy in zip(tensors.items(), copies, strict=True)
    }
    return HostCopy(value=copied, size_bytes=sum(tensor.nbytes for tensor in tensors.values()))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(sources: Sequence[torch.Tensor], memory: HostMemory) -> list[torch.Tensor] | None:
    """Return copies of tensors of bytes, each in a storage of its own; None where there is no room for them."""
    places = [(str(source.device), source.data_ptr(), source.nbytes) for source in sources]
    copies = [_unchanged(source, memory.copies.get(place)) for source, place in zip(sources, places, strict=True)]
    new = [number for number, copy in enumerate(copies) if copy is None]
    taken = memory.take([sources[number].nbytes for number in new])
    if taken is None:
        return None
    for number, storage in zip(new, taken, strict=True):
        copies[number] = memory.copies[places[number]] = _bytes_of(storage).copy_(sources[number])
    return [copy for copy in copies if copy is not None]


def _unchanged(source: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor | None:
    """Return `copy` if that is what `source` still is."""
    if copy is None:
        return None
    for start in range(0, len(source), _COMPARED_BYTES):
        piece = slice(start, start + _COMPARED_BYTES)
        if not torch.equal(source[piece].cpu(), copy[piece]):
            return None
    return copy
