"""One agent process: the real reducer with a journal, a volume and commands that take time, fail, and outlive a crash.

Owns what the runtime owns in production: journal first, then commands, each ending in one event. A crash can come at
any boundary: before the journal is written, after it, between two commands. What was in flight may land later. While
the journal cannot be written the agent goes on from memory, without what must not run ahead of its record.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.invariants import AgentChecks
from tests.simulation.scenario import PlannedAgent, PlannedAnnouncement
from tests.simulation.store_model import ViolationError, checksum_of, content_of, pack_content, receipt_of

from mooring_agent.core.agent import drain, planner
from mooring_agent.core.agent.announcements import check_announcement, known_announcement
from mooring_agent.core.agent.commands import (
    AFTER_ITS_RECORD,
    Abandon,
    CancelTermination,
    CancelWork,
    CheckSent,
    Command,
    Commit,
    CompleteUpload,
    CreateUpload,
    Exit,
    KnownFile,
    LiftBandwidthCap,
    Prune,
    PutFile,
    PutPack,
    Reconcile,
    Record,
    Release,
    RequestSave,
    SendPart,
    Stage,
    Turn,
    WorkCommand,
    WriteManifest,
)
from mooring_agent.core.agent.events import (
    Abandoned,
    Announced,
    Committed,
    CommitWaits,
    DurableEvent,
    Event,
    Exited,
    Failed,
    FileStored,
    FoundFile,
    FoundUpload,
    ManifestStored,
    ObjectsLost,
    PackStored,
    PartStored,
    RanksSeen,
    Reconciled,
    Released,
    SentChecked,
    Shed,
    Staged,
    Started,
    StopRequested,
    Ticked,
    UploadCreated,
    WorkCancelled,
    WorkFailed,
)
from mooring_agent.core.agent.reducer import advance, step
from mooring_agent.core.agent.state import State
from mooring_agent.core.agent.work import Operation, WorkId
from mooring_agent.core.errors import ErrorKind, RequestError
from mooring_agent.core.model import Fingerprint, StagedFile
from mooring_agent.core.settings.values import Settings
from mooring_agent.core.stored.commit import (
    LostObjects,
    lost_objects,
    manifest_key_of,
    missing_files,
    missing_packs,
    missing_ranks,
)
from mooring_agent.core.stored.object_layout import file_key, marker_key
from mooring_agent.core.stored.packs_and_parts import plan
from mooring_agent.ports import StagedDescriptor
from mooring_agent.runtime.engine.event_codec import decode_event, encode_event
from mooring_agent.runtime.engine.journaling import rescan, save_of
from mooring_agent.runtime.work.transfers import descriptor

if TYPE_CHECKING:
    from tests.simulation.life import Life

    from mooring_agent.ports import StagingArea

_BYTES_PER_SECOND = 8e6
_TIMEOUT_SECONDS = 20.0


@dataclass(slots=True)
class _Running:
    """A command under way. `body`: the marker that a Commit is about to write; the rest is what it found missing."""

    command: WorkCommand
    fails: ErrorKind | None
    takes_effect: bool
    lost: LostObjects | None = None
    lost_manifest: bool = False
    missing_ranks: int | None = None
    body: bytes | None = None


class AgentModel:
    """`life` is the world: clock, store, randomness, faults."""

    def __init__(self, life: "Life", index: int, planned: PlannedAgent) -> None:
        self.life = life
        self.index = index
        self.planned = planned
        self.journal: list[DurableEvent] = []
        self.starts = 0
        self.state = State(settings=self._settings())
        self.checks = AgentChecks(index)
        self.alive = set(range(len(planned.ranks)))
        self.running = False
        self.exit: Exit | None = None
        self.stop_requested = False
        self._pins: dict[str, dict[int, tuple[StagedFile, ...]]] = {}
        self._descriptors: dict[tuple[str, int], StagedDescriptor] = {}
        self.journal_writable = True
        self._unjournaled: list[DurableEvent] = []
        self._in_flight: dict[WorkId, _Running] = {}
        self._announced: dict[tuple[str, int], PlannedAnnouncement] = {}
        self._steps = 0
        self._wake_at: float | None = None

    # --- the process -------------------------------------------------------------------------------------------

    def start(self, *, fresh: bool) -> None:
        """Replay, through the codec, look for pins that the journal does not tell of, and go on."""
        assert not self.running
        self.state = self.replayed()
        found = []
        for event in rescan(cast("StagingArea", self), self.state):
            step(self.state, event)
            found.append(event)
        if found and not self.journal_writable:
            # It ends at once, and is started again.
            self.life.after(1.0, self._restart)
            return
        self.journal.extend(found)
        self.starts += 1
        self.checks.forget_order()
        self.running, self.exit, self.stop_requested, self._wake_at = True, None, False, None
        self.deliver(Started(at=self.life.now, fresh=fresh))
        self.deliver(RanksSeen(at=self.life.now, alive=frozenset(self.alive)))

    def replayed(self) -> State:
        state = State(settings=self._settings())
        for event in self.journal:
            advance(state, decode_event(encode_event(event)))
        return state

    def _settings(self) -> Settings:
        """Of the start that is on, or comes next."""
        part_sizes_bytes = self.planned.part_sizes_bytes
        part_size_bytes = part_sizes_bytes[self.starts % len(part_sizes_bytes)]
        settings = self.planned.settings
        return replace(settings, transfer=replace(settings.transfer, part_size_bytes=part_size_bytes))

    def deliver(self, event: Event) -> bool:
        """Engine and dispatcher in one. False: the process died of it, or was not there."""
        if not self.running:
            return False
        self.life.note(self.index, event)
        ready = advance(self.state, event)
        if ready.durable:
            if self._crashes():
                return False
            self.checks.decided(self.state, ready.durable, self.life.store)
            self._unjournaled.extend(ready.durable)
        self._write_journal()
        self.checks.commands(self.state, ready.commands)
        self.checks.nothing_overlooked(self.state)
        self.checks.newest_is_sent(self.state)
        if isinstance(event, StopRequested):
            self.stop_requested = True
        for command in ready.commands:
            if self._crashes():
                return False
            if self._unjournaled and isinstance(command, AFTER_ITS_RECORD):
                self.life.after(0.0, self._refuse, command.work)
            else:
                self._perform(command)
        self._check_end()
        self._plan_wake()
        return self.running

    def announce(self, planned: PlannedAnnouncement) -> bool | None:
        """As the API does: refused (False), acknowledged (True), or nobody answered (None)."""
        if not self.running:
            return None
        event = Announced(
            at=self.life.now,
            info=planned.info,
            rank=planned.rank,
            path=f"/volume/checkpoints/{planned.info.name}",
            files=() if planned.shared else tuple(file.path for file in planned.files),
            local_world_size=planned.local_world_size,
        )
        try:
            check_announcement(self.state, event)
        except RequestError:
            return False
        self._announced[planned.info.save, planned.rank] = planned
        if known_announcement(self.state, event) is not None:
            if not self._write_journal():
                return None
            self.checks.acknowledged(planned)
            return True
        before = len(self.journal)
        self.deliver(event)
        if event in self.journal[before:]:
            self.checks.acknowledged(planned)
            return True
        return None

    def kill(self) -> None:
        """Gone at once; what was on its way may still arrive."""
        self.running = False
        self._unjournaled.clear()
        for running in self._in_flight.values():
            self._maybe_land_late(running)
        self._in_flight.clear()

    @property
    def idle(self) -> bool:
        return not self._in_flight

    def committing(self, save: str) -> bool:
        return WorkId(Operation.COMMIT, save) in self._in_flight

    def _crashes(self) -> bool:
        self._steps += 1
        if not self.life.stormy or self._steps not in self.planned.crash_steps:
            return False
        self.kill()
        self.life.after(self.life.random.uniform(0.05, 4.0), self._restart)
        return True

    def _write_journal(self) -> bool:
        """What is due; False: it cannot be written now."""
        if self._unjournaled and self.journal_writable:
            self.journal.extend(self._unjournaled)
            self.checks.journaled(self._unjournaled)
            self._unjournaled.clear()
        return not self._unjournaled

    def scan(self) -> Iterable[tuple[StagedDescriptor, tuple[StagedFile, ...]]]:
        """As a staging area does."""
        return [(told, self._pins[save][rank]) for (save, rank), told in self._descriptors.items()]

    def _restart(self) -> None:
        if not self.running and not self.life.ending:
            self.start(fresh=False)

    def _refuse(self, work: WorkId) -> None:
        self.deliver(self._failed(work, ErrorKind.DISK_FULL))

    def _plan_wake(self) -> None:
        wake_at = planner.next_wake(self.state) if self.running else None
        if wake_at is not None and wake_at != self._wake_at:
            self._wake_at = wake_at
            self.life.after(wake_at - self.life.now, self._wake, wake_at)

    def _wake(self, wake_at: float) -> None:
        if self._wake_at == wake_at:
            self._wake_at = None
            self.deliver(Ticked(at=wake_at))

    def _check_end(self) -> None:
        until = drain.deadline(self.state)
        if self.stop_requested and not self.exit and until is not None and self.life.now >= until:
            raise ViolationError(f"agent {self.index} was still there at its deadline {until}")

    # --- commands ----------------------------------------------------------------------------------------------

    def _perform(self, command: Command) -> None:
        match command:
            case RequestSave() | LiftBandwidthCap() | CancelTermination():
                pass
            case Record():
                raise ViolationError("a decision came out as a command")
            case Exit():
                self._exit(command)
            case CancelWork():
                self._cancel(command.work)
            case _:
                self._begin(command)

    def _begin(self, command: WorkCommand) -> None:
        if command.work in self._in_flight:
            raise ViolationError(f"{command.work} is in flight twice")
        if isinstance(command, SendPart | PutFile | PutPack | Reconcile) and command.work.save not in self._pins:
            raise ViolationError(f"{command.work} needs pins that were dropped")
        if isinstance(command, Release) and not any(
            isinstance(event, Committed | Shed | Failed) and save_of(event) == command.work.save
            for event in self.journal
        ):
            raise ViolationError(f"the pins of {command.work.save} went before its end was in the journal")
        faults = self.life.scenario.faults
        running = _Running(command, *self._fate(command))
        self._in_flight[command.work] = running
        seconds = self._duration_seconds(command)
        if self.life.stormy and not isinstance(command, Stage) and self.life.random.random() < faults.hang:
            running.fails, seconds = running.fails or ErrorKind.TIMED_OUT, _TIMEOUT_SECONDS
        if isinstance(command, Commit):
            self.life.after(seconds / 2, self._look, running)
        self.life.after(seconds, self._finish, running)

    def _fate(self, command: WorkCommand) -> tuple[ErrorKind | None, bool]:
        """(how it fails, whether it takes effect)."""
        life, faults = self.life, self.life.scenario.faults
        changed = command.work.save in faults.changed_saves
        if isinstance(command, Reconcile) and marker_key(command.info) in life.store.objects:
            # It does not look at its files.
            changed = False
        if changed and isinstance(command, SendPart | PutFile | PutPack | Reconcile):
            self.checks.broken.add(command.work.save)
            return ErrorKind.FILE_CHANGED, False
        if not life.stormy:
            return None, True
        draw = life.random.random()
        if isinstance(command, Stage):
            if draw < faults.refused:
                self.checks.broken.add(command.work.save)
                return ErrorKind.DISK_FULL, False
            return None, True
        kind = life.random.choice((ErrorKind.THROTTLED, ErrorKind.TIMED_OUT, ErrorKind.STORE_FAILED))
        if draw < faults.fail_before:
            return kind, False
        if draw < faults.fail_before + faults.fail_after:
            return kind, True
        return None, True

    def _duration_seconds(self, command: WorkCommand) -> float:
        latency_seconds = self.life.random.choice((0.02, 0.1, 0.1, 0.5))
        if isinstance(command, SendPart | PutFile):
            return latency_seconds + command.region.size_bytes / _BYTES_PER_SECOND
        if isinstance(command, PutPack):
            return latency_seconds + command.pack.size_bytes / _BYTES_PER_SECOND
        return latency_seconds

    def _cancel(self, work: WorkId) -> None:
        running = self._in_flight.get(work)
        if running is None or self.life.random.random() < self.life.scenario.faults.cancel_race:
            return
        self._maybe_land_late(running)
        self._in_flight[work] = cancelled = _Running(running.command, None, takes_effect=False)
        self.life.after(0.01, self._end, cancelled, WorkCancelled(at=self.life.now, work=work))

    def _exit(self, command: Exit) -> None:
        if self.exit is not None:
            raise ViolationError("Exit was asked for twice")
        if not self.stop_requested:
            raise ViolationError("Exit was asked for although nobody stopped the agent")
        until = drain.deadline(self.state)
        if until is not None and self.life.now >= until:
            raise ViolationError("Exit came after SIGKILL")
        self.exit = command
        self.checks.exit(self.state, command, self.life.store)
        self.life.after(0.05, self._leave)

    def _leave(self) -> None:
        if self.running and self.exit is not None:
            if self._write_journal() and self.journal_writable:
                self.journal.append(Exited(at=self.life.now))
            self.kill()
            self.life.left(self)

    def _end(self, running: _Running, event: Event) -> None:
        work = running.command.work
        if self._in_flight.get(work) is running:
            del self._in_flight[work]
            self.deliver(event)

    def _finish(self, running: _Running) -> None:
        work = running.command.work
        if self._in_flight.get(work) is not running:
            return
        fails = running.fails
        if self.life.outage and not isinstance(running.command, Stage):
            fails, running.takes_effect = ErrorKind.UNREACHABLE, False
        event: Event | None = None
        if running.takes_effect:
            event = self._effect(running)
        else:
            self._maybe_land_late(running)
        if fails is not None:
            event = self._failed(work, fails)
        assert event is not None
        self._end(running, event)

    def _failed(self, work: WorkId, kind: ErrorKind) -> WorkFailed:
        jitter = self.life.random.random()
        return WorkFailed(at=self.life.now, work=work, kind=kind, message=f"injected {kind}", hint="", jitter=jitter)

    def _maybe_land_late(self, running: _Running) -> None:
        command, random = running.command, self.life.random
        if isinstance(command, Stage | Reconcile | Release | Abandon | Prune):
            return
        if self.life.stormy and random.random() < self.life.scenario.faults.land_late:
            self.life.late_writes[command.work.save] = self.life.late_writes.get(command.work.save, 0) + 1
            self.life.after(random.uniform(0.1, 20.0), self._land, running)

    def _land(self, running: _Running) -> None:
        """A write whose sender is gone or has given it up arrives all the same."""
        command, store = running.command, self.life.store
        self.life.late_writes[command.work.save] -= 1
        match command:
            case CreateUpload():
                store.create_upload(command.key, landed_late=True)
            case Commit():
                if running.body is not None:
                    store.put_marker(command.info, running.body)
            case _:
                self._effect(running)

    # --- what commands do --------------------------------------------------------------------------------------

    def _look(self, running: _Running) -> None:
        """First half of a Commit: list, compare, and make the marker's body."""
        command = running.command
        assert isinstance(command, Commit)
        if self._in_flight.get(command.work) is not running:
            return
        store, info = self.life.store, command.info
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

    def _effect(self, running: _Running) -> Event:
        life, store, now = self.life, self.life.store, self.life.now
        command = running.command
        work = command.work
        content = content_of(work.save, work.path, work.number)
        match command:
            case Stage():
                return self._stage(command)
            case Reconcile():
                return self._reconcile(command)
            case CreateUpload():
                self.checks.sending_file(work)
                return UploadCreated(at=now, work=work, upload=store.create_upload(command.key, landed_late=False))
            case SendPart():
                size_bytes = command.region.size_bytes
                if not store.put_part(command.work.upload, work.number, content, size_bytes):
                    return self._failed(work, ErrorKind.UPLOAD_LOST)
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
                    return self._failed(work, ErrorKind.UPLOAD_LOST)
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
                    life.swept[self.index, work.save] = store.upload_count
                return Abandoned(at=now, work=work)
            case Release():
                for rank in self._pins.pop(work.save, {}):
                    del self._descriptors[work.save, rank]
                return Released(at=now, work=work)
            case Prune():
                raise ViolationError("prune was asked for although everything is to be kept")

    def _stage(self, command: Stage) -> Staged:
        save, rank = command.work.save, command.work.rank
        planned = self._announced[save, rank]
        files = planned.files
        if planned.shared:
            # The directory holds what all ranks of the pod wrote.
            files = tuple(
                file
                for (other, _), announced in sorted(self._announced.items())
                if other == save
                for file in announced.files
            )
        pinned = self._pins.setdefault(save, {})
        if rank not in pinned:
            pinned[rank] = tuple(
                StagedFile(
                    path=file.path,
                    pin=f".mooring/staged/{save}/{file.path}",
                    fingerprint=Fingerprint(
                        size_bytes=file.size_bytes, mtime_ns=1, inode=checksum_of(f"{save}{file.path}")
                    ),
                    private=False,
                )
                for file in files
            )
        self._descriptors[save, rank] = descriptor(replace(command, pack_size_bytes=self.planned.pack_size_bytes))
        return Staged(
            at=self.life.now,
            work=command.work,
            files=pinned[rank],
            part_size_bytes=command.part_size_bytes,
            pack_size_bytes=self.planned.pack_size_bytes,
        )

    def _commit(self, command: Commit, running: _Running) -> Event:
        now, work, lost = self.life.now, command.work, running.lost
        if lost or running.lost_manifest:
            return ObjectsLost(at=now, work=work, files=lost.files if lost else (), packs=lost.packs if lost else ())
        if running.body is None:
            return CommitWaits(at=now, work=work, missing_ranks=running.missing_ranks)
        store = self.life.store
        store.put_marker(command.info, running.body)
        if command.sweep_uploads:
            self._sweep_save(work.save)
        return Committed(at=now, work=work)

    def _sweep_save(self, save: str) -> None:
        """Every rank is sealed, so whatever is open below it is nobody's."""
        uploads = self.life.store.uploads
        self._sweep(frozenset(one.key for one in uploads.values() if f"/{save}/" in one.key), keep=frozenset())
        for index in range(len(self.life.agents)):
            self.life.swept[index, save] = self.life.store.upload_count

    def _reconcile(self, command: Reconcile) -> Reconciled | Committed:
        store = self.life.store
        if marker_key(command.info) in store.objects:
            self._sweep_save(command.work.save)
            return Committed(at=self.life.now, work=command.work)
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
        return Reconciled(at=self.life.now, work=command.work, uploads=tuple(uploads), files=tuple(files))

    def _is_stored(self, command: Reconcile, known: KnownFile, part_count: int) -> bool:
        if file_key(command.info, known.file.path) not in self.life.store.objects:
            return False
        if part_count > 1:
            return len(known.parts) == part_count
        # A single PUT is recognised by its MD5 only where the store tells it.
        return part_count == 0 or self.life.tells_md5

    def _found_upload(self, command: Reconcile, known: KnownFile) -> FoundUpload:
        journaled = {number for number, _, _ in known.parts}
        held = self.life.store.uploads[known.upload].parts
        parts = tuple(
            (number, receipt, checksum_of(content_of(command.info.save, known.file.path, number)))
            for number, (receipt, _) in sorted(held.items())
            if number in journaled or self.life.tells_md5
        )
        return FoundUpload(rank=known.rank, path=known.file.path, upload=known.upload, parts=parts)

    def _sweep(self, keys: frozenset[str], *, keep: frozenset[str]) -> None:
        uploads = self.life.store.uploads
        for token in [found for found, upload in uploads.items() if upload.key in keys and found not in keep]:
            self.life.store.abort_upload(token)

    # --- what is left at the end -------------------------------------------------------------------------------

    def pinned(self) -> Iterable[str]:
        return self._pins

    def acknowledged_ranks(self, save: str) -> set[int]:
        return {planned.rank for planned in self.checks.acked.get(save, {}).values()}

    def durable_view(self, state: State) -> Any:
        """What must be the same after a replay."""
        return dict(state.ranks), {
            save: (
                "open" if not checkpoint.ended else checkpoint.phase,
                checkpoint.sequence,
                checkpoint.reason,
                checkpoint.pins_dropped,
                checkpoint.manifest_stored,
                {
                    rank: (share.staged, share.unstored_count, share.announced.path)
                    for rank, share in checkpoint.contributions.items()
                },
            )
            for save, checkpoint in state.checkpoints.items()
        }
