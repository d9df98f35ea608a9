"""One checkpoint as this agent knows it: its phase, the files of each local rank, and how far each file has come."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from keepstep_agent.core.agent import lifecycle
from keepstep_agent.core.agent.events import Announced
from keepstep_agent.core.agent.lifecycle import Trigger
from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import (
    AnnouncementTime,
    FileEntry,
    Kind,
    Pack,
    PackPlace,
    Part,
    Phase,
    RankManifest,
    SaveInfo,
    SnapshotId,
    StagedFile,
)


@dataclass(slots=True)
class FileProgress:
    """How far one file has come. `parts` is the plan; a file with at most one part is sent whole."""

    file: StagedFile
    part_size_bytes: int
    parts: tuple[Part, ...]
    upload: str = ""
    receipts: dict[int, str] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    stored: bool = False
    # Set for a packed file, which is sent with its pack.
    place: PackPlace | None = None

    @property
    def whole(self) -> bool:
        """Whether the file is sent by a single PUT."""
        return len(self.parts) <= 1

    @property
    def durable_bytes(self) -> int:
        if self.stored:
            return self.file.size_bytes
        return sum(self.parts[number - 1].size_bytes for number in self.receipts)

    def entry(self) -> FileEntry:
        return FileEntry(
            path=self.file.path,
            size_bytes=self.file.size_bytes,
            part_size_bytes=self.part_size_bytes,
            checksums=tuple(self.checksums[part.number] for part in self.parts),
            place=self.place,
        )


@dataclass(slots=True)
class PackProgress:
    """Whether a pack is stored: with all its files or not at all."""

    pack: Pack
    stored: bool = False


@dataclass(slots=True)
class RankContribution:
    """What one local rank contributes to a save, as it announced it. Its `local_world_size` is at least 1."""

    announced: Announced
    staged: bool = False
    files: dict[str, FileProgress] = field(default_factory=dict)
    packs: list[PackProgress] = field(default_factory=list)
    unstored_count: int = 0
    # What was sent was compared with the pins. Not journaled: after a restart it is compared again.
    checked: bool = False

    @property
    def announcement_time(self) -> AnnouncementTime:
        return AnnouncementTime(at=self.announced.at, recorded_at=self.announced.recorded_at)

    @property
    def rank(self) -> int:
        return self.announced.rank

    @property
    def shares_directory(self) -> bool:
        """Whether several ranks announce its directory, so that the first one contributes the files for all."""
        return self.announced.local_world_size > 1

    def entries(self) -> Iterator[FileEntry]:
        """Yield the entries of the manifest: of the files that were sent, and of those that a snapshot keeps."""
        snapshot = self.announced.snapshot
        if snapshot is None:
            yield from (progress.entry() for progress in self.files.values())
            return
        yield from snapshot.kept
        for source in snapshot.files:
            if source.path in self.files:
                yield replace(self.files[source.path].entry(), modified_ns=source.fingerprint.mtime_ns)
        if len(self.files) < len(snapshot.files):
            # A file was written to or deleted before it was pinned.
            yield from (entry for entry in snapshot.instead if entry.path not in self.files)

    def linked_files(self) -> Iterator[FileProgress]:
        """Return the files that share their inode with the trainer's."""
        return (progress for progress in self.files.values() if not progress.file.private)


