"""Reads a DCP checkpoint of which the agent brings only what this rank's plan asks for.

Owns how a plan becomes ranges of files, and who reads what all ranks need.

A state has thousands of small items that every rank needs, such as the learning rate of each parameter, and DCP spreads
them over the files of all ranks. If each rank read them, it would have a part of every file brought. So one rank reads
those of a file, which reads other things in that file, and the ranks tell each other what they have read.

If a stored tensor is larger than what this rank needs of it, as after a change
of the number of ranks, the rows that it needs are enough: `torch.load` then finds zeros in the others, and nobody looks
at them. That holds only for tensors whose elements lie in order, so their layout is read first.
"""

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from keepstep.agent_client.restores import FileRange
from keepstep.resuming import PartialCheckpoint

METADATA_FILE: Final = ".metadata"
_SMALL_BYTES: Final = 64 * 1024
"""The largest item that ranks tell each other. An agent has a part of a file brought for it, many times as large."""
_WORTH_BYTES: Final = 5 * 1024**2
"""Fewer bytes than this are not left out: the agent brings parts of at least that size."""
_BATCH_BYTES: Final = 64 * 1024**2
"""So much is waited for and then read, while what follows arrives."""


class PartialReader(StorageReader):
    """Has `checkpoint` brought as far as it is read.

    `make` returns the reader for a directory, `read` the metadata in it, or raises a KeepstepError. `group` is that of
    all ranks that load; None if this process loads alone. Making one is collective: rank 0 reads the metadata and sends
    it to the others. All raise what it raises.
    """

    def __init__(
        self,
        checkpoint: PartialCheckpoint,
        make: Callable[[Path], FileSystemReader],
        read: Callable[[Path], Metadata],
        group: "dist.ProcessGroup | None",
    ) -> None:
        super().__init__()
        self._group = group
        self._checkpoint = checkpoint
        self._make = make
        self._directory = Path()
        self._metadata = self._read_on_rank_0(read)

    def _read_on_rank_0(self, read: Callable[[Path], Metadata]) -> Metadata:
        metadata_or_error: list[Any] = [None]
        if self._group is None or dist.get_rank(self._group) == 0:
            try:
                metadata_or_error = [read(self._checkpoint.fetch([(METADATA_FILE, 0, 0)]))]
            except BaseException as error:
                # The other ranks wait for this one.
                metadata_or_error = [error]
        if self._group is not None:
            dist.broadcast_object_list(metadata_or_error, src=0, group=self._group)
        (found,) = metadata_or_error
        if isinstance(found, BaseException):
            raise found
        metadata: Metadata = found
        return metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        return

    def read_metadata(self, *arguments: Any, **named: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *arguments: Any, **named: Any) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On one rank: choose who reads what several ranks need. The choice is in each plan's `storage_data`."""
        needed = Counter(item.storage_index for plan in plans for item in plan.items if self._is_small(item))
        common = {index for index, count in needed.items() if count > 1}
        first: dict[str, tuple[int, int]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                if item.storage_index not in common:
                    path, offset, _ = self._whole(item)
                    # Small items are at the beginning of a file.
                    first[path] = min(first.get(path, (offset, rank)), (offset, rank))
        to_read: dict[int, list[MetadataIndex]] = {}
        for index in common:
            path = self._stored(index).relative_path
            rank = first[path][1] if path in first else 0
            to_read.setdefault(rank, []).append(index)
        return [
            replace(plan, storage_data=_Common(all=common, readers=sorted(to_read), to_read=to_read.get(rank, [])))
            for rank, plan in enumerate(plans)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Raises RestoreError if the checkpoint is damaged; then DCP has every rank raise."""
        common: _Common = plan.storage_data
        own = [item for item in plan.items if item.storage_index not in common.all]
        read: dict[MetadataIndex, bytes] | BaseException
        try:
            self._read(own, common.to_read, planner)
            read = {index: self._bytes(index) for index in common.to_read}
        except BaseException as error:
            # The other ranks wait for this one.
            read = error
        stored = self._told_by_all(read, common)
        for item in plan.items:
            if item.storage_index in common.all:
                _take(item, stored[item.storage_index], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, items: Sequence[ReadItem], more: Sequence[MetadataIndex], planner: LoadPlanner) -> None:
        """Read `items` as they arrive, and have the items of `more` brought."""
        narrow = {item: rows for item in items if (rows := self._rows(item)) is not None}
        ends = [one for item, (_, slack) in narrow.items() for one in self._ends(item, slack)]
        ranges = {item: self._whole(item) for item in items}
        shared = [_range_of(self._stored(index)) for index in more]
        # The ends first: only then is it known what is needed of their tensors.
        self._checkpoint.ask(_merged(ends))
        self._checkpoint.ask(_merged([*shared, *(ranges[item] for item in items if item not in narrow)]))
        if ends:
            self._directory = self._checkpoint.fetch(_merged(ends))
            ranges.update({item: self._range(item, *rows) for item, rows in narrow.items() if self._is_in_order(item)})
            self._checkpoint.ask(_merged([ranges[item] for item in narrow]))
        for batch in _batches(sorted(items, key=ranges.__getitem__), ranges):
            self._directory = self._checkpoint.fetch(_merged([ranges[item] for item in batch]))
            reader = self._make(self._directory)
            reader.set_up_storage_reader(self._metadata, is_coordinator=False)
            reader.read_data(LoadPlan(batch), planner).wait()
        if shared:
            self._directory = self._checkpoint.fetch(_merged(shared))

    def _told_by_all(self, read: Any, common: "_Common") -> "dict[MetadataIndex, bytes]":
        """Exchange what ranks have read, or raise what one of them raised. One rank tells the others at a time."""
        own_rank = dist.get_rank(self._group) if common.readers else 0
        stored: dict[MetadataIndex, bytes] = {}
        failure: BaseException | None = read if isinstance(read, BaseException) else None
        for rank in common.readers:
            told = [read if rank == own_rank else None]
            dist.broadcast_object_list(told, src=rank, group=self._group)
            if isinstance(told[0], BaseException):
                failure = failure or told[0]
            else:
                stored.update(told[0] or {})
        if failure is not None:
            raise failure
        return stored

    def _bytes(self, index: MetadataIndex) -> bytes:
        path, offset, length = _range_of(self._stored(index))
        with Path(self._directory, path).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return FileSystemReader.validate_checkpoint_id(checkpoint_id)

    def _stored(self, index: MetadataIndex) -> Any:
        """Return the file, the offset and the length of a stored item."""
        return self._metadata.storage_data[index]

    def _is_small(self, item: ReadItem) -> bool:
        """Whether the item is small, and read as it was stored."""
        stored = self._stored(item.storage_index)
        if stored.length > _SMALL_BYTES or getattr(stored, "transform_descriptors", None):
            return False
        return item.type is LoadItemType.BYTE_IO or self._sizes(item) == item.lengths

    def _sizes(self, item: ReadItem) -> "torch.Size | None":
        """Return the size of the stored tensor that `item` is a part of."""
        described = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(described, TensorStorageMetadata):
            return None
        offset = item.storage_index.offset
        return next((chunk.sizes for chunk in described.chunks if chunk.offsets == offset), None)

    def _rows(self, item: ReadItem) -> "tuple[range, int] | None":
        """Return the needed bytes of a stored tensor, and how much later they may begin; None if it is read whole."""
        stored = self._stored(item.storage_index)
        if item.type is not LoadItemType.TENSOR or getattr(stored, "transform_descriptors", None):
            return None
        sizes = self._sizes(item)
        if not sizes:
            return None
        described: Any = self._metadata.state_dict_metadata[item.storage_index.fqn]
        element_bytes = described.properties.dtype.itemsize
        # What torch.save writes around the tensor's bytes, before and after them.
        slack = stored.length - math.prod(sizes) * element_bytes
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        first = sum(at * stride for at, stride in zip(item.storage_offsets, strides, strict=True))
        last = first + sum((length - 1) * stride for length, stride in zip(item.lengths, strides, strict=True))
        needed = range(first * element_bytes, (last + 1) * element_bytes)
        is_worth_it = stored.length - len(needed) >= _WORTH_BYTES
        return (needed, slack) if 0 <= slack < _WORTH_BYTES and is_worth_it else None

    def _is_in_order(self, item: ReadItem) -> bool:
        stored = self._stored(item.storage_index)
        with Path(self._directory, stored.relative_path).open("rb", buffering=0) as file:
            region: Any = _Region(file, stored.offset, stored.length)
            return bool(torch.load(region, map_location="cpu", weights_only=True).is_contiguous())

    def _whole(self, item: ReadItem) -> FileRange:
        return _range_of(self._stored(item.storage_index))

    def _range(self, item: ReadItem, needed: range, slack: int) -> FileRange:
        stored = self._stored(item.storage_index)
        return stored.relative_path, stored.offset + needed.start, len(needed) + slack

    def _ends(self, item: ReadItem, slack: int) -> Sequence[FileRange]:
        path, offset, length = self._whole(item)
        return ((path, offset, slack), (path, offset + length - slack, slack))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """Items that several ranks need, the ranks that read them for all, and those of them that this rank reads."""

    all: "set[MetadataIndex]"
    readers: "Sequence[int]"
    to_read: "Sequence[MetadataIndex]"


def _range_of(stored: Any) -> FileRange:
    return stored.relative_path, stored.offset, stored.length


def _batches(items: Sequence[ReadItem], ranges: Mapping[ReadItem, FileRange]) -> Iterator[list[ReadItem]]:
    """Divide items: what is read at a time, while more of them arrive."""
    batch: list[ReadItem] = []
    size_bytes = 0
    for item in items:
        batch.append(item)
        size_bytes += ranges[item][2]
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _take(item: ReadItem, content: bytes, planner: LoadPlanner) -> None:
    if item.type is LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(content))
        return
    target = planner.resolve_tensor(item).detach()
    target.copy_(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    planner.commit_tensor(item, target)


class _Region(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: io.FileIO, offset_bytes: int, size_bytes: int) -> None:
        self._file = file
        self._offset_bytes = offset_bytes
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset_bytes + self._position)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._size_bytes - self._position)])
        self._position += count
        return count


def _merged(ranges: Sequence[FileRange]) -> list[FileRange]:
    """Join ranges that touch, in the order of the files: there is one for each tensor."""
    merged: list[FileRange] = []
    for path, offset, length in sorted(ranges):
        if merged and merged[-1][0] == path and offset <= merged[-1][1] + merged[-1][2]:
            begin = merged[-1][1]
            merged[-1] = (path, begin, max(begin + merged[-1][2], offset + length) - begin)
        else:
            merged.append((path, offset, length))
    return merged
