"""Says what takes the room below a prefix of many runs: run by run, by kind and by age, and how each run stands.

Owns what counts as what; `run_census` finds the runs. Invariants: every listed byte is counted once; what does not
prove to be a part of a run is foreign. The objects of a series of snapshots count as snapshots, committed or not:
later ones may share them, which only their manifests say.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.retention.deletions import is_generated
from keepstep_agent.core.policies.run_census import StoredRun, UnfinishedUpload

_DAY: Final = 24 * 3600.0


class UseKind(StrEnum):
    """What bytes are for. The first three need a marker that was read; `CHECKPOINT` is committed, of unknown kind."""

    PERIODIC = Kind.PERIODIC.value
    JUST_IN_TIME = Kind.JUST_IN_TIME.value
    FINAL = Kind.FINAL.value
    CHECKPOINT = "checkpoint"
    WEIGHTS_ONLY = "weights-only"
    SNAPSHOT = Kind.SNAPSHOT.value
    IN_PROGRESS = "in-progress"
    LEFTOVER = "leftover"
    UPLOAD_IN_PROGRESS = "upload-in-progress"
    ORPHANED_UPLOAD = "orphaned-upload"
    RECORD = "record"
    FOREIGN = "foreign"


COMMITTED_CHECKPOINTS: Final = (
    UseKind.PERIODIC,
    UseKind.JUST_IN_TIME,
    UseKind.FINAL,
    UseKind.CHECKPOINT,
    UseKind.WEIGHTS_ONLY,
)
UPLOADS: Final = (UseKind.UPLOAD_IN_PROGRESS, UseKind.ORPHANED_UPLOAD)
"""Parts of unfinished uploads, which no listing of objects shows."""


class RunState(StrEnum):
    """How a run stands. `QUIET`: as `ABANDONED`, but it has snapshots alone, which never say that a run has ended."""

    ACTIVE = "active"
    COMPLETE = "complete"
    ABANDONED = "abandoned"
    QUIET = "quiet"


class Age(StrEnum):
    """How old bytes are, by when the store got the marker of their save or was last written to."""

    DAY = "1-day"
    WEEK = "7-days"
    MONTH = "30-days"
    QUARTER = "90-days"
    OLDER = "older"


_YOUNGER_THAN: Final = {Age.DAY: _DAY, Age.WEEK: 7 * _DAY, Age.MONTH: 30 * _DAY, Age.QUARTER: 90 * _DAY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How many saves, uploads or, for records and what is foreign, objects; and their bytes."""

    count: int = 0
    size_bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(count=self.count + other.count, size_bytes=self.size_bytes + other.size_bytes)


