"""One save of a Checkpointer, from its empty directory to the announced checkpoint, and the rotation after it.

A save may be completed in another thread than it was begun in. Owns what counts as a failure of the volume, which costs
a checkpoint and never the training.
"""

import errno
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final

from keepstep.asynchronous_saves.background_writer import BackgroundSave, BackgroundWriter
from keepstep.autoload.post_import import reason
from keepstep.checkpoints.records import Kind, Record
from keepstep.errors import ErrorKind, UsageError, VolumeError
from keepstep.publishing import Publication
from keepstep.ranks.coordinator import WRITE_SECONDS
from keepstep.session import PendingSave, Session
from keepstep_api import names

_log: Final = logging.getLogger("keepstep")
_KEEP_UNANNOUNCED: Final = 2
"""How many complete checkpoints stay on the local disk while they are not announced."""
_VOLUME_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_PROBE_BYTES: Final = 64 * 1024
_UNIT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class CheckpointWriter:
    """One checkpoint being written. Write into `directory`, then call `complete` or `abandon`.

    Attributes:
        directory: The empty directory to write into.
        failure: Why there is no directory, on all ranks; None when there is one.
        background: What writes behind the training; None where training waits for this save.
    """

    def __init__(
        self, session: Session, pending: PendingSave, *, keep_local: int, writer: BackgroundWriter | None
    ) -> None:
        self._session = session
        self._context = session.context()
        self._pending = pending
        self._keep_local = keep_local
        self._path = self._context.local.path(f"checkpoint-{pending.step}")
        self._publication = Publication(session, pending, self._path, by_framework=False)
        self._written = False
        """Whether the other ranks know that this one writes no more."""
        self.failure: VolumeError | None = None
        if not self._publication.begin():
            self._written = True
            session.abort(pending)
            self.failure = VolumeError(
                ErrorKind.VOLUME_UNUSABLE,
                f"cannot save {self._path.name}: {self._publication.failure or 'another rank cannot, or is gone'}",
                hint="check whether the volume is full",
            )
        self.directory: Path = self._publication.written
        self.background: BackgroundSave | None = None
        if writer is not None and self.failure is None:
            self.background = writer.begin(self.directory)

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
            kind: Asked for the kind of save once the checkpoint exists: a termination notice may have come meanwhile.

        Returns:
            Whether the checkpoint exists, which it does when all ranks have written their parts.
        """
        if self.failure is not None:
            self._arrive_at_end()
            return False
        # Another pod may still be making its part durable when ours already has its name.
        with self._session.claimed(self._path):
            self._written = True
            if not self._publication.place():
                self._arrive_at_end()
                return False
            announced = self._publication.announce(self._pending.kind if kind is None else kind())
            if self._publication.record is not None:
                self._rotate(self._publication.record, announced=announced)
            return True

    def goes_on(self) -> None:
        """Note that training waits for this save no longer, although it is not complete."""
        self._session.goes_on(self._pending)

    def complete_later(self, kind: Kind) -> None:
        """Complete it, in another thread, when what was handed in to `background` is written."""
        assert self.background is not None

        def complete(failure: BaseException | None) -> None:
            if failure is None:
                self.complete(lambda: kind)
            else:
                self.warn_given_up(failure)
                self.abandon()

        self.background.then(complete)
        self.goes_on()

    def abandon(self) -> None:
        """Give the checkpoint up: nothing of it stays on any rank that has not published it."""
        ends = self.failure is not None or not self._written
        self._give_up()
        if ends:
            self._arrive_at_end()

    def abandon_together(self) -> bool:
        """Give the checkpoint up, and wait for the other ranks.

        Returns:
            Whether no rank is still writing: one that is may wait for this one in a collective.
        """
        self._give_up()
        return bool(self._context.coordinator.agree(self._pending.key("ended"), seconds=WRITE_SECONDS))

    def failed_by_volume(self, error: BaseException) -> bool:
        """Whether the volume caused `error`: the error says so, or the volume takes no write now."""
        is_torchs = type(error).__name__ == "CheckpointException"
        if not isinstance(error, Exception) and not is_torchs:
            return False
        return self.failure is not None or _tells_of_volume(error) or not _takes_a_write(self.directory)

    def warn_given_up(self, error: BaseException) -> None:
        """Say that the checkpoint is lost, and why."""
        hint = getattr(error, "hint", "")
        # One that was given up needs no look at the volume, for which its successor would wait.
        if not hint and not isinstance(error, InterruptedError) and self.failed_by_volume(error):
            hint = "check whether the volume is full"
        # Its words alone: what the error refers to may keep a deleted file open, and its room taken.
        line = f"checkpoint given up, training goes on: step={self.step} error={reason(error)}"
        _log.warning("%s", f"{line} hint={hint}" if hint else line)

    def _give_up(self) -> None:
        if not self._written:
            self._written = True
            self._publication.place(written=False)

    def _arrive_at_end(self) -> None:
        self._context.coordinator.arrive(self._pending.key("ended"))

    def _rotate(self, newest: Record, *, announced: bool) -> None:
        keep = self._keep_local if announced else max(self._keep_local, _KEEP_UNANNOUNCED)
        try:
            self._context.local.rotate(newest, keep, keep_restored=not self._session.holds_whole_job)
        except OSError as error:
            _log.warning("older checkpoint not removed: error=%s", error)


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
    probe = directory / ".keepstep-probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError:
        return False
    return True


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
