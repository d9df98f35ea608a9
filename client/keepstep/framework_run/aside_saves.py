"""Checkpoints of a framework that are written aside, and get their names when all ranks have written all of them.

Owns the steps from the first file to the name, on all ranks, and the one checkpoint that is written behind the
training. A process that is killed meanwhile leaves nothing that its framework would take for a checkpoint.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from keepstep.asynchronous_saves import path_guard
from keepstep.asynchronous_saves.background_writer import BackgroundSave, BackgroundWriter
from keepstep.asynchronous_saves.save_functions import handing_in
from keepstep.checkpoints.records import Kind
from keepstep.framework_run.checkpoints import FrameworkCheckpoints
from keepstep.ranks.coordinator import WRITE_SECONDS
from keepstep.session import PendingSave, Session

_log: Final = logging.getLogger("keepstep")
_MOST_NAMES: Final = 4
"""How many checkpoints may be written from one copy: a step that stands still would have its memory grow."""
_Write = Callable[[Path], object]


@dataclass(slots=True, kw_only=True)
class _BackgroundCheckpoint:
    path: Path
    pending: PendingSave
    save: BackgroundSave
    in_place: bool = False


class AsideSaves:
    """The checkpoints of one run, one after the other. All ranks make the same calls."""

    def __init__(self, session: Session, checkpoints: FrameworkCheckpoints) -> None:
        self._session = session
        self._checkpoints = checkpoints
        self._writer = BackgroundWriter()
        self._behind: _BackgroundCheckpoint | None = None
        """Saved, and not to be announced yet."""
        self._last: _BackgroundCheckpoint | None = None
        self._copied_step = -1
        self._names: set[str] = set()
        """Of the checkpoints that are written from this copy: they lie side by side until they are in place."""

    def has_room(self, path: Path, pending: PendingSave) -> bool:
        """Make the directory in which `path` is written; return whether all ranks have it."""
        context = self._session.context()
        return bool(context.coordinator.agree(pending.key("aside"), context.aside.has_room(path.name)))

    def expect(self, model: Any = None) -> None:
        """Prepare for `save_in_background`, in a rank that will have the training's state to write.

        `model` as for `state_size.when_known`.
        """
        self._writer.expect(model)

    def save(self, path: Path, pending: PendingSave, write: _Write) -> bool:
        """Write this rank's part, and return whether the checkpoint is at `path` now, with the parts of all ranks.

        Raises what `write` raises, and tells the other ranks.
        """
        self._write(path, pending, write)
        return self._put_in_place(path, pending)

    def save_in_background(self, path: Path, pending: PendingSave, write: _Write) -> None:
        """Copy this rank's part; write it and put the checkpoint in place behind the training. Call `announce` next.

        A second checkpoint of one step shares the copy of the first, as far as that is still the same. Raises what
        `write` raises, and tells the other ranks.
        """
        place = self._session.context().aside.being_saved(path.name)
        same_state = self.has_state(path, pending.step)
        save = self._writer.begin(place, same_state=same_state)
        self._copied_step = pending.step
        self._names = {*self._names, path.name} if same_state else {path.name}
        with handing_in(save):
            self._write(path, pending, write)
        behind = self._behind = _BackgroundCheckpoint(path=path, pending=pending, save=save)
        path_guard.hold(str(path), self._writer.wait)

        def finish(failure: BaseException | None) -> None:
            if failure is not None:
                _log.warning("checkpoint lost, training goes on: path=%s error=%r", path, failure)
            try:
                behind.in_place = self._put_in_place(path, pending, written=failure is None)
            finally:
                path_guard.release(str(path))

        save.then(finish)
        self._session.goes_on(pending)

    def announce(self, kind: Kind | None, then: Callable[[bool], object], ended: Callable[[], object]) -> None:
        """Announce the checkpoint that `save_in_background` saved when it is in place. Waits for nothing.

        `kind` None: tell the other ranks that this one does not announce it. `then`: called with whether it was
        announced, if it is in place. `ended`: called in any case.
        """
        behind, self._behind = self._behind, None
        assert behind is not None
        pending = behind.pending if kind is None else replace(behind.pending, kind=kind)

        def announce(_: BaseException | None) -> None:
            try:
                if behind.in_place:
                    announced = self._checkpoints.announce(behind.path, pending, written=kind is not None)
                    then(announced)
                    self._checkpoints.forget_deleted()
                else:
                    self._session.abort(pending)
            finally:
                ended()

        self._last = behind
        behind.save.then(announce)

    def when_saved(self, work: Callable[[], object]) -> None:
        """Call `work` after all that was saved, in the thread or at once; not if the last checkpoint is lost."""
        last = self._last
        if last is None:
            work()
        else:
            last.save.then(lambda _: work() if last.in_place else None)

    def has_state(self, path: Path, step: int) -> bool:
        """Whether a checkpoint of this step is still copied, and `path` can be written from the same copy behind it."""
        return step == self._copied_step and path.name not in self._names and len(self._names) < _MOST_NAMES

    def make_time(self) -> None:
        """Before a just-in-time save: give up the checkpoint in flight if both do not fit into the grace period."""
        self._session.make_time(self._writer)

    def wait(self) -> None:
        """Wait until all that was saved is in place, and announced as far as it is to be."""
        self._writer.wait()

    def _write(self, path: Path, pending: PendingSave, write: _Write) -> None:
        context = self._session.context()
        try:
            write(context.aside.being_saved(path.name) / path.name)
        except BaseException:
            context.coordinator.agree(pending.key("complete"), ok=False)
            if context.leads_pod:
                context.aside.abandon(path.name)
            self._session.abort(pending)
            raise

    def _put_in_place(self, path: Path, pending: PendingSave, *, written: bool = True) -> bool:
        """Give the checkpoint its name when all ranks have written it; return whether it has it on all of them."""
        context = self._session.context()
        in_place = context.coordinator.agree(pending.key("complete"), written, seconds=WRITE_SECONDS) or False
        if context.leads_pod:
            if in_place:
                in_place = context.aside.move_to(path)
            else:
                context.aside.abandon(path.name)
        return context.coordinator.agree(pending.key("placed"), in_place) or False