@dataclass(slots=True, kw_only=True)
class Usage:
    """Bytes by kind and by age. Grows while it is counted."""

    kinds: dict[UseKind, Amount] = field(default_factory=lambda: defaultdict(Amount))
    ages: dict[Age, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def size_bytes(self) -> int:
        return sum(amount.size_bytes for amount in self.kinds.values())

    def amount_of(self, kinds: Iterable[UseKind]) -> Amount:
        return sum((self.kinds.get(kind, Amount()) for kind in kinds), Amount())

    def add(self, kind: UseKind, size_bytes: int, age_seconds: float, *, count: int = 1) -> None:
        self.kinds[kind] += Amount(count=count, size_bytes=size_bytes)
        age = next((age for age, most in _YOUNGER_THAN.items() if age_seconds < most), Age.OLDER)
        self.ages[age] += size_bytes

    def merge(self, other: "Usage") -> None:
        for kind, amount in other.kinds.items():
            self.kinds[kind] += amount
        for age, size_bytes in other.ages.items():
            self.ages[age] += size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeLimits:
    """When it is, in unix seconds, and from which age on something counts as given up."""

    now: float
    abandoned_after_seconds: float
    orphan_age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUse:
    """One run. `step` and `committed_at` are of the newest checkpoint and the last commit; None if there is none."""

    prefix: str
    state: RunState
    step: int | None
    committed_at: float | None
    usage: Usage


def use_of(run: StoredRun, kinds: Mapping[str, Kind], limits: AgeLimits, *, every_kind: bool) -> RunUse:
    """Judge one run. `kinds` are those of the markers that were read, by the markers' keys in the run.

    Without `every_kind` these are those of the newest alone, which say how the run stands; all count as `CHECKPOINT`.
    """
    # The marker of a save of which only the weights are left was written long after its commit.
    whole = [one for one in run.committed if not one.weights_only]
    # In a copied bucket only what a marker says is a time of a commit.
    committed_at = max((one.committed_at for one in [one for one in whole if one.saved_at] or whole), default=None)
    return RunUse(
        prefix=run.prefix,
        state=_state(run, kinds, committed_at, limits),
        step=run.newest[0].step if run.newest else None,
        committed_at=committed_at,
        usage=usage_of(run, kinds if every_kind else {}, limits),
    )


def _state(run: StoredRun, kinds: Mapping[str, Kind], committed_at: float | None, limits: AgeLimits) -> RunState:
    if any(kinds.get(one.key) is Kind.FINAL for one in run.newest):
        return RunState.COMPLETE
    seen = [folder.modified_at for folder in (*run.saves.values(), run.records, *run.aside)]
    seen += [upload.started_at for upload in run.uploads]
    last_at = max(seen, default=0.0) if committed_at is None else committed_at
    if last_at >= limits.now - limits.abandoned_after_seconds:
        return RunState.ACTIVE
    return RunState.ABANDONED if run.newest or not run.committed else RunState.QUIET


def usage_of(run: StoredRun, kinds: Mapping[str, Kind], limits: AgeLimits) -> Usage:
    """Return what a run takes, or what lies in none, by kind and by age."""
    usage = Usage()
    # Where both markers are there, because a prune was interrupted, the save is committed.
    announced = {one.save: one for one in sorted(run.committed, key=_is_whole) if not one.series}
    series = {one.series for one in run.committed if one.series}
    for (name, save), folder in run.saves.items():
        marker = announced.get(save)
        age_seconds = limits.now - (marker.modified_at if marker else folder.modified_at)
        if marker:
            # Its checkpoint is counted below, by its marker.
            usage.add(_kind_of(marker, kinds), folder.size_bytes, age_seconds, count=0)
        elif name in series:
            usage.add(UseKind.SNAPSHOT, folder.size_bytes, age_seconds, count=0)
        elif (name, save) not in run.proven and not is_generated(save):
            usage.add(UseKind.FOREIGN, folder.size_bytes, age_seconds, count=folder.objects)
        else:
            old = age_seconds > limits.orphan_age_seconds
            usage.add(UseKind.LEFTOVER if old else UseKind.IN_PROGRESS, folder.size_bytes, age_seconds)
    for one in (*announced.values(), *(one for one in run.committed if one.series)):
        usage.add(UseKind.SNAPSHOT if one.series else _kind_of(one, kinds), 0, 0.0)
    for kind, folder in ((UseKind.RECORD, run.records), (UseKind.FOREIGN, run.foreign)):
        if folder.objects:
            usage.add(kind, folder.size_bytes, limits.now - folder.modified_at, count=folder.objects)
    aside = [
        UnfinishedUpload(key=run.prefix, started_at=folder.modified_at, size_bytes=folder.size_bytes)
        for folder in run.aside
    ]
    for upload in (*run.uploads, *aside):
        age_seconds = limits.now - upload.started_at
        old = age_seconds > limits.orphan_age_seconds
        usage.add(UseKind.ORPHANED_UPLOAD if old else UseKind.UPLOAD_IN_PROGRESS, upload.size_bytes, age_seconds)
    return usage


def _is_whole(committed: CommittedSave) -> bool:
    return not committed.weights_only


def _kind_of(committed: CommittedSave, kinds: Mapping[str, Kind]) -> UseKind:
    if committed.weights_only:
        return UseKind.WEIGHTS_ONLY
    kind = kinds.get(committed.key)
    return UseKind(kind.value) if kind else UseKind.CHECKPOINT
