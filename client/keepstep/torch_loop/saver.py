"""Saves a state while training continues: training waits for a copy of the state, and a thread writes the copy.

Owns that copy, the save that is being written, and the rule that no new copy is made before that save is done.

torch's DefaultStager, kept for the whole run, makes the copy, and `dcp.save` writes it over a process group of its own.
`dcp.async_save` does just these two things. They are separate here so that a rank whose copy fails still takes part,
and no other rank waits for it. The stager leaves this to its user:

- A new copy would overwrite what is still being written, and tear that checkpoint. So it waits for the last save.
- The first copy pays for the memory's pages, which costs several times what later copies cost, and it keeps every other
  thread out of Python meanwhile, even in the background. So `warm_up` makes that memory itself, in the background.
- Shared memory is for a writer in another process, and ours is a thread. In a pod /dev/shm has 64 MiB unless configured
  otherwise, and what does not fit ends the process by SIGBUS. So the memory is our own, pinned where there is a GPU.
- The stager can copy from a GPU while the next step computes. That would tear what a forward pass changes, such as the
  statistics of a batch norm. So training waits for the copy, and for nothing more.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from keepstep.checkpoint_writer import CheckpointWriter
from keepstep.errors import ErrorKind, KeepstepError, UsageError, VolumeError
from keepstep.private_members import require
from keepstep.torch_loop.storage import Storage

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError as error:
    raise UsageError(
        ErrorKind.UNSUPPORTED,
        f"torch {torch.__version__} is too old for keepstep.torch_loop",
        hint="install torch 2.9 or newer, or save with keepstep.Checkpointer",
    ) from error

_log: Final = logging.getLogger("keepstep")
_PATIENCE_SECONDS: Final = 3600.0
"""How long training waits for one save. No further save begins until that one is done."""
_NOTABLE_SECONDS: Final = 1.0


class Saver:
    """Saves a state in the background or at once. Every rank makes the same calls, from the main thread.

    A save that fails on any rank is given up on all of them.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        has_gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=has_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_gpu,
            )
        )
        self._busy: threading.Thread | None = None
        self.saved_step: int | None = None
        """Step of the newest complete checkpoint."""

    def warm_up(self, capture: Callable[[], dict[str, Any]]) -> None:
        """Make the memory of the copy before the first save needs it. Ignores errors: that save will report them."""
        state = _attempt(capture)
        if isinstance(state, Exception):
            return
        if torch.cuda.is_available():
            # Pinning memory in one thread breaks a CUDA graph that another one captures.
            _attempt(lambda: self._copy(state))
            return
        try:
            require("torch.distributed.checkpoint.staging.DefaultStager", self._stager)
        except AttributeError as error:
            _log.warning("training will wait longer for the first copy: error=%s", error)
        else:
            self._start(lambda: _attempt(lambda: self._make_memory(state)))

    def save(self, saving: CheckpointWriter, capture: Callable[[], dict[str, Any]]) -> None:
        """Copy what `capture` returns, and complete `saving` when the copy is written. Call `wait` first."""
        assert self._busy is None, "the copy is in use"
        # This makes the process group, which only the main thread may do.
        self._storage.options()
        state = _attempt(lambda: self._copy(capture()))
        saving.goes_on()
        self._start(lambda: self._write(saving, state))

    def save_now(self, saving: CheckpointWriter, capture: Callable[[], dict[str, Any]]) -> None:
        """Save without a copy, and return when `saving` is complete or given up. Call `wait` first."""
        assert self._busy is None, "the process group is in use"
        self._write(saving, _attempt(capture))

    def wait(self) -> None:
        """Wait until the last save is complete or abandoned. Raises VolumeError when it takes too long."""
        if self._busy is None:
            return
        began_at = time.monotonic()
        self._busy.join(_PATIENCE_SECONDS)
        if self._busy.is_alive():
            raise VolumeError(
                ErrorKind.VOLUME_UNUSABLE,
                f"the last checkpoint is still being written after {_PATIENCE_SECONDS:.0f} s",
                hint="check whether the volume answers",
            )
        self._busy = None
        waited_seconds = time.monotonic() - began_at
        if waited_seconds > _NOTABLE_SECONDS:
            _log.info("training waited for the last save: seconds=%.1f hint=save less often", waited_seconds)

    def close(self) -> None:
        """Wait, and free the copy."""
        self.wait()
        self._stager.close()

    def _make_memory(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put memory for each tensor where the stager looks for it; the stager makes its own if there is none."""
        memory: Any = self._stager._state_dict_stager._cached_storage_mapping
        for tensor in _tensors(state):
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage not in memory:
                pages = torch.UntypedStorage(storage.size())  # type: ignore[no-untyped-call]
                torch.empty(0, dtype=torch.uint8).set_(pages).zero_()
                memory[storage] = pages
        return state

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        copied: Any = self._stager.stage(state)
        return dict(copied)

    def _write(self, saving: CheckpointWriter, state: dict[str, Any] | Exception) -> None:
        try:
            if isinstance(state, Exception):
                self._storage.save({}, saving.directory, planner=_NothingToSave(state))
            else:
                self._storage.save(state, saving.directory)
        except KeepstepError as error:
            line = "checkpoint given up, training goes on: step=%d error=%s hint=%s"
            _log.warning(line, saving.step, error, error.hint)
            saving.abandon()
            return
        try:
            if saving.complete():
                self.saved_step = saving.step
        except Exception:
            # In a thread, nothing else would report it.
            _log.exception("checkpoint given up, training goes on: step=%d", saving.step)
            saving.abandon()

    def _start(self, work: Callable[[], object]) -> None:
        # Not a daemon: if the interpreter ends while a thread is inside torch's C++, the process aborts.
        self._busy = threading.Thread(target=work, name="keepstep-save")
        self._busy.start()


class _NothingToSave(DefaultSavePlanner):
    """Fails in place of this rank's plan, for which the other ranks would wait."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def create_local_plan(self) -> SavePlan:
        raise self._error


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, Mapping | list | tuple):
        for one in part.values() if isinstance(part, Mapping) else part:
            yield from _tensors(one)


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | Exception:
    try:
        return work()
    except Exception as error:
        return error
