"""Plays events to the reducer as a world in which everything works, so that a test says only what is special in it."""

from collections.abc import Callable
from zlib import crc32

from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.announcements import check_announcement
from keepstep_agent.core.agent.commands import (
    Abandon,
    Ask,
    CancelWork,
    CheckSent,
    Command,
    Commit,
    CompleteUpload,
    CreateUpload,
    Exit,
    PutFile,
    PutPack,
    Recall,
    Reconcile,
    Release,
    SendPart,
    Stage,
    WriteManifest,
)
from keepstep_agent.core.agent.events import (
    Abandoned,
    Announced,
    Answered,
    Committed,
    DurableEvent,
    Event,
    FileStored,
    ManifestStored,
    PackStored,
    PartStored,
    Recalled,
    Reconciled,
    Released,
    SentChecked,
    Staged,
    Started,
    Ticked,
    UploadCreated,
    WorkCancelled,
    WorkFailed,
)
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.file_lists import SnapshotContent, staged_files
from keepstep_agent.core.model import (
    FileEntry,
    Fingerprint,
    Kind,
    Phase,
    PinMethod,
    SaveInfo,
    SourceFile,
    StagedFile,
)
from keepstep_agent.core.settings.values import DiskSettings, Settings, StoreSettings, TransferSettings
from keepstep_agent.core.stored.packs_and_parts import MIN_PART_BYTES

PART_BYTES = MIN_PART_BYTES


def settings(*, max_concurrency: int = 2) -> Settings:
    return Settings(
        volume="/volume",
        checkpoint_directory="/volume/checkpoints",
        socket="/volume/agent.sock",
        store=StoreSettings(destination="file:///bucket"),
        transfer=TransferSettings(part_size_bytes=PART_BYTES, max_concurrency=max_concurrency),
        disk=DiskSettings(eviction_threshold_percent=0.0),
    )


def staged_file(path: str, size_bytes: int, *, inode: int = 1, mtime_ns: int = 1) -> StagedFile:
    fingerprint = Fingerprint(size_bytes=size_bytes, mtime_ns=mtime_ns, inode=inode)
    return StagedFile(path=path, pin=f".keepstep/staged/{path}", fingerprint=fingerprint, private=False)


def files_of(command: Stage) -> tuple[str, ...]:
    """What is pinned by it: a directory that ranks share holds one file."""
    if command.announcements[0].snapshot:
        return tuple(file.path for file in command.announcements[0].snapshot.files)
    return command.announcements[0].files or ("shared",)


