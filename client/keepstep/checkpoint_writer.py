"""One save of a Checkpointer, from its empty directory to the announced checkpoint.

Owns the order: written by all ranks, made durable, renamed, recorded, announced, rotated. All ranks agree that each of
them has written, and then that each has published; if one has not, none continues. A save may be completed in another
thread than it was begun in. Also owns what counts as a failure of the volume, which costs a checkpoint and never the
training.
"""

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final

from keepstep.asynchronous_saves import path_guard
from keepstep.asynchronous_saves.background_writer import BackgroundSave
from keepstep.autoload.post_import import reason
from keepstep.checkpoints.records import Kind, Record, RecordedFile
from keepstep.errors import ErrorKind, UsageError, VolumeError
from keepstep.ranks.coordinator import WRITE_SECONDS
from keepstep.session import PendingSave, Session
from keepstep_api import names

_log: Final = logging.getLogger("keepstep")
_KEEP_UNANNOUNCED: Final = 2
"""How many complete checkpoints stay on the local disk while they are not announced."""
_VOLUME_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_PROBE_BYTES: Final = 64 * 1024
_UNIT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NEXT: Final = {"written": "published", "published": None}
"""Agreement -> the one that follows it."""


class CheckpointWriter:
    """One checkpoint being written. Write into `directory`, then call `complete` or `abandon`.

    Attributes:
        directory: The empty directory to write into.
        failure: Why there is no directory, on all ranks; None when there is one.
    """

    def __init__(self, session: Session, pending: PendingSave, *, keep_local: int) -> None:
        self._session = session
        self._context = session.context()
        self._pending = pending
        self._keep_local = keep_local
        self._name = f"checkpoint-{pending.step}"
        self._unsaid: str | None = "written"
        self.failure = self._make_directory()
        self.directory: Path = self._context.local.being_saved(self._name)

    @property
    def path(self) -> Path:
        """Where the checkpoint is when it is complete."""
        return self._context.local.path(self._name)

    @property
    def step(self) -> int:
        """Optimizer steps of this checkpoint."""
        return self._pending.step

    @property
    def kind(self) -> Kind:
        """The kind of this save as it was begun, the same on all ranks."""
        return self._pending.kind

    def complete(self, kind: Callable[[], Kind] | None = None) -> bool:
        """Say that this rank's part is written.

        Args:
            kind: Asked for the kind of save once all ranks have written: a termination notice may have come meanwhile.

        Returns:
            Whether the checkpoint exists, which it does when all ranks have written their parts.
        """
        if self.failure is not None:
            self._context.coordinator.arrive(self._pending.key("ended"))
            return False
        # Another pod may still be making its part durable when ours already has its name.
        with self._session.claimed(self._context.local.path(self._name)):
            return self._complete(kind)

    def goes_on(self) -> None:
        """Note that training waits for this save no longer, although it is not complete."""
        self._session.goes_on(self._pending)

    def complete_later(self, save: BackgroundSave, kind: Kind) -> None:
        """Complete it, in another thread, when the files that were handed in to `save` are written.

        Until then, whoever in this process touches the checkpoint waits.
        """
        path_guard.hold(str(self.path), save.wait)

        def complete(failure: BaseException | None) -> None:
            try:
                if failure is None:
                    self.complete(lambda: kind)
                else:
                    warn_given_up(self.step, failure)
                    self.abandon()
            finally:
                path_guard.release(str(self.path))

        save.then(complete)
        self.goes_on()

    def abandon(self) -> None:
        """Give the checkpoint up: nothing of it stays on any rank that has not published it."""
        # Only then do the other ranks come to "ended". Once all have written, they come to "published" instead.
        ends = self.failure is not None or self._unsaid == "written"
        self._abandon()
        if ends:
            self._context.coordinator.arrive(self._pending.key("ended"))

    def abandon_together(self) -> bool:
        """Give the checkpoint up, and wait for the other ranks.

        Returns:
            Whether no rank is still writing: one that is may wait for this one in a collective.
        """
        self._abandon()
        return bool(self._context.coordinator.agree(self._pending.key("ended"), seconds=WRITE_SECONDS))

    def failed_by_volume(self, error: BaseException) -> bool:
        """Whether the volume caused `error`: the error says so, or the volume takes no write now."""
        is_torchs = type(error).__name__ == "CheckpointException"
        if not isinstance(error, Exception) and not is_torchs:
            return False
        return self.failure is not None or _tells_of_volume(error) or not _takes_a_write(self.directory)

    def _abandon(self) -> None:
        if self._unsaid is not None:
            # The error may also come from `complete`. The others wait for the next answer that this rank owes.
            self._agree(self._unsaid, ok=False)
        self._give_up()

    def _complete(self, kind: Callable[[], Kind] | None) -> bool:
        context = self._context
        if not self._agree("written"):
            _log.warning("checkpoint given up, another rank failed: name=%s", self._name)
            context.coordinator.arrive(self._pending.key("ended"))
            self._give_up()
            return False
        chosen = self._pending.kind if kind is None else kind()
        files = self._publish() if context.leads_pod else ()
        published = self._agree("published", ok=files is not None)
        if not published or files is None:
            self._take_back(published=files is not None)
            return False
        if chosen is Kind.JUST_IN_TIME:
            # Permanent: a final save after it makes the run no more complete.
            self._session.stopping = True
        record = Record(
            name=self._name,
            step=self._pending.step,
            save=self._pending.save,
            kind=chosen,
            world_size=context.coordinator.ranks.world_size,
            saved_at=time.time(),
            files=files,
            ranks=context.coordinator.ranks.pod,
        )
        announced = self._keep(record)
        _log.info("saved: name=%s kind=%s save=%s announced=%s", record.name, record.kind, record.save, announced)
        return True

    def _agree(self, about: str, *, ok: bool = True) -> bool:
        self._unsaid = _NEXT[about]
        return bool(self._context.coordinator.agree(self._pending.key(about), ok, seconds=WRITE_SECONDS))

    def _make_directory(self) -> VolumeError | None:
        """Make one directory for all ranks of the pod. Returns the error, on all ranks, if a pod cannot."""
        failure: OSError | None = None
        try:
            if self._context.leads_pod:
                self._context.local.begin(self._name)
        except OSError as error:
            failure = error
        if self._context.coordinator.agree(self._pending.key("begun"), failure is None):
            return None
        self._unsaid = None
        self._give_up()
        return VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            f"cannot save {self._name}: {failure or 'another rank cannot'}",
            hint="check whether the volume is full",
        )

    def _take_back(self, *, published: bool) -> None:
        """Undo this pod's publication after another pod's failed: nothing else would ever delete what has a name."""
        if published and self._context.leads_pod:
            try:
                self._context.local.take_back(self._name)
            except OSError as error:
                _log.warning("checkpoint not removed: name=%s error=%s", self._name, error)
        self._give_up()

    def _give_up(self) -> None:
        if self._context.leads_pod:
            self._context.local.abandon(self._name)
        self._session.abort(self._pending)

    def _publish(self) -> tuple[RecordedFile, ...] | None:
        try:
            return self._context.local.publish(self._name)
        except OSError as error:
            _log.warning("checkpoint lost: name=%s error=%s", self._name, error)
            return None

    def _keep(self, record: Record) -> bool:
        """Record, announce and rotate; return whether all ranks announced it. Without a record nothing is rotated."""
        local = self._context.local
        recorded = self._context.leads_pod and self._record(record)
        announced = self._session.announce(record, local.path(record.name))
        announced = self._context.coordinator.agree(self._pending.key("announced"), announced) or False
        if recorded:
            keep = self._keep_local if announced else max(self._keep_local, _KEEP_UNANNOUNCED)
            try:
                local.rotate(record, keep, keep_restored=not self._session.holds_whole_job)
            except OSError as error:
                _log.warning("older checkpoint not removed: error=%s", error)
        return announced

    def _record(self, record: Record) -> bool:
        try:
            self._context.local.record(record)
        except OSError as error:
            _log.warning("checkpoint not recorded, it cannot be resumed from: name=%s error=%s", record.name, error)
            return False
        return True


