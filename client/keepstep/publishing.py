"""One save of all ranks, from the folder in which it is written to the announced checkpoint.

Owns the order: written by all ranks, made durable, put in its place and recorded, announced. All ranks agree on each
step, and if one cannot go on, none does. Whoever saves calls these steps at once, or in another thread behind the
training. A checkpoint that a program wrote in its place by itself is only recorded and announced.
"""

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from keepstep.autoload.post_import import reason
from keepstep.checkpoints.durable import sync_files, sync_tree
from keepstep.checkpoints.records import Kind, Record, RecordedFile, read_records, remove_record, write_record
from keepstep.ranks.coordinator import PATIENCE_SECONDS, WRITE_SECONDS
from keepstep.session import PendingSave, Session

_log: Final = logging.getLogger("keepstep")


class Publication:
    """A save whose checkpoint belongs at `path`. All ranks make the same calls, each step once.

    `by_framework` and `output` as in a record.

    Raises nothing: an error costs the checkpoint, and is said.
    """

    def __init__(
        self,
        session: Session,
        pending: PendingSave,
        path: Path,
        *,
        by_framework: bool = True,
        output: str = "",
    ) -> None:
        self._session = session
        self._context = session.context()
        self._pending = pending
        self._by_framework = by_framework
        self._output = output
        self._staged = self._context.local.staged(pending.save, path, by_framework=by_framework)
        self._brings = True
        """Whether this pod has a part of the checkpoint."""
        self._alone = False
        """Whether the checkpoint is one file of rank 0."""
        self._has_writers: bool | None = None
        """Whether every pod has its part, so that there can be a record; None if they were not asked."""
        self.saved_path: Final = path
        """Where it was saved."""
        self.path = path
        """Where the checkpoint belongs. If the program renames it before it is announced, its new place."""
        self.folder: Final = self._staged.folder
        """What is written here is moved beside `path`."""
        self.written: Final = self._staged.written
        """Where the checkpoint is written."""
        self.record: Record | None = None
        """The record, in the first rank of a pod that has a part of the checkpoint."""
        self._recorded: Record | None = None
        """What is on disk of it."""
        self.failure: Exception | None = None
        """Why this rank has failed, if it has."""

    def begin(self) -> bool:
        """Make the folder to write into; return whether all ranks have it."""
        try:
            self._staged.make()
        except OSError as error:
            self.failure = error
        begun = self._agree("begun", self.failure is None)
        if not begun:
            self.discard()
            self._session.note_loss(self._pending.kind)
        return begun

    def place(self, *, written: bool = True, recorded: bool = True, program_files_of: Path | None = None) -> bool:
        """Put the checkpoint in its place when all ranks have written it; return whether it is there on all of them.

        Args:
            written: Whether this rank has.
            recorded: Write the record, by which training resumes from it.
            program_files_of: The checkpoint before. What the program put into its folder is copied into this one.
        """
        if not self._agree("written", written, WRITE_SECONDS):
            if written:
                _log.warning("checkpoint given up, another rank failed: path=%s", self.path)
            self._give_up()
            return False
        self._has_writers = self._find_writers(self.written)
        files: tuple[RecordedFile, ...] = ()
        try:
            if self._context.leads_pod and self._brings:
                if program_files_of is not None and program_files_of != self.path:
                    self._context.local.take_along(program_files_of, self.written)
                files = self._staged.sync()
                if not files:
                    _log.warning("checkpoint lost: path=%s error=nothing was saved", self.path)
        except Exception as error:
            self._lost(error)
        has_files = bool(files) or not (self._context.leads_pod and self._brings)
        if not self._agree("durable", self.failure is None and has_files, WRITE_SECONDS):
            self._give_up()
            return False
        if self._context.leads_pod:
            try:
                is_recorded = self._brings and self._has_writers and recorded
                record = self._new_record(files) if is_recorded else None
                self.record = self._recorded = self._staged.put_in_place(record, self._context.local.records)
            except Exception as error:
                self._lost(error)
        if not self._agree("placed", self.failure is None, WRITE_SECONDS):
            self._session.abort(self._pending)
            self._session.note_loss(self._pending.kind)
            return False
        return True

    def goes_on(self) -> None:
        """Note that training waits for this save no longer, although it is not announced."""
        self._session.goes_on(self._pending)

    def discard(self) -> None:
        """Give up a checkpoint that could not be put in its place, and that the program knows to be lost."""
        if self._context.leads_pod:
            self._staged.discard()

    def withdraw(self) -> None:
        """Tell the ranks that come to `announce` that this one does not."""
        self._agree("announcing", False, WRITE_SECONDS)
        self._session.abort(self._pending)

    def announce(self, kind: Kind) -> bool:
        """Announce what `place` has put in its place, or what the program wrote there, when all ranks come to this.

        Returns whether the agents of all pods have taken it over.
        """
        if not self._agree("announcing", True, WRITE_SECONDS):
            self._session.abort(self._pending)
            self._session.note_loss(kind)
            return False
        if self._has_writers is None:
            self._has_writers = self._find_writers(self.path)
        recorded = self._has_writers
        if self._has_writers and self._context.leads_pod and self._brings:
            recorded = self._write_record(kind)
        if not self._has_writers:
            _log.warning("checkpoint not announced, it has no files in one of the pods: path=%s", self.path)
        if not self._agree("recorded", recorded, WRITE_SECONDS):
            self._session.abort(self._pending)
            self._session.note_loss(kind)
            return False
        if kind is Kind.JUST_IN_TIME:
            # Permanent: a final save after it makes the run no more complete.
            self._session.stopping = True
        taken_over = self._tell_agent()
        # Of a last save all ranks leave with the same code.
        is_refused = taken_over is False
        if kind is not Kind.PERIODIC:
            is_refused = not self._agree("taken", not is_refused)
        if not is_refused:
            self._session.note_stored(self._pending.step)
        announced = self._agree("announced", bool(taken_over))
        _log.info("saved: name=%s kind=%s save=%s announced=%s", self.path.name, kind, self._pending.save, announced)
        return announced

    @property
    def step(self) -> int:
        """Optimizer steps of this checkpoint."""
        return self._pending.step

    def was_changed(self) -> bool:
        """Whether the program has renamed what was announced, or added files to it. The pod's first rank knows."""
        if self.record is None:
            return False
        try:
            renamed = self._context.local.find_renamed(self.record)
            if renamed is None:
                return False
            others = self._context.local.others(renamed) if self._names_others else ()
            place = self._context.local.place(renamed)
            added = [
                name
                for name in others
                if name not in self.record.others and (place / name).stat().st_ctime > self.record.saved_at
            ]
        except OSError:
            return False
        return renamed.name != self.record.name or bool(added)

    @property
    def _names_others(self) -> bool:
        """Whether this pod names the program's own files: if several did, copies that differ would have one name."""
        return 0 in self._context.coordinator.ranks.pod or self._session.holds_whole_job

    def again(self, pending: PendingSave) -> "Publication":
        """Return a new save of what was announced, as it is by now."""
        new = Publication(self._session, pending, self.path, by_framework=self._by_framework, output=self._output)
        new._brings, new._alone, new._has_writers = self._brings, self._alone, self._has_writers
        if self.record is not None:
            new.record = replace(self.record, save=pending.save, saved_at=time.time(), announced=False)
        return new

    def forget_deleted(self) -> None:
        """Remove the records of checkpoints that were deleted."""
        if self._context.leads_pod:
            self._context.local.forget_deleted()

    def _agree(self, about: str, ok: bool, seconds: float = PATIENCE_SECONDS) -> bool:
        return bool(self._context.coordinator.agree(self._pending.key(about), ok, seconds=seconds))

    def _lost(self, error: Exception) -> None:
        self.failure = error
        _log.warning("checkpoint lost: path=%s error=%s", self.path, reason(error))

    def _give_up(self) -> None:
        self.discard()
        self._session.abort(self._pending)
        self._session.note_loss(self._pending.kind)

    def _find_writers(self, path: Path) -> bool:
        """Find out whether this pod has a part of the checkpoint. Returns False when a part is missing.

        Either every pod has a part, or the checkpoint is one file of rank 0, as Lightning writes it. That file is whole
        in its pod, whatever an earlier restore left under its name in other pods.
        """
        if self._session.holds_whole_job:
            return True
        pod = self._context.coordinator.ranks.pod
        is_first = 0 in pod
        # Not by Path, which raises when the volume fails.
        alone = os.path.isfile(path) and pod == tuple(range(len(pod))) if is_first else not os.path.isdir(path)  # noqa: PTH112, PTH113
        if self._agree("alone", alone):
            self._brings = is_first
            self._alone = True
            return True
        here = os.path.exists(path)  # noqa: PTH110
        if self._agree("here", here):
            return True
        self._brings = here
        return False

    def _new_record(self, files: tuple[RecordedFile, ...]) -> Record:
        ranks = self._context.coordinator.ranks
        return Record(
            name=self.path.name,
            step=self._pending.step,
            save=self._pending.save,
            kind=self._pending.kind,
            world_size=len(ranks.pod) if self._alone else ranks.world_size,
            saved_at=time.time(),
            files=files,
            directory=self._context.local.directory_of(self.path),
            output=self._output,
            by_framework=self._by_framework,
            ranks=ranks.pod,
        )

    def _write_record(self, kind: Kind) -> bool:
        """Write the record, or complete the one that `place` has written. Returns whether it is there."""
        local = self._context.local
        try:
            record = self.record
            if record is not None:
                # The program may have renamed it.
                record = local.find_renamed(record) or record
                self.path = local.place(record)
            elif self._by_framework:
                local.discard_older(self.path)
            # It may also have changed or removed some of its files.
            if record is None:
                found = sync_tree(self.path)
            else:
                found = sync_files(self.path, [file.path for file in record.files])
            files = tuple(RecordedFile(path=path, size_bytes=size_bytes) for path, size_bytes in found)
            record = self._new_record(files) if record is None else replace(record, files=files)
            others = local.others(record) if self._names_others else ()
            complete = replace(record, kind=kind, others=others, inode=self.path.stat().st_ino)
            if complete != self._recorded:
                write_record(local.records, complete)
            if self.record is not None and self.record.name != complete.name:
                remove_record(local.records / self.record.file_name)
        except Exception as error:
            _log.warning("checkpoint not recorded: path=%s error=%s", self.path, reason(error))
            return False
        self.record = self._recorded = complete
        return True

    def _tell_agent(self) -> bool | None:
        """Announce this rank's part by the record, which the first rank of the pod has written.

        Returns what the session does.
        """
        if not self._brings:
            self._session.abort(self._pending)
            return True
        local = self._context.local
        record = next((one for one in read_records(local.records) if one.save == self._pending.save), None)
        return False if record is None else self._session.announce(record, local.place(record))
