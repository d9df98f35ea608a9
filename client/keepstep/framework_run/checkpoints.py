"""The checkpoints that a framework writes, as records and announcements; all ranks call the same methods.

Owns what all ranks must agree on before a checkpoint is announced: that each has written its part, which pods have one,
and that it is recorded. Never writes into a checkpoint, because Hugging Face rotates by modification time. Raises
nothing but the errors of programs that call it wrongly.
"""

import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from keepstep.checkpoints.durable import sync_tree
from keepstep.checkpoints.records import Kind, Record, RecordedFile, is_whole, read_records, remove_record, write_record
from keepstep.ranks.coordinator import WRITE_SECONDS
from keepstep.ranks.rank_store import Ranks
from keepstep.session import PendingSave, Session

_log: Final = logging.getLogger("keepstep")


class FrameworkCheckpoints:
    """The checkpoints of one run, in directories that its framework has chosen."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def recorded_step(self, path: Path) -> int | None:
        """Return the step of a checkpoint that Keepstep recorded or restored; None for any other."""
        records = read_records(self._session.records)
        return next((record.step for record in records if self.place(record).resolve() == path.resolve()), None)

    def announce(self, path: Path, pending: PendingSave, *, written: bool = True) -> bool:
        """Record and announce what all ranks have written. Returns whether the agents of all pods have taken it over.

        `written`: whether this rank has; if one has not, nothing is announced. May be called from any thread.
        """
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
        """Make the checkpoint durable and record it."""
        try:
            files = tuple(RecordedFile(path=name, size_bytes=size_bytes) for name, size_bytes in sync_tree(path))
            record = replace(record, files=files)
            write_record(self._session.records, record)
        except OSError as error:
            _log.warning("checkpoint not recorded: path=%s error=%s", path, error)
            return None
        self.forget_deleted()
        return record

    def forget_deleted(self) -> None:
        """Remove the pod's records of checkpoints that the framework has deleted."""
        if not self._session.context().leads_pod:
            return
        # What the disk refuses is tried again at the next save; until then it does no harm.
        with suppress(OSError):
            for record in read_records(self._session.records):
                if not self.place(record).exists():
                    remove_record(self._session.records, record.name)

    def whole(self) -> list[Record]:
        """Return the records of the checkpoints that are here and whole."""
        there = ((record, self.place(record)) for record in read_records(self._session.records))
        return [record for record, place in there if place.exists() and is_whole(record, place)]

    def place(self, record: Record) -> Path:
        """Return where a checkpoint lies."""
        if record.directory is None:
            return self._session.settings.checkpoint_directory / record.name
        return self._session.settings.volume / record.directory / record.name

    def _directory(self, path: Path) -> str:
        return path.resolve().parent.relative_to(self._session.settings.volume.resolve()).as_posix()
