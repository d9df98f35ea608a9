"""One checkpoint as this agent knows it: its phase, the files of each local rank, and how far each file has come."""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from operator import attrgetter
from typing import Final

from keepstep_agent.core.agent import lifecycle
from keepstep_agent.core.agent.events import Announced
from keepstep_agent.core.agent.lifecycle import Trigger
from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.file_lists import FileEntries, StagedFiles, by_path, staged_files
from keepstep_agent.core.model import (
    AnnouncementTime,
    FileEntry,
    Kind,
    PackPlace,
    Part,
    Phase,
    RankManifest,
    SaveInfo,
    SnapshotId,
    StagedFile,
)
from keepstep_agent.core.stored.packs_and_parts import Pack, part_size_for, plan, plan_packs

_NOT_PACKED: Final = -1

_STAGES: Final = {
    **{Phase.ANNOUNCED: 0, Phase.STAGED: 1, Phase.UPLOADING: 1, Phase.SEALED: 2},
    **dict.fromkeys(lifecycle.ENDED_PHASES, 3),
}


@dataclass(slots=True)
class MultipartProgress:
    """How far the parts of one large file have come. `parts` is the plan."""

    parts: tuple[Part, ...]
    upload: str = ""
    receipts: dict[int, str] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget what is stored: the file begins anew."""
        self.upload = ""
        self.receipts, self.checksums = {}, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProgress:
    """How far one file of a rank has come. It is sent in parts, or with a pack, or else by a single PUT.

    `multipart`: None unless it is sent in parts. `place`: None unless it is packed.
    """

    file: StagedFile
    part_size_bytes: int
    multipart: MultipartProgress | None
    place: PackPlace | None
    stored: bool
    # Of a stored file that is not sent in parts; an empty file has none.
    checksum: int

    @property
    def upload(self) -> str:
        """The multipart upload that was begun; empty if there is none."""
        return self.multipart.upload if self.multipart else ""

    @property
    def durable_bytes(self) -> int:
        if self.stored:
            return self.file.size_bytes
        if self.multipart is None:
            return 0
        return sum(self.multipart.parts[number - 1].size_bytes for number in self.multipart.receipts)

    def entry(self) -> FileEntry:
        checksums: Iterable[int] = (self.checksum,) if self.file.size_bytes else ()
        if self.multipart is not None:
            checksums = (self.multipart.checksums[part.number] for part in self.multipart.parts)
        return FileEntry(
            path=self.file.path,
            size_bytes=self.file.size_bytes,
            part_size_bytes=self.part_size_bytes,
            checksums=array("Q", checksums),
            place=self.place,
        )


@dataclass(slots=True)
class PackProgress:
    """Whether a pack is stored: with all its files or not at all."""

    pack: Pack
    stored: bool = False


class RankFiles:
    """The files that one rank contributes, with their packs and parts, and how far each has come.

    Most files are stored whole or not at all, so of each of them it keeps a byte and a checksum. Iterating gives
    the files in the order of their paths.
    """

    def __init__(self, pinned: StagedFiles, *, part_size_bytes: int, pack_size_bytes: int) -> None:
        """`part_size_bytes` and `pack_size_bytes` are as in `events.Staged`."""
        self.pinned = pinned
        self.packs = [PackProgress(pack) for pack in plan_packs(pinned, pack_size_bytes)]
        self.unstored_count = len(pinned)
        self._part_size_bytes = part_size_bytes
        self._pack_numbers = array("i", [_NOT_PACKED]) * len(pinned)
        self._offsets_bytes = array("Q", [0]) * len(pinned)
        for progress in self.packs:
            pack = progress.pack
            for position, offset_bytes in zip(pack.files.positions, pack.offsets_bytes, strict=True):
                self._pack_numbers[position], self._offsets_bytes[position] = pack.number, offset_bytes
        self._stored = bytearray(len(pinned))
        self._checksums = array("Q", [0]) * len(pinned)
        self._multipart = {
            position: MultipartProgress(parts=plan(size_bytes, part_size))
            for position, size_bytes in enumerate(pinned.sizes_bytes)
            if size_bytes > (part_size := part_size_for(size_bytes, part_size_bytes))
        }

    def __len__(self) -> int:
        return len(self.pinned)

    def __iter__(self) -> Iterator[FileProgress]:
        return map(self._progress, range(len(self.pinned)))

    def __contains__(self, path: str) -> bool:
        return self.pinned.position(path) is not None

    def __getitem__(self, path: str) -> FileProgress:
        return self._progress(self._position(path))

    def sent_alone(self) -> Iterator[FileProgress]:
        """Yield the files that are not sent with a pack."""
        numbers = enumerate(self._pack_numbers)
        return (self._progress(position) for position, number in numbers if number == _NOT_PACKED)

    def sent_in_parts(self) -> Iterator[FileProgress]:
        return map(self._progress, self._multipart)

    def store(self, path: str, checksum: int | None) -> int:
        """Mark a file as stored, and return how many bytes this adds to those that are.

        `checksum` is None if its parts' checksums are known, or it is empty.
        """
        return self._store(self._position(path), checksum)

    def store_pack(self, number: int, checksums: Sequence[int]) -> int:
        """Mark a pack and its files as stored, and return how many bytes this adds to those that are."""
        progress = self.packs[number]
        progress.stored = True
        stored = zip(progress.pack.files.positions, checksums, strict=True)
        return sum(self._store(position, checksum) for position, checksum in stored)

    def lose(self, path: str) -> int:
        """Mark a file as not stored, neither whole nor in part. Return how many bytes are stored no more."""
        return self._lose(self._position(path))

    def lose_pack(self, number: int) -> int:
        """Mark a pack and its files as not stored. Return how many bytes are stored no more."""
        progress = self.packs[number]
        progress.stored = False
        return sum(map(self._lose, progress.pack.files.positions))

    def is_stored(self, position: int) -> bool:
        """Whether the file at that position of `pinned` is stored."""
        return bool(self._stored[position])

    def _store(self, position: int, checksum: int | None) -> int:
        progress = self._progress(position)
        if progress.stored:
            return 0
        self._stored[position] = True
        self._checksums[position] = checksum or 0
        self.unstored_count -= 1
        return progress.file.size_bytes - progress.durable_bytes

    def _lose(self, position: int) -> int:
        progress = self._progress(position)
        lost_bytes = progress.durable_bytes
        self.unstored_count += progress.stored
        self._stored[position] = False
        if progress.multipart is not None:
            progress.multipart.forget()
        return lost_bytes

    def _position(self, path: str) -> int:
        position = self.pinned.position(path)
        if position is None:
            raise KeyError(path)
        return position

    def _progress(self, position: int) -> FileProgress:
        number = self._pack_numbers[position]
        size_bytes = self.pinned.sizes_bytes[position]
        return FileProgress(
            file=self.pinned[position],
            part_size_bytes=part_size_for(size_bytes, self._part_size_bytes),
            multipart=self._multipart.get(position),
            place=None
            if number == _NOT_PACKED
            else PackPlace(number=number, offset_bytes=self._offsets_bytes[position]),
            stored=bool(self._stored[position]),
            checksum=self._checksums[position],
        )


@dataclass(slots=True)
class RankContribution:
    """What one local rank contributes to a save, as it announced it. Its `local_world_size` is at least 1."""

    announced: Announced
    staged: bool = False
    files: RankFiles = field(default_factory=lambda: RankFiles(staged_files(()), part_size_bytes=0, pack_size_bytes=0))
    # What was sent was compared with the pins. Not journaled: after a restart it is compared again.
    checked: bool = False
    # Once the pins are dropped: the inodes that they shared with the trainer's files.
    released_inodes: Sequence[int] = ()

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

    def linked_inodes(self) -> frozenset[int]:
        """Return the inodes that its pins share with the trainer's files, or shared before they were dropped."""
        return frozenset(self.files.pinned.linked_inodes()) or frozenset(self.released_inodes)

    def forget_files(self) -> None:
        """Forget all of its files but their inodes: of 100,000 files the rest takes 16 MiB."""
        self.released_inodes = array("Q", self.files.pinned.linked_inodes())
        self.files = RankFiles(staged_files(()), part_size_bytes=0, pack_size_bytes=0)
        snapshot = self.announced.snapshot
        if snapshot is not None:
            snapshot = replace(snapshot, kept=(), files=(), instead=())
        self.announced = replace(self.announced, files=(), others=(), snapshot=snapshot)

    def entries(self) -> FileEntries:
        """Return the manifest's entries, by path: the files that were sent, and those that a snapshot keeps."""
        snapshot = self.announced.snapshot
        if snapshot is None:
            return FileEntries(progress.entry() for progress in self.files)
        modified = {source.path: source.fingerprint.mtime_ns for source in snapshot.files}
        sent = (replace(progress.entry(), modified_ns=modified[progress.file.path]) for progress in self.files)
        # A file may have been written to or deleted before it was pinned.
        instead = by_path(snapshot.instead) if len(self.files) < len(snapshot.files) else ()
        instead_of_missing = (entry for entry in instead if entry.path not in self.files)
        return FileEntries(merge(by_path(snapshot.kept), instead_of_missing, sent, key=attrgetter("path")))


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Why a checkpoint is tried last: a piece of its work does not succeed, for a reason that is not an outage."""

    at: float  # unix seconds
    work: WorkId  # the checkpoint is taken up again when this succeeds
    path: str  # the file in the checkpoint that cannot be read or stored; empty if it is no single file
    reason: str  # for people, with what they can do


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
    # Work that failed while most other work succeeded: `State.answers` when it failed last, and how often it did.
    failed_alone: dict[WorkId, tuple[int, int]] = field(default_factory=dict)
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
    # Of a snapshot: the mirror does not ask for its files any more. Not journaled: after a restart it asks again.
    mirror_noted: bool = False
    uploads_aborted: bool = False
    error_kind: ErrorKind | None = None
    reason: str = ""
    hint: str = ""
    # Its work begins later: the agent died of it, perhaps, and something else is left to do.
    held_back: bool = False
    set_aside: SetAside | None = None
    # The smallest `left` so far; None: something new was announced or has to be sent since.
    least_left: tuple[int, int] | None = None

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
            and not self.held_back
            and any(contribution.files.unstored_count for contribution in self.contributions.values())
        )

    @property
    def urgency(self) -> tuple[bool, bool, int]:
        """Sort key; the more important is higher: those set aside last, just-in-time saves first, then the newer."""
        return self.set_aside is None, self.info.kind is Kind.JUST_IN_TIME, self.sequence

    @property
    def problem(self) -> str:
        """Why it was given up or set aside, for people; empty if it was not."""
        return self.reason or (self.set_aside.reason if self.set_aside else "")

    @property
    def left(self) -> tuple[int, int]:
        """What is left to do. Work that gets the checkpoint further makes it smaller."""
        return -_STAGES[self.phase], self.remaining_bytes

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

    def forget_files(self) -> None:
        """Forget what the ranks of a released checkpoint consisted of. Nothing asks for it any more."""
        for contribution in self.contributions.values():
            contribution.forget_files()

    def manifests(self) -> tuple[RankManifest, ...]:
        """Return the parts of the manifest, by rank."""
        return tuple(self.manifest(rank) for rank in sorted(self.contributions))

    def manifest(self, rank: int) -> RankManifest:
        contribution = self.contributions[rank]
        return RankManifest(
            info=self.info,
            rank=rank,
            saved_at=contribution.announced.at,
            files=contribution.entries(),
            single_file=bool(contribution.files.pinned.announced),
            pack_sizes_bytes=tuple(progress.pack.size_bytes for progress in contribution.files.packs),
        )
