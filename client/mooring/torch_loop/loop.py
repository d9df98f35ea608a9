"""A training loop that resumes, saves when it is due, and leaves when the pod ends.

Owns when which kind of save is made: periodic ones while training goes on, those that someone asked for at once. Never
hurts training: a save that fails costs a warning, but for the last of all. Every rank calls the same at the same steps.
"""

import logging
from collections.abc import Iterator
from typing import Any, Final

import torch

from mooring.checkpointer import Checkpointer
from mooring.checkpoints.records import Kind
from mooring.errors import ErrorKind, VolumeError
from mooring.torch_loop.saver import Saver
from mooring.torch_loop.state import TrainingState
from mooring.workers import worker_processes

_log: Final = logging.getLogger("mooring")


class TorchLoop:
    """Makes a Checkpointer and resumes. What it takes is described at TrainingState.

    With torch.distributed, make it after the process group and the wrapped model. Raises UsageError when there is a
    checkpoint that is not of this training, VolumeError when there is nowhere to save to.
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
        self._warm = False
        path = self._checkpointer.resume()
        if path is not None:
            self._state.restore(path)
            self._saver.saved_step = self._state.step

    @property
    def steps_done(self) -> int:
        """Optimizer steps that are done, in this run and those it resumed from."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Counted from 0."""
        return self._state.epoch

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Any]:
        """The loader's batches, from where the run is, until `epochs` or `steps` are done in all."""
        if steps is not None and self.steps_done >= steps:
            return
        for batch in self._state.batches(epochs):
            yield batch
            if steps is not None and self.steps_done >= steps:
                return

    def step(self, every: int = 100, *, asynchronous: bool = True) -> None:
        """An optimizer step is done: call it after each, and once for several batches that accumulate gradients.

        Saves every `every` steps (0: never by itself), when the pod is ending and when someone asked. `asynchronous`:
        training goes on while a periodic save is written, which takes memory for one more copy of this rank's state.
        When the pod is ending it saves and leaves, with SystemExit(143). The first call raises UsageError when the
        state has a part that could not be loaded again: a run is to hear of that before it depends on it.
        """
        self._state.step += 1
        if not self._warm:
            self._state.capture()
        step = self._state.step
        asked = self._checkpointer.should_save(step, every=0)
        due = not asked and every > 0 and step % every == 0 and self._checkpointer.should_save(step, every)
        if asked or due:
            self._save(background=due and asynchronous)
        elif asynchronous and not self._warm:
            self._saver.warm_up(self._state.capture)
        self._warm = True
        if self._checkpointer.stopping:
            self._leave()

    def finish(self) -> None:
        """The end of training: saves the last step, unless that is saved, and gives SIGTERM back.

        Raises VolumeError when the last step could not be saved: there is no other save that would make up for it.
        """
        self._wait()
        if self.steps_done != self._saver.saved_step:
            self._save(background=False, kind=Kind.FINAL)
        self._leave()
        if self.steps_done != self._saver.saved_step:
            raise VolumeError(
                ErrorKind.VOLUME_UNUSABLE,
                f"the final checkpoint of step {self.steps_done} was lost",
                hint="a warning above says why",
            )

    def _save(self, *, background: bool, kind: Kind | None = None) -> None:
        if not self._wait():
            return
        try:
            saving = self._checkpointer.begin(self.steps_done, kind)
        except VolumeError as error:
            _warn(error)
            return
        save = self._saver.save if background else self._saver.save_now
        save(saving, self._state.capture)

    def _leave(self) -> None:
        if self._wait():
            self._saver.close()
        self._checkpointer.finish()

    def _wait(self) -> bool:
        try:
            self._saver.wait()
        except VolumeError as error:
            _warn(error)
            return False
        return True


def _warn(error: VolumeError) -> None:
    _log.warning("not saved, training goes on: error=%s hint=%s", error, error.hint)
