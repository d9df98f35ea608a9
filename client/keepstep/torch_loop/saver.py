"""Saves a state of all ranks by `torch.distributed.checkpoint` (DCP), at once or behind the training.

`dcp.async_save` does the same two things: it copies the state, and writes it in a thread over a process group of its
own. Here they are separate, so that a rank whose copy fails still takes part and no other rank waits for it. The copy,
its memory and the thread are those of every asynchronous save, in `asynchronous_saves`.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from keepstep.asynchronous_saves.background_writer import BackgroundSave
from keepstep.asynchronous_saves.host_copy import copy_to_host
from keepstep.checkpoint_writer import CheckpointWriter
from keepstep.errors import KeepstepError
from keepstep.torch_loop.storage import Storage

_log: Final = logging.getLogger("keepstep")


class Saver:
    """Saves states. Every rank makes the same calls, from the thread that trains.

    A save that fails on any rank is given up on all of them.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.saved_step: int | None = None
        """Step of the newest complete checkpoint."""

    def save(self, saving: CheckpointWriter, capture: Callable[[], dict[str, Any]]) -> None:
        """Save what `capture` returns, and complete `saving` or give it up.

        Training continues while a copy is written, if `saving` has a `background` and the memory suffices.
        """
        # This makes the process group, which only this thread may do.
        self._storage.options()
        behind = saving.background
        try:
            state = capture()
            copied = None if behind is None else behind.copy(lambda memory: copy_to_host(state, memory))
        except Exception as error:
            self._write(saving, {}, _Planner(failure=error))
            return
        if behind is None or copied is None:
            self._write(saving, state, DefaultSavePlanner())
            return
        behind.write_later(
            copied.size_bytes,
            lambda: self._write(saving, copied.value, _Planner(behind, failure=behind.failure), is_copy=True),
        )
        behind.begin_writing()
        saving.goes_on()

    def _write(
        self, saving: CheckpointWriter, state: dict[str, Any], planner: DefaultSavePlanner, *, is_copy: bool = False
    ) -> None:
        try:
            self._storage.save(state, saving.directory, planner=planner, is_copy=is_copy)
        except KeepstepError as error:
            given_up = None if saving.background is None else saving.background.failure
            saving.warn_given_up(given_up or error)
            saving.abandon()
            return
        try:
            if saving.complete():
                self.saved_step = saving.step
        except Exception:
            # In a thread, nothing else would report it.
            _log.exception("checkpoint given up, training goes on: step=%d", saving.step)
            saving.abandon()


class _Planner(DefaultSavePlanner):
    """Tells how much is written; fails in place of this rank's plan, for which the other ranks would wait."""

    def __init__(self, behind: BackgroundSave | None = None, *, failure: BaseException | None) -> None:
        super().__init__()
        self._behind = behind
        self._failure = failure
        self._resolved_bytes = 0

    def create_local_plan(self) -> SavePlan:
        if self._failure is not None:
            raise self._failure
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self._behind is not None:
            # What was asked for before is written by now.
            self._behind.wrote(self._resolved_bytes)
        data = super().resolve_data(write_item)
        self._resolved_bytes = getattr(data, "nbytes", 0)
        return data
