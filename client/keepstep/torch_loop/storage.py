"""Saves a state dict into a directory and loads it again, with `torch.distributed.checkpoint` (DCP).

Owns the process group for DCP's collectives: a gloo group of our own, used by one thread at a time. In the program's
groups, a collective of ours from another thread, between two of the program's, would deadlock both. Without a process
group, one process saves and loads alone. Several processes can load what one saved, and the other way round.
"""

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader

from keepstep.agent_client.restores import TOTAL_SECONDS
from keepstep.errors import ErrorKind, KeepstepError, UsageError, VolumeError
from keepstep.resuming import PartialCheckpoint
from keepstep.torch_loop.partial_reader import PartialReader
from keepstep.torch_loop.plain_values import PlainPlanner, PlainReader

Source = Path | PartialCheckpoint
"""Where a state is loaded from: its directory, or what the agent brings of it."""


class Storage:
    """Saves and loads state dicts. All ranks make the same calls, in the thread that trains unless a method says more.

    `trust_pickle`: a checkpoint may run any code when it is loaded.
    """

    def __init__(self, *, trust_pickle: bool = False) -> None:
        self.trust_pickle = trust_pickle
        self._group: dist.ProcessGroup | None = None
        self._patient_group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank() if _is_distributed() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if _is_distributed() else 1

    def options(self) -> dict[str, Any]:
        """Return the arguments for DCP. The first call makes the group, and is collective."""
        if not _is_distributed():
            # DCP warns that one process saves alone, which is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            return {"no_dist": True}
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return {"process_group": self._group}

    def save(
        self, state: dict[str, Any], directory: Path, *, planner: SavePlanner | None = None, is_copy: bool = False
    ) -> None:
        """Write `state` into `directory`. Another thread may call it too, after `options`.

        `is_copy`: it lies in the memory of the host, and no GPU is asked for it.

        If one rank fails, all ranks raise: VolumeError if it cannot write, or the KeepstepError of its planner.
        """
        try:
            writer = dcp.FileSystemWriter(directory)
            if is_copy:
                writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
            dcp.save(state, storage_writer=writer, planner=planner, **self.options())
        except (Exception, CheckpointException) as error:
            _raise_ours(error)
            # On a full disk torch often raises something unrelated.
            hint = "if the error names no other cause, check whether the volume of that rank is full"
            raise VolumeError(ErrorKind.VOLUME_UNUSABLE, f"not written: {_reason(error)}", hint=hint) from error

    def open(self, source: Source) -> "StoredState":
        """Find out what there is to load. Collective.

        Raises UsageError; for a partial checkpoint also what rank 0 raises, on all ranks.
        """
        make: Callable[[Path], FileSystemReader] = dcp.FileSystemReader if self.trust_pickle else PlainReader

        def read(directory: Path) -> Metadata:
            try:
                return make(directory).read_metadata()
            except Exception as error:
                raise not_ours(source, repr(error)) from error

        reader: StorageReader
        if isinstance(source, PartialCheckpoint):
            options = self._patient_options()
            reader = PartialReader(source, make, read, options.get("process_group"))
            metadata = reader.read_metadata()
        else:
            options, reader, metadata = self.options(), make(source), read(source)
        planner = None if self.trust_pickle else PlainPlanner()
        return StoredState(source, reader, set(metadata.state_dict_metadata), planner, options)

    def _patient_options(self) -> dict[str, Any]:
        """As `options`, for ranks that wait for others behind a slow store."""
        if not _is_distributed():
            return self.options()
        if self._patient_group is None:
            self._patient_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TOTAL_SECONDS))
        return {"process_group": self._patient_group}


class StoredState:
    """A state dict as it was saved. `items` are the names of what it holds."""

    def __init__(
        self, source: Source, reader: StorageReader, items: set[str], planner: LoadPlanner | None, options: Any
    ) -> None:
        self.items = items
        self._source = source
        self._reader = reader
        self._planner = planner
        self._options = options

    def load(self, state: dict[str, Any]) -> None:
        """Load into the tensors of `state`, and replace its other values. Collective.

        Raises UsageError, or RestoreError if a part of the checkpoint cannot be had, on all ranks.
        """
        try:
            dcp.load(state, storage_reader=self._reader, planner=self._planner, **self._options)
        except CheckpointException as error:
            _raise_ours(error)
            raise not_ours(self._source, _reason(error)) from error


def _raise_ours(error: BaseException) -> None:
    """Raise the KeepstepError with which a rank failed, if DCP wraps one: it says more than DCP's own error.

    Or the SystemExit with which it leaves because its pod ends.
    """
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    ours = next((failure for failure, _ in failures if isinstance(failure, KeepstepError | SystemExit)), None)
    if ours is not None:
        raise ours from error


def _reason(error: BaseException) -> str:
    """Return the error in one line. The text of DCP's own, which is not an Exception, has each rank's traceback."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
    return repr(error)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def not_ours(source: Source, why: str) -> UsageError:
    """Return the error to raise for a checkpoint that this training did not write."""
    what = f"the checkpoint of step {source.step}" if isinstance(source, PartialCheckpoint) else source
    return UsageError(
        ErrorKind.BAD_ARGUMENT,
        f"{what} does not hold the state of this training: {why}",
        hint="resume with the model, optimizer and loader that it was saved with, or begin in an empty directory",
    )
