"""A run whose checkpoints a framework writes: when it should save and stop, and what becomes of what it wrote.

Owns the way from a framework's checkpoint directory (or file) to the agent, and the one run of this process. Must not
know any framework, and never writes into a checkpoint: Hugging Face rotates by modification time. Raises SystemExit by
`leave` and `newest`, and else nothing.
"""

import atexit
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from mooring.checkpoints.durable import sync_tree
from mooring.checkpoints.records import Kind, Record, RecordedFile, damage, read_records, remove_record, write_record
from mooring.errors import MooringError
from mooring.gate import Action
from mooring.ranks.coordinator import PATIENCE_SECONDS, WRITE_SECONDS
from mooring.ranks.rank_store import Ranks
from mooring.session import PendingSave, Session
from mooring.settings import read_settings

_log: Final = logging.getLogger("mooring")
_Result = TypeVar("_Result")


class FrameworkRun:
    """Every rank has one and calls the same methods in the same order. `current` gives the one of this process."""

    _current: "FrameworkRun | None" = None

    def __init__(self) -> None:
        """Raises UsageError or VolumeError."""
        self._session = Session(read_settings(os.environ))
        self._pending: PendingSave | None = None
        self._exit_asked = False
        self._given_up = False
        self._warned_of: set[Path] = set()
        self._outstanding: list[threading.Thread] = []

    @classmethod
    def current(cls) -> "FrameworkRun":
        """Made at the first call, and again after `close`. Raises UsageError or VolumeError when it is made."""
        if cls._current is None:
            cls._current = cls()
        return cls._current

    @property
    def stopping(self) -> bool:
        """The pod is ending and the just-in-time checkpoint was announced: leave."""
        return self._session.stopping

    @property
    def checkpoint_directory(self) -> Path:
        """Where to write a checkpoint for which the program names no place."""
        return self._session.settings.checkpoint_directory

    def hold_sigterm(self) -> None:
        """Take SIGTERM back from a framework that took it meanwhile."""
        self._session.hold_sigterm()

    def ask(self, step: int, tick: int = 0) -> Action:
        """What is asked after `step` optimizer steps and `tick` batches of an evaluation: the same on all ranks.

        Positions must grow, and be the same on all ranks. The answer is SAVE_AND_EXIT until the just-in-time checkpoint
        is announced, and NOTHING from then on.
        """
        if self._session.stopping or self._given_up:
            return Action.NOTHING
        try:
            ask = self._session.ask(step, tick)
        except MooringError as error:
            self._give_up(error)
            return Action.NOTHING
        self._exit_asked |= ask is Action.SAVE_AND_EXIT
        return ask

    def admits(self, step: int) -> bool:
        """Whether the agents have room for the periodic checkpoint that is due at `step`."""
        if self._given_up:
            return True
        try:
            if self._pending is not None:
                self._session.abort(self._pending)
            self._pending = self._session.admit(step, self._kind(None))
        except MooringError as error:
            self._give_up(error)
            return True
        return self._pending is not None

    def protects(self, path: Path) -> bool:
        """Whether an agent can take what lies there; says once per place that it cannot."""
        if self._given_up:
            return False
        volume = self._session.settings.volume
        if path.resolve().is_relative_to(volume.resolve()):
            return True
        place = path.parent
        if place not in self._warned_of:
            self._warned_of.add(place)
            _log.warning(
                "not protected, it lies outside the volume: path=%s volume=%s hint=write checkpoints to %s",
                path,
                volume,
                self.checkpoint_directory,
            )
        return False

    def claimed(self, path: Path) -> AbstractContextManager[None]:
        """Around the writing of what will be announced: the agent's watch might take it for complete before it is."""
        return self._session.claimed(path)

    def announce(self, path: Path, step: int, kind: Kind | None = None) -> bool:
        """This rank's part of the checkpoint `path` is written; waits until all are. Whether the agents know of it.

        `kind`: None for just-in-time when that was asked, else periodic.
        """
        pending = self._begin(path, step, kind)
        if pending is None:
            return False
        with self.claimed(path):
            return self._announce(path, pending)

    def announce_when(self, future: "Future[Any]", path: Path, step: int, kind: Kind | None = None) -> None:
        """The same when `future` is done, by another thread; nothing when it fails."""
        pending = self._begin(path, step, kind)
        if pending is None:
            return

        claim = ExitStack()
        claim.enter_context(self.claimed(path))

        def finish() -> None:
            try:
                failure = future.exception()
            except CancelledError as cancelled:
                failure = cancelled
            if failure is not None:
                _log.warning("checkpoint not announced, it could not be written: path=%s error=%s", path, failure)
            with claim:
                self._announce(path, pending, written=failure is None)

        thread = threading.Thread(target=finish, name="mooring-announce", daemon=True)
        # In the store's C++ when the interpreter ends it would abort the process.
        atexit.register(self.close)
        self._outstanding = [one for one in self._outstanding if one.is_alive()] + [thread]
        thread.start()

    def same(self, step: int, value: object) -> bool:
        """Whether this value is the same on all ranks: how many batches an evaluation after `step` has, for example."""
        if self._given_up:
            return False
        try:
            return self._session.context().coordinator.same(f"same/{step}/{self._session.next_number()}", str(value))
        except MooringError as error:
            self._give_up(error)
            return False

    def gather(self, step: int, value: str) -> Sequence[str] | None:
        """What all ranks bring, by rank, for rank 0 alone; None elsewhere, and when some do not come.

        Not by a collective: a rank whose volume failed is not protected, and would have no part in it.
        """
        if self._given_up:
            return None
        try:
            return self._session.context().coordinator.gather(f"gather/{step}/{self._session.next_number()}", value)
        except MooringError as error:
            self._give_up(error)
            return None

    def newest(self) -> Path | None:
        """The checkpoint to resume from, the same on all ranks; None to begin afresh. Leaves a pod that is ending."""
        try:
            if self._session.ends_untrained():
                self.leave()
            chosen = self._session.choose(self._whole())
        except MooringError as error:
            # To train from the start over what was saved is the one thing worse than to stop.
            raise SystemExit(f"mooring: {error}; {error.hint}") from error
        if chosen is None:
            return None
        _log.info("resuming: name=%s step=%d", chosen.name, chosen.step)
        return self._place(chosen)

    def leave(self) -> NoReturn:
        """After a just-in-time save: wait for what is still being written, part from the other ranks, exit with 143."""
        self._shut()
        self._session.leave()

    def close(self) -> None:
        """Training ended by itself: wait for what is still being written, and give SIGTERM back; idempotent."""
        self._shut()
        self._session.close()

    def _shut(self) -> None:
        for thread in self._outstanding:
            thread.join(PATIENCE_SECONDS)
        if self._pending is not None:
            self._session.abort(self._pending)
            self._pending = None
        atexit.unregister(self.close)
        if FrameworkRun._current is self:
            FrameworkRun._current = None

    def _begin(self, path: Path, step: int, kind: Kind | None) -> PendingSave | None:
        """The save that a checkpoint belongs to; None when it cannot be announced."""
        pending, self._pending = self._pending, None
        try:
            if not self.protects(path):
                if pending is not None:
                    self._session.abort(pending)
                return None
            if pending is not None and pending.step != step:
                self._session.abort(pending)
                pending = None
            if pending is None:
                pending = self._session.begin(step, self._kind(kind))
        except MooringError as error:
            self._give_up(error)
            return None
        return replace(pending, kind=self._kind(kind)) if pending.together else None

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
        """This rank among those that write it, and whether its pod brings a part; None when it is not whole.

        All pods bring one; or it is one file of rank 0, as Lightning writes it, and whole in that pod, whatever an
        earlier restore left under its name elsewhere.
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
        _log.warning("checkpoint not announced, a pod has no part of it: path=%s", path)
        return None

    def _record(self, path: Path, record: Record) -> Record | None:
        """Make the checkpoint durable and record it; forget those that the framework has deleted."""
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
        found: list[Record] = []
        for record in read_records(self._session.records):
            place = self._place(record)
            if not place.exists():
                continue
            if (reason := damage(record, place)) is None:
                found.append(record)
            else:
                _log.warning("checkpoint skipped: name=%s reason=%s", record.name, reason)
        return found

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

    def _give_up(self, error: MooringError) -> None:
        self._given_up = True
        _log.warning("not protected: error=%s hint=%s", error, error.hint)
        self._session.close()


def guarded_save(run: FrameworkRun, path: Path, step: int, write: Callable[[], _Result]) -> _Result:
    """What `write` returned, which writes this rank's part of `path`. Raises what it raises: the others know then."""
    with run.claimed(path):
        try:
            result = write()
        except BaseException as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            run.announce_when(failed, path, step)
            raise
        run.announce(path, step)
        return result


def next_name(last_name: str | None, last_step: int, step: int, *, default: str) -> str:
    """`last_name` with `step` in place of `last_step`; `default` if there is none or it does not say its step once.

    A program finds its checkpoints by their names, and often reads the step out of them.
    """
    if last_name is None:
        return default
    name, replaced = re.subn(rf"(?<!\d){last_step}(?!\d)", str(step), last_name)
    return name if replaced == 1 else default
