"""A run whose checkpoints a framework writes: when it must save and stop, and how its checkpoints reach the agent.

Owns the way from a framework's checkpoint directory (or file) to the agent, and the one run of this process. Must not
know any framework. Never writes into a checkpoint, because Hugging Face rotates by modification time. Once made, a run
raises only SystemExit, from `leave` and `newest`.
"""

import atexit
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from mooring.background_writes import BackgroundWrites
from mooring.checkpoints.durable import sync_tree
from mooring.checkpoints.records import Kind, Record, RecordedFile, is_whole, read_records, remove_record, write_record
from mooring.errors import MooringError
from mooring.gate import Action
from mooring.ranks.coordinator import WRITE_SECONDS
from mooring.ranks.rank_store import Ranks
from mooring.resuming import SomeFiles, choose, choose_files
from mooring.session import PendingSave, Session
from mooring.settings import read_settings

_log: Final = logging.getLogger("mooring")
_Result = TypeVar("_Result")


class FrameworkRun:
    """Every rank has one and calls the same methods in the same order. `current` returns the one of this process."""

    _current: "FrameworkRun | None" = None

    def __init__(self) -> None:
        """Raises UsageError or VolumeError."""
        self._session = Session(read_settings(os.environ))
        self._pending: PendingSave | None = None
        self._exit_asked = False
        self._given_up = False
        self._warned_of: set[Path] = set()
        self._writes = BackgroundWrites()

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
        pending = self._begin(path, step, kind)
        if pending is None:
            return False
        with self.claimed(path):
            return self._announce(path, pending)

    def announce_when(self, future: "Future[Any]", path: Path, step: int, kind: Kind | None = None) -> None:
        """Announce the checkpoint from another thread once `future` is done. If it fails, announce nothing."""
        pending = self._begin(path, step, kind)
        if pending is None:
            return

        claim = ExitStack()
        claim.enter_context(self.claimed(path))

        def announce(failure: BaseException | None) -> None:
            if failure is not None:
                _log.warning("checkpoint not announced, it could not be written: path=%s error=%s", path, failure)
            with claim:
                self._announce(path, pending, written=failure is None)

        # A thread inside the store's C++ when the interpreter ends would abort the process.
        atexit.register(self.close)
        self._writes.follow(future, announce)

    def save_aside(self, path: Path, step: int, write: Callable[[Path], object]) -> bool:
        """Have `write` save this rank's part of `path` elsewhere, and move it to `path` when all ranks have theirs.

        A process that is killed meanwhile leaves nothing that its framework or program would take for a checkpoint.
        What cannot be announced or has no place there is written to `path` at once. Returns whether it is in place, to
        be announced. Raises what `write` raises, and tells the other ranks.
        """
        pending = self._begin(path, step, None)
        if pending is None or not self._has_room_aside(pending, path):
            self._pending = pending
            try:
                write(path)
            except BaseException as error:
                self.announce_failed(error, path, step)
                raise
            return True
        context = self._session.context()
        agree, aside = context.coordinator.agree, context.aside
        try:
            write(aside.being_saved(path.name) / path.name)
        except BaseException:
            agree(pending.key("complete"), ok=False)
            self._session.abort(pending)
            raise
        in_place = agree(pending.key("complete"), seconds=WRITE_SECONDS) or False
        if in_place and context.leads_pod:
            in_place = aside.move_to(path)
        in_place = agree(pending.key("placed"), in_place) or False
        self._pending = pending
        if not in_place:
            self._abort_pending()
        return in_place

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
        """Return the step of a checkpoint that Mooring recorded or restored; None for any other."""
        records = read_records(self._session.records)
        return next((record.step for record in records if self._place(record).resolve() == path.resolve()), None)

    def newest(self) -> Path | None:
        """Return the checkpoint to resume from, the same on all ranks; None to start from step 0.

        Raises SystemExit when the pod is ending, and when the ranks cannot choose a checkpoint.
        """
        chosen = self._chosen(lambda: choose(self._session, self._whole))
        return None if chosen is None else self._place(chosen)

    def newest_files(self, needed: Callable[[Sequence[str], Sequence[int]], Sequence[str]]) -> SomeFiles | None:
        """As `newest`, for a framework whose ranks read files of their own.

        `needed` gets the paths of all files, and this pod's ranks; it returns those to bring, or none for all.
        """

        def choose_some() -> SomeFiles | Record | None:
            ranks = self._session.context().coordinator.ranks
            return choose_files(self._session, self._whole, lambda files: needed(files, ranks.pod or (ranks.rank,)))

        chosen = self._chosen(choose_some)
        if not isinstance(chosen, Record):
            return chosen
        place = self._place(chosen)
        return SomeFiles(place=place, directory=place, files=())

    def _chosen(self, ask_ranks: Callable[[], _Result]) -> _Result:
        try:
            if self._session.ends_untrained():
                self.leave()
            chosen = ask_ranks()
        except MooringError as error:
            # Training from step 0 over what was saved would be worse than stopping.
            raise SystemExit(f"mooring: {error}; {error.hint}") from error
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
        self._writes.wait()
        self._abort_pending()
        atexit.unregister(self.close)
        if FrameworkRun._current is self:
            FrameworkRun._current = None

    def _begin(self, path: Path, step: int, kind: Kind | None) -> PendingSave | None:
        """Return the save that a checkpoint belongs to; None when it cannot be announced."""
        is_protected = self.protects(path)
        if not is_protected or (self._pending is not None and self._pending.step != step):
            self._abort_pending()
        pending, self._pending = self._pending, None
        if is_protected and pending is None:
            pending = self._unless_given_up(lambda: self._session.begin(step, self._kind(kind)), otherwise=None)
        return replace(pending, kind=self._kind(kind)) if pending is not None and pending.together else None

    def _has_room_aside(self, pending: PendingSave, path: Path) -> bool:
        context = self._session.context()
        return bool(context.coordinator.agree(pending.key("aside"), context.aside.has_room(path.name)))

    def _abort_pending(self) -> None:
        if self._pending is not None:
            self._session.abort(self._pending)
            self._pending = None

    def _announce(self, path: Path, pending: PendingSave, *, written: bool = True) -> bool:
        context = self._session.context()
        if not context.coordinator.agree(pending.key("written"), written, seconds=WRITE_SECONDS):
            self._session.abort(pending)
            return False
        writers = self._writers(path, pending)
        if writers is None:
            self._session.abort(pending)
            return False
        ranks, brings = writers
        record = Record(
            name=path.name,
            step=pending.step,
            save=pending.save,
            kind=pending.kind,
            world_size=ranks.world_size,
            saved_at=time.time(),
            files=(),
            directory=self._directory(path),
            ranks=ranks.pod,
        )
        recorded: Record | None = record
        if context.leads_pod and brings:
            recorded = self._record(path, record)
        if (
            not context.coordinator.agree(pending.key("recorded"), recorded is not None, seconds=WRITE_SECONDS)
            or recorded is None
        ):
            self._session.abort(pending)
            return False
        if pending.kind is Kind.JUST_IN_TIME:
            self._session.stopping = True
        if not brings:
            self._session.abort(pending)
        told = not brings or self._session.announce(recorded, path)
        announced = context.coordinator.agree(pending.key("announced"), told) or False
        _log.info("saved: name=%s kind=%s save=%s announced=%s", path.name, pending.kind, pending.save, announced)
        return announced

    def _writers(self, path: Path, pending: PendingSave) -> tuple[Ranks, bool] | None:
        """Return this rank among those that write it, and whether its pod has a part; None when a part is missing.

        Either every pod has a part, or the checkpoint is one file of rank 0, as Lightning writes it. That file is whole
        in its pod, whatever an earlier restore left under its name in other pods.
        """
        coordinator = self._session.context().coordinator
        if self._session.holds_whole_job:
            return coordinator.ranks, True
        pod = coordinator.ranks.pod
        is_first = 0 in pod
        # Not by Path, which raises when the volume fails.
        alone = os.path.isfile(path) and pod == tuple(range(len(pod))) if is_first else not os.path.isdir(path)  # noqa: PTH112, PTH113
        if coordinator.agree(pending.key("alone"), alone):
            return replace(coordinator.ranks, world_size=len(pod)), is_first
        if coordinator.agree(pending.key("here"), os.path.exists(path)):  # noqa: PTH110
            return coordinator.ranks, True
        _log.warning("checkpoint not announced, it has no files in one of the pods: path=%s", path)
        return None

    def _record(self, path: Path, record: Record) -> Record | None:
        """Make the checkpoint durable and record it; remove the records of those that the framework has deleted."""
        try:
            files = tuple(RecordedFile(path=name, size_bytes=size_bytes) for name, size_bytes in sync_tree(path))
            record = replace(record, files=files)
            write_record(self._session.records, record)
            for older in read_records(self._session.records):
                if not self._place(older).exists():
                    remove_record(self._session.records, older.name)
        except OSError as error:
            _log.warning("checkpoint not recorded: path=%s error=%s", path, error)
            return None
        return record

    def _whole(self) -> list[Record]:
        there = ((record, self._place(record)) for record in read_records(self._session.records))
        return [record for record, place in there if place.exists() and is_whole(record, place)]

    def _place(self, record: Record) -> Path:
        if record.directory is None:
            return self.checkpoint_directory / record.name
        return self._session.settings.volume / record.directory / record.name

    def _directory(self, path: Path) -> str:
        return path.resolve().parent.relative_to(self._session.settings.volume.resolve()).as_posix()

    def _kind(self, kind: Kind | None) -> Kind:
        if self._exit_asked:
            return Kind.JUST_IN_TIME
        return kind or Kind.PERIODIC

    def _unless_given_up(self, work: Callable[[], _Result], *, otherwise: _Result) -> _Result:
        """Return what `work` returns. If it raises a MooringError, nothing is protected from then on: `otherwise`."""
        if self._given_up:
            return otherwise
        try:
            return work()
        except MooringError as error:
            self._given_up = True
            _log.warning("not protected: error=%s hint=%s", error, error.hint)
            self._session.close()
            return otherwise


def guarded_save(run: FrameworkRun, path: Path, step: int, write: Callable[[], _Result]) -> _Result:
    """Call `write`, which writes this rank's part of `path`, and announce the checkpoint. Returns what `write` returns.

    Raises what `write` raises, and tells the other ranks.
    """
    with run.claimed(path):
        try:
            result = write()
        except BaseException as error:
            run.announce_failed(error, path, step)
            raise
        run.announce(path, step)
        return result
