"""CheckpointWriter while training goes on: training waits for a copy of the state, and a thread writes the copy.

Owns that copy, the save that is being written, and the rule that the copy is not made anew before that save is done.

The copy is made by torch's DefaultStager, kept for the whole run, and `dcp.save` writes it over a process group of its
own. `dcp.async_save` is those two and no more; they are apart here so that a rank whose copy fails still takes part,
and no other rank waits for it. What the stager leaves to its user:

- It copies over what is still being written, and tears that checkpoint. So the next copy waits for the last save.
- Its first copy pays for the memory's pages, several times what the others cost, and it keeps every other thread out of
  Python meanwhile, in the background too. So `warm_up` makes that memory itself, in the background.
- Shared memory is for a writer in another process. Ours is a thread, and in a pod /dev/shm has 64 MiB unless told
  otherwise: what does not fit there ends the process by SIGBUS. So the memory is our own, pinned where there is a GPU.
- It can copy from a GPU while the next step computes. What a forward pass changes, such as the statistics of a batch
  norm, would be torn. So training waits for the copy, and not for more.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mooring.checkpoint_writer import CheckpointWriter
from mooring.errors import ErrorKind, MooringError, UsageError, VolumeError
from mooring.torch_loop.storage import Storage

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError as error:
    raise UsageError(
        ErrorKind.UNSUPPORTED,
        f"torch {torch.__version__} is too old for mooring.torch_loop",
        hint="install torch 2.9 or newer, or save with mooring.Checkpointer",
    ) from error

_log: Final = logging.getLogger("mooring")
_PATIENCE_SECONDS: Final = 3600.0
"""A volume that takes longer for one save takes no more."""
_NOTABLE_SECONDS: Final = 1.0


class Saver:
    """Every rank calls the same, from the main thread. A save that fails, on any rank, is given up on all of them."""

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
        """Of the newest checkpoint that is complete."""

    def warm_up(self, capture: Callable[[], dict[str, Any]]) -> None:
        """Make the memory of the copy, before the first save needs it. What fails here, that save will say."""
        state = _attempt(capture)
        if isinstance(state, Exception):
            return
        if torch.cuda.is_available():
            # Pinning memory in one thread breaks a CUDA graph that another one captures.
            _attempt(lambda: self._copy(state))
        else:
            self._start(lambda: _attempt(lambda: self._make_memory(state)))

    def save(self, saving: CheckpointWriter, capture: Callable[[], dict[str, Any]]) -> None:
        """Copy what `capture` gives, and complete `saving` when the copy is written. Not before `wait`."""
        assert self._busy is None, "the copy is in use"
        # Makes the process group, which is for the main thread to do.
        self._storage.options()
        state = _attempt(lambda: self._copy(capture()))
        self._start(lambda: self._write(saving, state))

    def save_now(self, saving: CheckpointWriter, capture: Callable[[], dict[str, Any]]) -> None:
        """Return when it is complete, or given up. Takes no memory for a copy. Not before `wait`."""
        assert self._busy is None, "the process group is in use"
        self._write(saving, _attempt(capture))

    def wait(self) -> None:
        """Until the last save is complete or abandoned. Raises VolumeError when it takes too long."""
        if self._busy is None:
            return
        began_at = time.monotonic()
        self._busy.join(_PATIENCE_SECONDS)
        if self._busy.is_alive():
            raise VolumeError(
                ErrorKind.VOLUME_UNUSABLE,
                f"the last checkpoint is still being written after {_PATIENCE_SECONDS:.0f} s",
                hint="see whether the volume answers",
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
        """Where the stager looks for the memory of a tensor, which it makes itself if there is none."""
        memory: Any = self._stager._state_dict_stager._cached_storage_mapping
        for leaf in tree_leaves(state):
            if isinstance(leaf, torch.Tensor):
                storage = (leaf.to_local() if isinstance(leaf, DTensor) else leaf).untyped_storage()
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
        except MooringError as error:
            line = "checkpoint given up, training goes on: step=%d error=%s hint=%s"
            _log.warning(line, saving.step, error, error.hint)
            saving.abandon()
            return
        try:
            if saving.complete():
                self.saved_step = saving.step
        except Exception:
            # In a thread nobody else would hear of it.
            _log.exception("checkpoint given up, training goes on: step=%d", saving.step)
            saving.abandon()

    def _start(self, work: Callable[[], object]) -> None:
        # Not a daemon: torch's C++ in a thread that the interpreter's end cuts off would abort the process.
        self._busy = threading.Thread(target=work, name="mooring-save")
        self._busy.start()


class _NothingToSave(DefaultSavePlanner):
    """Tells the other ranks, where they would wait for this rank's plan, that there is none."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def create_local_plan(self) -> SavePlan:
        raise self._error


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | Exception:
    try:
        return work()
    except Exception as error:
        return error