class Play:
    """`in_flight` are the commands that nobody has answered yet, `journal` what was made durable.

    `steps`, `sources`, `recorded_at`: of a save; else they are counted, or none. `sizes`: of what a save and a rank of
    it pin. `unread`: what the journal has of a save that is set aside.
    """

    def __init__(self, *, max_concurrency: int = 2) -> None:
        self.state = State(settings=settings(max_concurrency=max_concurrency))
        self.now = 100.0
        self.journal: list[DurableEvent] = []
        self.in_flight: dict[WorkId, Command] = {}
        self.exit: Exit | None = None
        self.sizes: dict[tuple[str, int], tuple[int, ...]] = {}
        self.steps: dict[str, int] = {}
        self.sources: dict[str, str] = {}
        self.directories: dict[str, str] = {}
        self.recorded_at: dict[str, float] = {}
        self.unread: dict[str, tuple[DurableEvent, ...]] = {}
        self.feed(Started(at=self.now, fresh=True))

    def feed(self, event: Event) -> tuple[Command, ...]:
        """The commands that follow; they are in flight from now on."""
        ready = advance(self.state, event)
        self.journal += ready.durable
        for command in ready.commands:
            if isinstance(command, Exit):
                self.exit = command
            elif hasattr(command, "work") and not isinstance(command, CancelWork):
                assert command.work not in self.in_flight
                self.in_flight[command.work] = command
        return ready.commands

    def announce(
        self,
        save: str,
        sizes: tuple[int, ...] = (PART_BYTES,),
        *,
        kind: Kind = Kind.PERIODIC,
        rank: int = 0,
        world_size: int = 1,
        local_world_size: int = 1,
        stall_seconds: float = 0.0,
    ) -> tuple[Command, ...]:
        """A rank announces files of these sizes, and they are staged at once: shared ones after the last rank's."""
        self.announce_only(
            save,
            sizes,
            kind=kind,
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            stall_seconds=stall_seconds,
        )
        shared = [work for work in self.in_flight if work.save == save and work.operation is Operation.STAGE]
        if local_world_size > 1:
            return self.answer(shared[0]) if shared else ()
        return self.answer(WorkId(Operation.STAGE, save, rank))

    def announce_only(
        self,
        save: str,
        sizes: tuple[int, ...] = (PART_BYTES,),
        *,
        kind: Kind = Kind.PERIODIC,
        rank: int = 0,
        world_size: int = 1,
        local_world_size: int = 1,
        stall_seconds: float = 0.0,
    ) -> None:
        """The announcement alone: its files are being staged. Several local ranks share a directory and its files."""
        step = self.steps.setdefault(save, len(self.steps) + 1)
        self.sizes[save, rank] = sizes
        prefix = "shared" if local_world_size > 1 else f"r{rank}"
        files = tuple(f"{prefix}-{index}" for index in range(len(sizes)))
        info = SaveInfo(
            save=save,
            name=f"checkpoint-{step}",
            step=step,
            kind=kind,
            world_size=world_size,
            directory=self.directories.get(save, ""),
        )
        self.feed(
            Announced(
                at=self.now,
                info=info,
                rank=rank,
                path=self.sources.get(save, f"/volume/checkpoints/checkpoint-{step}"),
                files=files or ("none",),
                local_world_size=local_world_size,
                begun_at=self.state.save_requests.begun_at.get(save),
                stall_seconds=stall_seconds,
                recorded_at=self.recorded_at.get(save),
            )
        )

    def take_snapshot(
        self,
        save: str,
        sizes: tuple[int, ...] = (PART_BYTES,),
        *,
        kept: tuple[FileEntry, ...] = (),
        instead: tuple[FileEntry, ...] = (),
        pinned: int | None = None,
    ) -> tuple[Command, ...]:
        """A snapshot that sends files of these sizes is announced, and the first `pinned` are staged at once."""
        number = self.steps.setdefault(save, len(self.steps) + 1)
        self.sizes[save, 0] = sizes[:pinned]
        files = tuple(
            SourceFile(
                path=f"out/{save}-{index}",
                fingerprint=Fingerprint(size_bytes=size, mtime_ns=number, inode=index),
                method=PinMethod.LINK,
            )
            for index, size in enumerate(sizes)
        )
        info = SaveInfo(save=save, name="node-0", step=number, kind=Kind.SNAPSHOT, world_size=1)
        content = SnapshotContent(base=None, kept=kept, files=files, instead=instead)
        event = Announced(
            at=self.now, info=info, rank=0, path="/volume/out", files=(), local_world_size=1, snapshot=content
        )
        check_announcement(self.state, event)
        self.feed(event)
        return self.answer(WorkId(Operation.STAGE, save, 0))

    def tick(self) -> tuple[Command, ...]:
        return self.feed(Ticked(at=self.now))

    def wait_until(self, holds: Callable[[], bool], *, limit: int = 100) -> None:
        """Time passes, from one moment at which the core wants to be woken to the next."""
        for _ in range(limit):
            if holds():
                return
            wake_at = planner.next_wake(self.state)
            assert wake_at is not None, "nobody would wake it"
            self.now = wake_at
            self.tick()
        raise AssertionError("it never comes")

    def answer(self, work: WorkId) -> tuple[Command, ...]:
        """The command succeeds."""
        return self.feed(self._success(self.in_flight.pop(work)))

    def fail(self, work: WorkId, kind: ErrorKind = ErrorKind.TIMED_OUT) -> tuple[Command, ...]:
        del self.in_flight[work]
        return self.feed(WorkFailed(at=self.now, work=work, kind=kind, message=f"{kind}", hint="", jitter=0.0))

    def cancel(self, work: WorkId) -> tuple[Command, ...]:
        del self.in_flight[work]
        return self.feed(WorkCancelled(at=self.now, work=work))

    def finish(self, save: str | None = None, *, seconds_each: float = 0.0, limit: int = 1_000) -> None:
        """Answer everything (of one save) until nothing is asked any more."""
        for _ in range(limit):
            waiting = [work for work in self.in_flight if save is None or work.save == save]
            if not waiting:
                return
            self.now += seconds_each
            self.answer(waiting[0])
        raise AssertionError("it never ends")

    def transfers(self) -> list[str]:
        """Saves that have the wire, one entry per transfer."""
        sending = (SendPart, PutFile, PutPack, CreateUpload, CompleteUpload)
        return [work.save for work, command in self.in_flight.items() if isinstance(command, sending)]

    def phase(self, save: str) -> Phase:
        return self.state.checkpoints[save].phase

    def _success(self, command: Command) -> Event:
        at = self.now
        match command:
            case Stage():
                sizes = self.sizes[command.work.save, command.work.rank]
                files = staged_files(
                    staged_file(path, size, inode=crc32(f"{command.work.save}/{path}".encode()))
                    for path, size in zip(files_of(command), sizes, strict=False)
                )
                return Staged(
                    at=at,
                    work=command.work,
                    files=files,
                    part_size_bytes=command.part_size_bytes,
                    pack_size_bytes=command.pack_size_bytes,
                )
            case Reconcile():
                return Reconciled(at=at, work=command.work, uploads=(), files=())
            case CreateUpload():
                return UploadCreated(at=at, work=command.work, upload=f"upload of {command.key}")
            case SendPart():
                return PartStored(
                    at=at, work=command.work, receipt="receipt", checksum=7, size_bytes=command.region.size_bytes
                )
            case PutFile():
                size_bytes = command.region.size_bytes
                return FileStored(at=at, work=command.work, checksum=7 if size_bytes else None, size_bytes=size_bytes)
            case PutPack():
                packed = command.pack.files
                size_bytes = sum(file.size_bytes for file in packed)
                return PackStored(at=at, work=command.work, checksums=tuple(range(len(packed))), size_bytes=size_bytes)
            case CompleteUpload():
                return FileStored(at=at, work=command.work, checksum=None, size_bytes=0)
            case CheckSent():
                return SentChecked(at=at, work=command.work)
            case WriteManifest():
                return ManifestStored(at=at, work=command.work)
            case Commit():
                return Committed(at=at, work=command.work)
            case Abandon():
                return Abandoned(at=at, work=command.work)
            case Release():
                return Released(at=at, work=command.work)
            case Ask():
                return Answered(at=at, work=command.work)
            case Recall():
                return Recalled(at=at, work=command.work, events=self.unread[command.work.save])
            case _:
                raise AssertionError(command)