class SaveBlock(AbstractContextManager[Path]):
    """What `Checkpointer.save` returns. Used for anything but `with`, it says so."""

    def __init__(self, step: int, save: AbstractContextManager[Path]) -> None:
        self._step = step
        self._save = save
        self._entered = False

    def __enter__(self) -> Path:
        self._entered = True
        return self._save.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._save.__exit__(kind, error, trace)

    def __del__(self) -> None:
        if not self._entered:
            _log.warning("%s", self._misused())

    def __fspath__(self) -> str:
        raise self._misused()

    def __truediv__(self, name: object) -> Path:
        raise self._misused()

    def _misused(self) -> UsageError:
        self._entered = True
        return UsageError(
            ErrorKind.BAD_ARGUMENT,
            f"checkpointer.save({self._step}) was not used in a `with` statement, so nothing was saved",
            hint=f"write `with checkpointer.save({self._step}) as directory:` and save into that directory",
        )


def _tells_of_volume(error: BaseException | None) -> bool:
    """Whether the error, or one that led to it, tells of a full, broken or unusable volume.

    torch's CheckpointException has an error of each rank that failed.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, VolumeError) or (isinstance(error, OSError) and error.errno in _VOLUME_ERRNOS):
            return True
        if any(_tells_of_volume(failure) for failure, _ in getattr(error, "failures", {}).values()):
            return True
        error = error.__cause__ or error.__context__
    return False


def _takes_a_write(directory: Path) -> bool:
    """Return whether a small file can be written.

    On a full volume a library often raises something unrelated, and its half-written file still fills the volume.
    """
    probe = directory / ".probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError:
        return False
    return True


def warn_given_up(step: int, error: BaseException) -> None:
    """Say that the checkpoint of `step` is lost, and why."""
    hint = getattr(error, "hint", "") or "check whether the volume is full"
    # Its words alone: what the error refers to may keep a deleted file open, and its room taken.
    _log.warning("checkpoint given up, training goes on: step=%d error=%s hint=%s", step, reason(error), hint)


def checked_units(units: Mapping[str, float]) -> Mapping[str, float]:
    """Return what a program counts, as plain numbers. Raises UsageError for what the agent would refuse."""
    try:
        counted = {str(name): float(done) for name, done in units.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        counted = {"": -1.0}
    if len(counted) > names.MOST_UNITS or not all(
        _UNIT.fullmatch(name) and 0 <= done <= names.MOST_DONE for name, done in counted.items()
    ):
        raise UsageError(
            ErrorKind.BAD_ARGUMENT,
            f"units is {units!r}",
            hint=f'give at most {names.MOST_UNITS} numbers from 0 on by plain names, such as {{"tokens": 1.2e9}}',
        )
    return counted
