"""A run whose checkpoints a framework writes: when it must save and stop, and how its checkpoints reach the agent.

Owns when a framework's checkpoint is written, moved and announced, and the one run of this process. Must not know any
framework. Once made, a run raises only SystemExit, from `leave` and `newest`, and what the framework raises as it
writes.
"""

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, TypeVar

from keepstep.checkpoints.records import Kind, Record
from keepstep.errors import KeepstepError
from keepstep.framework_run.aside_saves import AsideSaves
from keepstep.framework_run.background_writes import BackgroundWrites
from keepstep.framework_run.checkpoints import FrameworkCheckpoints
from keepstep.gate import Action
from keepstep.resuming import SomeFiles, choose, choose_files
from keepstep.session import PendingSave, Session
from keepstep.settings import read_settings

_log: Final = logging.getLogger("keepstep")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unannounced:
    """A checkpoint that is saved. `behind`: its files are still being written."""

    path: Path
    step: int
    behind: bool
    claim: ExitStack


class FrameworkRun:
    """Every rank has one and calls the same methods in the same order. `current` returns the one of this process."""

    asynchronous_by_program: ClassVar[bool | None] = None
    """Whether the program asks for asynchronous saves; None if it leaves that to the environment."""
    _current: "FrameworkRun | None" = None

    def __init__(self) -> None:
        """Raises UsageError or VolumeError."""
        self._session = Session(read_settings(os.environ))
        self._checkpoints = FrameworkCheckpoints(self._session)
        self._pending: PendingSave | None = None
        self._exit_asked = False
        self._given_up = False
        self._warned_of: set[Path] = set()
        self._writes = BackgroundWrites()
        self._aside = AsideSaves(self._session, self._checkpoints)
        self._unannounced: _Unannounced | None = None

    @classmethod
    def current(cls) -> "FrameworkRun":
        """Return this process's run. The first call makes it, as does the first after `close` or `leave`.

        Raises UsageError or VolumeError when it makes one.
        """
        if cls._current is None:
            cls._current = cls()
        return cls._current

    @property
    def stopping(self) -> bool:
        """Whether the pod is ending and the just-in-time checkpoint is saved: leave then."""
        return self._session.stopping

    @property
    def asynchronous(self) -> bool:
        """Whether `save_in_background` returns before the files are written. The same on all ranks."""
        asked = FrameworkRun.asynchronous_by_program
        return self._session.settings.asynchronous if asked is None else asked

    @property
    def checkpoint_directory(self) -> Path:
        """Where to write a checkpoint if the program names no directory."""
        return self._session.settings.checkpoint_directory

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks share this volume. All ranks must ask, because the first question makes them meet."""
        ranks = self._session.context().coordinator.ranks
        return ranks.local_world_size == ranks.world_size

    def hold_sigterm(self) -> None:
        """Install the SIGTERM handler again after a framework has installed its own."""
        self._session.hold_sigterm()

    def action_at(self, step: int, tick: int = 0) -> Action:
        """Return what to do after `step` optimizer steps and `tick` batches of an evaluation: the same on all ranks.

        Positions must grow, and be the same on all ranks. After a termination notice the answer is SAVE_AND_EXIT until
        the just-in-time checkpoint is saved, and NOTHING from then on.
        """
        if self._session.stopping:
            return Action.NOTHING
        action = self._unless_given_up(lambda: self._session.action_at(step, tick), otherwise=Action.NOTHING)
        self._exit_asked |= action is Action.SAVE_AND_EXIT
        return action

    def admits(self, step: int) -> bool:
        """Return whether the agents have room for the periodic checkpoint that is due at `step`."""

        def admit() -> bool:
            self._abort_pending()
            self._pending = self._session.admit(step, self._kind(None))
            return self._pending is not None

        return self._unless_given_up(admit, otherwise=True)

    def protects(self, path: Path) -> bool:
        """Return whether `path` lies in the volume, where the agent can take it. Warns once per directory if not."""
        if self._given_up or self.holds(path):
            return not self._given_up
        volume = self._session.settings.volume
        place = path.parent
        if place not in self._warned_of:
            self._warned_of.add(place)
            _log.warning(
                "checkpoints outside the volume are not stored: path=%s volume=%s hint=write them to %s",
                path,
                volume,
                self.checkpoint_directory,
            )
        return False

    def holds(self, path: Path) -> bool:
        """Return whether `path` lies in the volume."""
        return path.resolve().is_relative_to(self._session.settings.volume.resolve())

    def claimed(self, path: Path) -> AbstractContextManager[None]:
        """Claim a checkpoint while it is written: the agent's directory watch might take it for complete too early."""
        return self._session.claimed(path)

    def announce(self, path: Path, step: int, kind: Kind | None = None) -> bool:
        """Announce the checkpoint `path`, of which this rank has written its part. Waits until all ranks have.

        `kind`: None for a periodic one. A save that a termination notice asked for is always just-in-time. Returns
        whether all ranks have announced it.
        """
        pending = self._begin(path, step, kind, waiting=False)
        if pending is None:
            return False
        with self.claimed(path):
            return self._checkpoints.announce(path, pending)

    def announce_when(self, future: "Future[Any]", path: Path, step: int, kind: Kind | None = None) -> None:
        """Announce the checkpoint from another thread once `future` is done. If it fails, announce nothing."""
        pending = self._begin(path, step, kind, waiting=False)
        if pending is None:
            return

        claim = ExitStack()
        claim.enter_context(self.claimed(path))

        def announce(failure: BaseException | None) -> None:
            if failure is not None:
                _log.warning("checkpoint not announced, it could not be written: path=%s error=%s", path, failure)
            with claim:
                self._checkpoints.announce(path, pending, written=failure is None)

        # A thread inside the store's C++ when the interpreter ends would abort the process.
        atexit.register(self.close)
        self._writes.follow(future, announce)

    def save_aside(self, path: Path, step: int, write: Callable[[Path], object], *, elsewhere: bool = True) -> bool:
        """Have `write` save this rank's part of `path` elsewhere, and move it to `path` when all ranks have theirs.

        A process that is killed meanwhile leaves nothing that its framework or program would take for a checkpoint.
        What cannot be announced or has no place there is written to `path` at once. Returns whether it is in place, to
        be announced. Raises what `write` raises, and tells the other ranks. `elsewhere`: whether `write` can save to
        another path.
        """
        if self._exit_asked and self.asynchronous:
            self._unless_given_up(self._aside.make_time, otherwise=None)
        self.wait()
        pending = self._begin(path, step, None)
        if pending is None or not elsewhere or not self._aside.has_room(path, pending):
            self._pending = pending
            self._write_in_place(path, step, write)
            return True
        in_place = self._aside.save(path, pending, write)
        self._pending = pending
        if not in_place:
            self._abort_pending()
        return in_place

    def save_in_background(
        self,
        path: Path,
        step: int,
        write: Callable[[Path], object],
        *,
        elsewhere: bool = True,
    ) -> None:
        """As `save_aside`, but copy what `write` saves, and write it and move it behind the training.

        Call `announce_in_background` next. Whoever in this process touches `path` waits until the checkpoint is there.
        """
        claim = ExitStack()
        with claim:
            claim.enter_context(self.claimed(path))
            if self._exit_asked and self.asynchronous:
                # Nothing goes on that could change what is saved.
                if self.save_aside(path, step, write, elsewhere=elsewhere):
                    self._unannounced = _Unannounced(path=path, step=step, behind=False, claim=claim.pop_all())
                return
            if not self._aside.has_state(path, step):
                self.wait()
            pending = self._begin(path, step, None)
            behind = pending is not None and elsewhere and self.asynchronous and self._aside.has_room(path, pending)
            if pending is not None and behind:
                self._aside.save_in_background(path, pending, write)
            else:
                self.wait()
                self._pending = pending
                self._write_in_place(path, step, write)
            self._unannounced = _Unannounced(path=path, step=step, behind=behind, claim=claim.pop_all())

    def expect_saves(self, model: Any = None) -> None:
        """Prepare for `save_in_background`, before training, in a rank that will have the training's state to write.

        `model`: a torch module that is saved beside what the optimizers train, where they train copies of it.
        """
        if self.asynchronous:
            self._aside.expect(model)

    def announce_in_background(
        self, kind: Kind | None = None, *, then: Callable[[bool], object] = lambda _: None
    ) -> None:
        """Announce what `save_in_background` saved, once it is in place, without waiting. `kind` as for `announce`.

        `then`: called after that, perhaps in another thread, with whether it was announced; not if it is lost.
        """
        saved, self._unannounced = self._unannounced, None
        if saved is not None and saved.behind:
            self._aside.announce(self._kind(kind), then, saved.claim.close)
        elif saved is not None:
            with saved.claim:
                then(self.announce(saved.path, saved.step, kind))

    def leave_unannounced(self) -> None:
        """Do not announce what `save_in_background` saved. It gets its name all the same."""
        saved, self._unannounced = self._unannounced, None
        if saved is not None and saved.behind:
            self._aside.announce(None, lambda _: None, saved.claim.close)
        elif saved is not None:
            saved.claim.close()
            self._abort_pending()

    def when_saved(self, work: Callable[[], object]) -> None:
        """Call `work` when what was saved last is announced, perhaps in another thread; not if it is lost."""
        self._aside.when_saved(work)

    def wait(self) -> None:
        """Wait until what was saved last is in place, and announced as far as it is to be."""
        self._aside.wait()

    def _write_in_place(self, path: Path, step: int, write: Callable[[Path], object]) -> None:
        try:
            write(path)
        except BaseException as error:
            self.announce_failed(error, path, step)
            raise

    def announce_failed(self, error: BaseException, path: Path, step: int) -> None:
        """Tell the other ranks that this one could not write its part: they would wait for it."""
        failed: Future[Any] = Future()
        failed.set_exception(error)
        self.announce_when(failed, path, step)

    def same(self, step: int, value: object) -> bool:
        """Return whether `value` is the same on all ranks, such as how many batches an evaluation after `step` has."""
        key = f"same/{step}/{self._session.next_number()}"
        return self._unless_given_up(lambda: self._session.context().coordinator.same(key, str(value)), otherwise=False)

    def gather(self, step: int, value: str) -> Sequence[str] | None:
        """Return the values of all ranks, by rank, on rank 0; None on other ranks, and when some do not come.

        Not a collective, because a rank whose volume failed is not protected and would take no part in it.
        """
        key = f"gather/{step}/{self._session.next_number()}"
        return self._unless_given_up(lambda: self._session.context().coordinator.gather(key, value), otherwise=None)

    def recorded_step(self, path: Path) -> int | None:
        """Return the step of a checkpoint that Keepstep recorded or restored; None for any other."""
        return self._checkpoints.recorded_step(path)

    def newest(self) -> Path | None:
        """Return the checkpoint to resume from, the same on all ranks; None to start from step 0.

        Raises SystemExit when the pod is ending, and when the ranks cannot choose a checkpoint.
        """
        chosen = self._chosen(lambda: choose(self._session, self._checkpoints.whole))
        return None if chosen is None else self._checkpoints.place(chosen)

    def newest_files(self, needed: Callable[[Sequence[str], Sequence[int]], Sequence[str]]) -> SomeFiles | None:
        """As `newest`, for a framework whose ranks read files of their own.

        `needed` gets the paths of all files, and this pod's ranks; it returns those to bring, or none for all.
        """

        def choose_some() -> SomeFiles | Record | None:
            ranks = self._session.context().coordinator.ranks
            return choose_files(
                self._session, self._checkpoints.whole, lambda files: needed(files, ranks.pod or (ranks.rank,))
            )

        chosen = self._chosen(choose_some)
        if not isinstance(chosen, Record):
            return chosen
        place = self._checkpoints.place(chosen)
        return SomeFiles(place=place, directory=place, files=())

    def _chosen(self, ask_ranks: Callable[[], _Result]) -> _Result:
        try:
            if self._session.ends_untrained():
                self.leave()
            chosen = ask_ranks()
        except KeepstepError as error:
            # Training from step 0 over what was saved would be worse than stopping.
            raise SystemExit(f"keepstep: {error}; {error.hint}") from error
        if isinstance(chosen, Record):
            _log.info("resuming: name=%s step=%d", chosen.name, chosen.step)
        return chosen

    def leave(self) -> NoReturn:
        """Leave after a just-in-time save: wait for running writes and for the other ranks, then exit with 143."""
        self._shut()
        self._session.leave()

    def close(self) -> None:
        """End a run whose training ended by itself: wait for running writes, stop handling SIGTERM. Idempotent."""
        self._shut()
        self._session.close()

    def _shut(self) -> None:
        self.leave_unannounced()
        self.wait()
        self._writes.wait()
        self._abort_pending()
        atexit.unregister(self.close)
        if FrameworkRun._current is self:
            FrameworkRun._current = None

    def _begin(self, path: Path, step: int, kind: Kind | None, *, waiting: bool = True) -> PendingSave | None:
        """Return the save that a checkpoint belongs to; None when it cannot be announced.

        `waiting`: it begins now. If not, nothing told of its beginning, and nobody knows how long training waited.
        """
        is_protected = self.protects(path)
        if not is_protected or (self._pending is not None and self._pending.step != step):
            self._abort_pending()
        pending, self._pending = self._pending, None
        if is_protected and pending is None:
            pending = self._unless_given_up(
                lambda: self._session.begin(step, self._kind(kind), waiting=waiting), otherwise=None
            )
        return replace(pending, kind=self._kind(kind)) if pending is not None and pending.together else None

    def _abort_pending(self) -> None:
        if self._pending is not None:
            self._session.abort(self._pending)
            self._pending = None

    def _kind(self, kind: Kind | None) -> Kind:
        if self._exit_asked:
            return Kind.JUST_IN_TIME
        return kind or Kind.PERIODIC

    def _unless_given_up(self, work: Callable[[], _Result], *, otherwise: _Result) -> _Result:
        """Return what `work` returns. If it raises a KeepstepError, nothing is protected from then on: `otherwise`."""
        if self._given_up:
            return otherwise
        try:
            return work()
        except KeepstepError as error:
            self._given_up = True
            _log.warning("not protected: error=%s hint=%s", error, error.hint)
            self._session.close()
            return otherwise
