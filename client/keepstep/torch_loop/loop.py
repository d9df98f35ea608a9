"""A training loop that resumes, saves when it is due, and leaves when the pod ends.

Owns when a save is made. One that fails costs a warning, except the last of all. Every rank calls the same at the same
steps.
"""

import contextlib
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch

from keepstep.asynchronous_saves.host_copy import copied_bytes
from keepstep.checkpointer import Checkpointer
from keepstep.checkpoints.records import Kind
from keepstep.errors import ErrorKind, RestoreError, VolumeError, final_checkpoint_lost
from keepstep.save_schedule import Interval
from keepstep.torch_loop.partial_reader import METADATA_FILE
from keepstep.torch_loop.saver import Saver
from keepstep.torch_loop.state import TrainingState
from keepstep.workers import worker_processes

_log: Final = logging.getLogger("keepstep")


class TorchLoop:
    """A training loop whose whole state is saved and resumed: model, optimizer, random generators, place in the data.

    Making one resumes from the newest checkpoint. With torch.distributed, make it after the process group and the
    wrapped model.

    Args:
        model: As it is trained: plain, in DDP, or sharded by `fully_shard`.
        optimizer: Of this model.
        scheduler: Anything with `state_dict` and `load_state_dict`.
        scaler: The same, for mixed precision.
        loader: Any DataLoader. See `TrainingState`.
        checkpointer: Made with default arguments if you give none.
        trust_pickle: Save and load any object. Whoever can write to the destination can then run code here.

    Raises:
        UsageError: There is a checkpoint that is not of this training.
        VolumeError: There is nowhere to save to.
        RestoreError: There may be a checkpoint at the destination, and it cannot be had.

    Example:
        ```python
        loop = TorchLoop(model, optimizer, loader=loader)
        for inputs, targets in loop.batches(epochs=3):
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            loop.step(every=500)
        loop.finish()
        ```
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        checkpointer: Checkpointer | None = None,
        trust_pickle: bool = False,
    ) -> None:
        # The batch that is being made at a SIGTERM is needed for the step that is saved then.
        worker_processes.install()
        self._state = TrainingState(
            model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader, trust_pickle=trust_pickle
        )
        self._checkpointer = Checkpointer() if checkpointer is None else checkpointer
        self._saver = Saver(self._state.storage)
        self._has_stepped = False
        self._resume()

    @property
    def steps_done(self) -> int:
        """Optimizer steps that are done, those before a resume included."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Counted from 0."""
        return self._state.epoch

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Any]:
        """Iterate over the loader's batches, from where the run is.

        Args:
            epochs: Stop when so many epochs are done, those before a resume included.
            steps: Stop when so many optimizer steps are done, those before a resume included.
        """
        if steps is not None and self.steps_done >= steps:
            return
        for batch in self._state.batches(epochs):
            yield batch
            if steps is not None and self.steps_done >= steps:
                return

    def step(
        self,
        every: Interval | None = None,
        *,
        recovery_point: str | timedelta | None = None,
        max_overhead: float = 0.0,
    ) -> None:
        """Count an optimizer step, and save when a save is due, when the pod is ending, or when somebody asked.

        Call it after each optimizer step: once for several batches that accumulate gradients.

        Args:
            every: Steps between periodic saves, or a duration, as for `Checkpointer.should_save`. 0 for no periodic
                saves. By default 100 steps, or none with a `recovery_point`.
            recovery_point: The oldest that the newest committed checkpoint may get, as for `Checkpointer.should_save`.
            max_overhead: The largest share of the training's time that those saves may take, such as 0.01.

        Raises:
            UsageError: In the first call, when a part of the state could not be loaded again.
            SystemExit: With code 143 after a just-in-time save; with 75 if it was lost twice.
        """
        self._state.step += 1
        if not self._has_stepped:
            self._has_stepped = True
            state = self._state.capture()
            # What cannot be copied cannot be saved either, and the save says so.
            with contextlib.suppress(Exception):
                self._checkpointer.reserve(copied_bytes(state), on_all_ranks=True)
        if self._checkpointer.kind_due(
            self._state.step, every, recovery_point=recovery_point, max_overhead=max_overhead
        ):
            self._save()
        if self._checkpointer.stopping:
            self._checkpointer.finish()

    def finish(self) -> None:
        """End the training: save the last step if it is not saved yet, and stop handling SIGTERM.

        Raises:
            VolumeError: The last step could not be saved.
            SystemExit: With code 143 after a just-in-time save; with 75 if it was lost twice.
        """
        if self._checkpointer.wait() and self.steps_done != self._saver.saved_step:
            self._save(Kind.FINAL)
        self._checkpointer.finish()
        if self.steps_done != self._saver.saved_step:
            raise final_checkpoint_lost(self.steps_done)

    def _resume(self) -> None:
        while (found := self._checkpointer.resume_partially(METADATA_FILE)) is not None:
            try:
                self._state.restore(found)
            except RestoreError as error:
                if error.kind is not ErrorKind.CHECKPOINT_DAMAGED:
                    raise
                # On all ranks. Its agent does not offer that checkpoint again.
                _log.warning("resuming from another checkpoint: error=%s", error)
                continue
            self._saver.saved_step = self._state.step
            return

    def _save(self, kind: Kind | None = None) -> None:
        try:
            saving = self._checkpointer.begin(self.steps_done, kind)
        except VolumeError as error:
            _log.warning("not saved, training goes on: error=%s hint=%s", error, error.hint)
            return
        self._saver.save(saving, self._state.capture)