@dataclass(slots=True)
class Checkpoint:
    """One save of one checkpoint as this agent knows it. `sequence` is the order of announcement: newest is highest."""

    info: SaveInfo
    sequence: int
    announced_at: float
    phase: Phase = Phase.ANNOUNCED
    contributions: dict[int, RankContribution] = field(default_factory=dict)
    size_bytes: int = 0
    durable_bytes: int = 0
    file_count: int = 0
    # Transfers that are ready, and work that waits for its retry (work -> unix seconds).
    pending: deque[WorkId] = field(default_factory=deque)
    delayed: dict[WorkId, float] = field(default_factory=dict)
    attempts: dict[WorkId, int] = field(default_factory=dict)
    # False after a restart until the store has been asked what it really has.
    reconciled: bool = True
    # A multipart upload may exist that we do not know of.
    may_have_orphans: bool = False
    # The manifest of all ranks that have announced here is durable.
    manifest_stored: bool = False
    # When it became so, and when this agent lists the save next if another one is to commit it (unix seconds).
    sealed_at: float = 0.0
    lists_at: float = 0.0
    # The last listing had every rank.
    all_listed: bool = False
    # Our ranks are sealed, and other agents have to seal theirs or to write the marker.
    waits_for_others: bool = False
    committed_at: float = 0.0
    pins_dropped: bool = False
    uploads_aborted: bool = False
    error_kind: ErrorKind | None = None
    reason: str = ""
    hint: str = ""

    def move(self, trigger: Trigger) -> None:
        self.phase = lifecycle.advance(self.phase, trigger)

    @property
    def snapshot_id(self) -> SnapshotId:
        """Of a snapshot: its series and its number there."""
        assert self.info.is_snapshot, self.info
        return SnapshotId(series=self.info.name, number=self.info.step, save=self.info.save)

    @property
    def taken_at(self) -> float:
        """When the state in it was that of the training, in unix seconds: when the save began, as far as known."""
        begun = [one.announced.begun_at for one in self.contributions.values() if one.announced.begun_at is not None]
        return min([self.announced_at, *begun])

    @property
    def recorded_at(self) -> float | None:
        """When the trainer's record of it was written, in unix seconds, if the agent has found it by that."""
        times = [one.announced.recorded_at for one in self.contributions.values()]
        return min((at for at in times if at is not None), default=None)

    @property
    def stall_seconds(self) -> float:
        """How long training stood still for it, on the rank where that took longest; 0: not known."""
        return max((one.announced.stall_seconds for one in self.contributions.values()), default=0.0)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to upload or commit."""
        return self.phase in lifecycle.ENDED_PHASES

    @property
    def durable(self) -> bool:
        return self.phase in lifecycle.DURABLE_PHASES

    @property
    def begins_anew(self) -> bool:
        """Whether it failed before anything of it was pinned, so that another announcement is a new try."""
        return self.phase is Phase.FAILED and not self.any_staged

    @property
    def any_staged(self) -> bool:
        return any(contribution.staged for contribution in self.contributions.values())

    @property
    def settled(self) -> bool:
        """Whether it has ended and nothing of it is left to clean up, here or in the store."""
        return self.ended and self.pins_dropped and (self.durable or self.uploads_aborted)

    @property
    def returns_room(self) -> bool:
        """Whether its pins are about to be dropped, with nothing to wait for."""
        return self.phase in (Phase.SHED, Phase.COMMITTED) and not self.pins_dropped

    @property
    def sends(self) -> bool:
        """Whether it has files to send and may send them."""
        return (
            self.phase in (Phase.STAGED, Phase.UPLOADING)
            and self.reconciled
            and any(contribution.unstored_count for contribution in self.contributions.values())
        )

    @property
    def urgency(self) -> tuple[bool, int]:
        """Sort key; the more important is higher: just-in-time saves above all, then the newer."""
        return self.info.kind is Kind.JUST_IN_TIME, self.sequence

    @property
    def remaining_bytes(self) -> int:
        return self.size_bytes - self.durable_bytes

    @property
    def expected_local_ranks(self) -> int:
        """How many ranks will announce this save here, as far as the announcements say."""
        expected = [contribution.announced.local_world_size for contribution in self.contributions.values()]
        return max([len(expected), *expected])

    @property
    def all_announced(self) -> bool:
        return len(self.contributions) >= self.expected_local_ranks

    def manifests(self) -> tuple[RankManifest, ...]:
        """Return the parts of the manifest, by rank."""
        return tuple(self.manifest(rank) for rank in sorted(self.contributions))

    def manifest(self, rank: int) -> RankManifest:
        contribution = self.contributions[rank]
        return RankManifest(
            info=self.info,
            rank=rank,
            saved_at=contribution.announced.at,
            files=tuple(sorted(contribution.entries(), key=lambda entry: entry.path)),
            single_file=any(progress.file.announced for progress in contribution.files.values()),
            pack_sizes_bytes=tuple(progress.pack.size_bytes for progress in contribution.packs),
        )
