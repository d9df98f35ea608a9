"""How the commands of one agent fare: whether they fail, how long they take, what they do to its volume and the store.

A crash leaves all of that in place: what is pinned stays pinned, and what was written is there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from tests.simulation.invariants import AgentChecks
from tests.simulation.scenario import PlannedAgent, PlannedAnnouncement
from tests.simulation.store_model import ViolationError, checksum_of, content_of, pack_content, receipt_of

from keepstep_agent.core.agent.commands import (
    Abandon,
    Ask,
    CheckSent,
    Commit,
    CompleteUpload,
    CreateUpload,
    KnownFile,
    Prune,
    PutFile,
    PutPack,
    Recall,
    Reconcile,
    Release,
    SendPart,
    Stage,
    Turn,
    WorkCommand,
    WriteManifest,
)
from keepstep_agent.core.agent.events import (
    Abandoned,
    Answered,
    Committed,
    CommitWaits,
    DurableEvent,
    Event,
    FileStored,
    FoundFile,
    FoundUpload,
    ManifestStored,
    ObjectsLost,
    PackStored,
    PartStored,
    Recalled,
    Reconciled,
    Released,
    SentChecked,
    Staged,
    UploadCreated,
    WorkFailed,
)
from keepstep_agent.core.agent.reducer import step
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.file_lists import StagedFiles, staged_files
from keepstep_agent.core.model import Fingerprint, StagedFile
from keepstep_agent.core.stored.commit import (
    LostObjects,
    lost_objects,
    manifest_key_of,
    missing_files,
    missing_packs,
    missing_ranks,
)
from keepstep_agent.core.stored.object_layout import file_key, marker_key
from keepstep_agent.core.stored.packs_and_parts import plan
from keepstep_agent.ports import StagedDescriptor
from keepstep_agent.runtime.engine.journaling import rescan, save_of
from keepstep_agent.runtime.work.transfers import descriptor

if TYPE_CHECKING:
    from tests.simulation.life import Life

    from keepstep_agent.ports import StagingArea

_BYTES_PER_SECOND = 8e6


@dataclass(slots=True)
class Running:
    """A command under way. `body`: the marker that a Commit is about to write; the rest is what it found missing."""

    command: WorkCommand
    fails: ErrorKind | None
    takes_effect: bool
    lost: LostObjects | None = None
    lost_manifest: bool = False
    missing_ranks: int | None = None
    body: bytes | None = None


class CommandEffects:
    """`announced`: what each rank's directory holds. `pins`: save -> rank -> files."""

    def __init__(self, life: "Life", index: int, planned: PlannedAgent, checks: AgentChecks) -> None:
        self.announced: dict[tuple[str, int], PlannedAnnouncement] = {}
        self.pins: dict[str, dict[int, StagedFiles]] = {}
        self._descriptors: dict[tuple[str, int], StagedDescriptor] = {}
        self._life = life
        self._index = index
        self._planned = planned
        self._checks = checks

    def scan(self, may_read: Callable[[str], bool] = lambda _: True) -> Iterable[tuple[StagedDescriptor, StagedFiles]]:
        """As a staging area does."""
        return [(told, self.pins[save][rank]) for (save, rank), told in self._descriptors.items() if may_read(save)]

    def failed(self, work: WorkId, kind: ErrorKind) -> WorkFailed:
        jitter = self._life.random.random()
        return WorkFailed(at=self._life.now, work=work, kind=kind, message=f"injected {kind}", hint="", jitter=jitter)

    def fate(self, command: WorkCommand) -> tuple[ErrorKind | None, bool]:
        """(how it fails, whether it takes effect)."""
        life, faults = self._life, self._life.scenario.faults
        changed = command.work.save in faults.changed_saves
        if isinstance(command, Reconcile) and marker_key(command.info) in life.store.objects:
            # It does not look at its files.
            changed = False
        if changed and isinstance(command, SendPart | PutFile | PutPack | Reconcile):
            self._checks.broken.add(command.work.save)
            return ErrorKind.FILE_CHANGED, False
        if not life.stormy:
            return None, True
        draw = life.random.random()
        if isinstance(command, Recall):
            return None, True
        if isinstance(command, Stage):
            if draw < faults.refused:
                self._checks.broken.add(command.work.save)
                return ErrorKind.DISK_FULL, False
            return None, True
        kind = life.random.choice((ErrorKind.THROTTLED, ErrorKind.TIMED_OUT, ErrorKind.STORE_FAILED))
        if draw < faults.fail_before:
            return kind, False
        if draw < faults.fail_before + faults.fail_after:
            return kind, True
        return None, True

    def recalled(self, save: str) -> tuple[DurableEvent, ...]:
        """What the journal has of a save; if nothing, what its pins tell."""
        journal = self._life.agents[self._index].journal
        events = [event for event in journal if save_of(event) == save]
        if not events:
            scratch = State(settings=self._planned.settings)
            for event in rescan(cast("StagingArea", self), scratch, lambda found: found == save):
                step(scratch, event)
                events.append(event)
            journal.extend(events)
        return tuple(events)

    def duration_seconds(self, command: WorkCommand) -> float:
        latency_seconds = self._life.random.choice((0.02, 0.1, 0.1, 0.5))
        if isinstance(command, SendPart | PutFile):
            return latency_seconds + command.region.size_bytes / _BYTES_PER_SECOND
        if isinstance(command, PutPack):
            return latency_seconds + command.pack.size_bytes / _BYTES_PER_SECOND
        return latency_seconds

    def look(self, running: Running) -> None:
        """First half of a Commit: list, compare, and make the marker's body."""
        command = running.command
        assert isinstance(command, Commit)
        store, info = self._life.store, command.info
        is_committed = marker_key(info) in store.objects
        if not is_committed and command.turn is Turn.READ:
            return
        sizes = store.sizes(info)
        running.lost = lost_objects(command.ranks, sizes)
        running.lost_manifest = manifest_key_of(command.ranks) not in sizes
        running.missing_ranks = missing_ranks(info, sizes)
        if running.lost or running.lost_manifest or running.missing_ranks:
            return
        ranks = store.ranks(info)
        running.missing_ranks = info.world_size - sum(
            not (missing_files(one, sizes) or missing_packs(one, sizes)) for one in ranks.values()
        )
        if not running.missing_ranks and (command.turn is Turn.WRITE or is_committed):
            running.body = store.marker_body(info)

    def carry_out(self, running: Running) -> Event:
        """What the command does, and the event that it ends in."""
        life, store, now = self._life, self._life.store, self._life.now
        command = running.command
        work = command.work
        content = content_of(work.save, work.path, work.number)
        match command:
            case Stage():
                return self._stage(command)
            case Reconcile():
                return self._reconcile(command)
            case CreateUpload():
                self._checks.sending_file(work)
                return UploadCreated(at=now, work=work, upload=store.create_upload(command.key, landed_late=False))
            case SendPart():
                size_bytes = command.region.size_bytes
                if not store.put_part(command.work.upload, work.number, content, size_bytes):
                    return self.failed(work, ErrorKind.UPLOAD_LOST)
                return PartStored(
                    at=now, work=work, receipt=receipt_of(content), checksum=checksum_of(content), size_bytes=size_bytes
                )
            case PutFile():
                size_bytes = command.region.size_bytes
                store.put(command.key, content, size_bytes)
                checksum = checksum_of(content_of(work.save, work.path, 1)) if size_bytes else None
                return FileStored(at=now, work=work, checksum=checksum, size_bytes=size_bytes)
            case PutPack():
                pack = command.pack
                store.put(command.key, pack_content(work.save, pack), pack.size_bytes)
                checksums = tuple(checksum_of(content_of(work.save, file.path, 1)) for file in pack.files)
                size_bytes = sum(file.size_bytes for file in pack.files)
                return PackStored(at=now, work=work, checksums=checksums, size_bytes=size_bytes)
            case CompleteUpload():
                whole = content_of(work.save, work.path)
                done = store.complete_upload(command.work.upload, command.receipts, whole, command.size_bytes)
                if not done and command.key not in store.objects:
                    return self.failed(work, ErrorKind.UPLOAD_LOST)
                return FileStored(at=now, work=work, checksum=None, size_bytes=0)
            case CheckSent():
                return SentChecked(at=now, work=work)
            case WriteManifest():
                store.put_manifest(command.ranks)
                return ManifestStored(at=now, work=work)
            case Commit():
                return self._commit(command, running)
            case Abandon():
                for _, token in command.uploads:
                    store.abort_upload(token)
                self._sweep(frozenset(command.sweep_keys), keep=frozenset())
                if command.sweep_keys:
                    life.swept[self._index, work.save] = store.upload_count
                return Abandoned(at=now, work=work)
            case Release():
                for rank in self.pins.pop(work.save, {}):
                    del self._descriptors[work.save, rank]
                return Released(at=now, work=work)
            case Ask():
                return Answered(at=now, work=work)
            case Recall():
                return Recalled(at=now, work=work, events=self.recalled(work.save))
            case Prune():
                raise ViolationError("prune was asked for although everything is to be kept")

    def _stage(self, command: Stage) -> Staged:
        save, rank = command.work.save, command.work.rank
        planned = self.announced[save, rank]
        files = planned.files
        if planned.shared:
            # The directory holds what all ranks of the pod wrote.
            files = tuple(
                file
                for (other, _), announced in sorted(self.announced.items())
                if other == save
                for file in announced.files
            )
        pinned = self.pins.setdefault(save, {})
        if rank not in pinned:
            pinned[rank] = staged_files(
                StagedFile(
                    path=file.path,
                    pin=f".keepstep/staged/{save}/{file.path}",
                    fingerprint=Fingerprint(
                        size_bytes=file.size_bytes, mtime_ns=1, inode=checksum_of(f"{save}{file.path}")
                    ),
                    private=False,
                )
                for file in files
            )
        self._descriptors[save, rank] = descriptor(replace(command, pack_size_bytes=self._planned.pack_size_bytes))
        return Staged(
            at=self._life.now,
            work=command.work,
            files=pinned[rank],
            part_size_bytes=command.part_size_bytes,
            pack_size_bytes=self._planned.pack_size_bytes,
        )

    def _commit(self, command: Commit, running: Running) -> Event:
        now, work, lost = self._life.now, command.work, running.lost
        if lost or running.lost_manifest:
            return ObjectsLost(at=now, work=work, files=lost.files if lost else (), packs=lost.packs if lost else ())
        if running.body is None:
            return CommitWaits(at=now, work=work, missing_ranks=running.missing_ranks)
        store = self._life.store
        store.put_marker(command.info, running.body)
        if command.sweep_uploads:
            self._sweep_save(work.save)
        return Committed(at=now, work=work)

    def _sweep_save(self, save: str) -> None:
        """Every rank is sealed, so whatever is open below it is nobody's."""
        uploads = self._life.store.uploads
        self._sweep(frozenset(one.key for one in uploads.values() if f"/{save}/" in one.key), keep=frozenset())
        for index in range(len(self._life.agents)):
            self._life.swept[index, save] = self._life.store.upload_count

    def _reconcile(self, command: Reconcile) -> Reconciled | Committed:
        store = self._life.store
        if marker_key(command.info) in store.objects:
            self._sweep_save(command.work.save)
            return Committed(at=self._life.now, work=command.work)
        ours = frozenset(file_key(command.info, file.path) for _, files in command.staged for file in files)
        self._sweep(ours, keep=frozenset(known.upload for known in command.unfinished))
        uploads: list[FoundUpload] = []
        files: list[FoundFile] = []
        for known in command.unfinished:
            parts = plan(known.file.size_bytes, known.part_size_bytes)
            if self._is_stored(command, known, len(parts)):
                whole = len(parts) == 1
                checksum = checksum_of(content_of(command.info.save, known.file.path, 1)) if whole else None
                files.append(FoundFile(rank=known.rank, path=known.file.path, checksum=checksum))
            elif known.upload in store.uploads:
                uploads.append(self._found_upload(command, known))
        return Reconciled(at=self._life.now, work=command.work, uploads=tuple(uploads), files=tuple(files))

    def _is_stored(self, command: Reconcile, known: KnownFile, part_count: int) -> bool:
        if file_key(command.info, known.file.path) not in self._life.store.objects:
            return False
        if part_count > 1:
            return len(known.parts) == part_count
        # A single PUT is recognised by its MD5 only where the store tells it.
        return part_count == 0 or self._life.tells_md5

    def _found_upload(self, command: Reconcile, known: KnownFile) -> FoundUpload:
        journaled = {number for number, _, _ in known.parts}
        held = self._life.store.uploads[known.upload].parts
        parts = tuple(
            (number, receipt, checksum_of(content_of(command.info.save, known.file.path, number)))
            for number, (receipt, _) in sorted(held.items())
            if number in journaled or self._life.tells_md5
        )
        return FoundUpload(rank=known.rank, path=known.file.path, upload=known.upload, parts=parts)

    def _sweep(self, keys: frozenset[str], *, keep: frozenset[str]) -> None:
        uploads = self._life.store.uploads
        for token in [found for found, upload in uploads.items() if upload.key in keys and found not in keep]:
            self._life.store.abort_upload(token)
