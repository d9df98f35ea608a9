"""Decides what may be deleted from a destination. The last good checkpoint always stays.

Owns the verdict over a listing, whole or down to a horizon; deletes nothing itself. Announced checkpoints are one
series, and the snapshots of each node another. Invariants:

- A committed save is deleted only if `keep_last` newer saves of its series justify it, each of them validated and none
  skipped. So of each series the newest by step, the one committed last and the only valid one always stay.
- Its marker is deleted before its data, so no reader sees a marker whose data is being deleted.
- Of a snapshot only those objects are deleted that no remaining snapshot names (docs/design/0014).
- Objects that do not prove to be a save of Mooring are left alone.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mooring_agent.core.policies.restore_choice import CommittedSave, newest_first, run_of
from mooring_agent.core.settings.values import RetentionSettings
from mooring_agent.core.stored.object_layout import is_manifest, reserving_save

# The save ids that client and agent generate when nobody chose the attempt: `<attempt>-<counter or nonce>`. A folder
# with another name and without a manifest may be anybody's.
_GENERATED_SAVE: Final = re.compile(r"[0-9a-f]{8}[0-9a-f-]*-(?:[0-9a-f]{8}|c?\d{6,})")

_RECENT: Final = 500
"""The least announced checkpoints above a horizon. They fill half of what a store lists at a time, so as many may come
before a second request is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSave:
    """The objects below one `<name>/<save>/`, by key. `modified_at` is that of the youngest, by the store's clock."""

    name: str
    save: str
    sizes_bytes: Mapping[str, int]
    modified_at: float

    @property
    def shows_save(self) -> bool:
        """Whether the objects prove to be a save of Mooring."""
        return bool(_GENERATED_SAVE.fullmatch(self.save)) or any(
            is_manifest(key) or reserving_save(key) for key in self.sizes_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """One save to delete. `waves` are deleted one after the other: the marker, the files, the manifests.

    `name` and `save` are the folder of its objects, of which the youngest was written at `modified_at`. `may_share`:
    snapshots may name some of them, so `without_named` has to say which may go.
    """

    name: str
    save: str
    waves: tuple[tuple[str, ...], ...]
    size_bytes: int
    modified_at: float
    committed: bool
    reason: str
    may_share: bool

    @property
    def markers(self) -> tuple[str, ...]:
        return self.waves[0] if self.committed else ()

    @property
    def data(self) -> tuple[tuple[str, ...], ...]:
        """The waves after the marker's."""
        return self.waves[1:] if self.committed else self.waves


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What to delete, or why nothing may be deleted. `kept` has the id of every other save and why it stays."""

    deletions: tuple[Deletion, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    refused: str = ""

    def withhold(self, why_keep: Callable[[Deletion], str]) -> "PrunePlan":
        """Return the plan without the deletions for which `why_keep` has a reason."""
        reasons = [(one, why_keep(one)) for one in self.deletions]
        return PrunePlan(
            deletions=tuple(one for one, reason in reasons if not reason),
            kept=(*self.kept, *((one.save, reason) for one, reason in reasons if reason)),
            refused=self.refused,
        )


def is_live(save: str, live: Collection[str]) -> bool:
    """Whether a save is in `live`, which holds save ids and attempts (the part of an id before the counter)."""
    return save in live or run_of(save) in live


def skipped(committed: Iterable[CommittedSave]) -> set[str]:
    """Return the saves that are newer than a save of their series that was committed after them.

    A run continued from an older checkpoint then, perhaps because these cannot be restored although their sizes are
    right. They may be kept, but they justify no deletion. So the save that was committed last stays: all saves newer
    than that one are skipped.
    """
    found: set[str] = set()
    for series in by_series(committed).values():
        last_commit_at = 0.0
        for one in reversed(newest_first(series)):
            if one.modified_at < last_commit_at:
                found.add(one.save)
            last_commit_at = max(last_commit_at, one.modified_at)
    return found


def by_series(committed: Iterable[CommittedSave]) -> dict[str, list[CommittedSave]]:
    """Group saves by series. Announced checkpoints are that of the empty name."""
    groups: defaultdict[str, list[CommittedSave]] = defaultdict(list)
    for one in committed:
        groups[one.series].append(one)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """How far down a prune has to look if a whole one looked at everything a while ago: to `step`, that one included.

    `older_commit_at`: when the last of the checkpoints below was committed; 0 if there is none.
    """

    step: int = 0
    older_commit_at: float = 0.0

    def skipped(self, committed: Iterable[CommittedSave]) -> set[str]:
        """Return what `skipped` does of all announced checkpoints, those below the horizon included."""
        found = tuple(committed)
        return skipped(found) | {one.save for one in found if not one.series and one.modified_at < self.older_commit_at}


def horizon_of(announced: Sequence[CommittedSave], settings: RetentionSettings) -> Horizon:
    """Return the horizon below the newest of all announced checkpoints, which are in the order of a store's listing."""
    count = max(_RECENT, 2 * settings.keep_last)
    steps = [one.step for one in announced]
    # A store with an order of its own shows the newest anywhere.
    if len(steps) <= count or steps != sorted(steps, reverse=True):
        return Horizon()
    step = steps[count - 1]
    return Horizon(
        step=step, older_commit_at=max((one.modified_at for one in announced if one.step < step), default=0.0)
    )


def plan_prune(
    committed: Sequence[CommittedSave],
    stored: Sequence[StoredSave],
    settings: RetentionSettings,
    *,
    validated: Collection[str],
    protected: Collection[str],
    live: Collection[str],
    known: Collection[str],
    now: float,
) -> PrunePlan:
    """Return the verdict over one listing. All collections hold save ids; `live` may hold attempts too.

    `committed` are announced checkpoints and snapshots. `validated`: marker, manifests and sizes agree, and no restore
    found the save damaged. `protected`: a run resumes from it. `known`: known from elsewhere to be committed; if the
    listing lacks one, the plan refuses all deletions.
    """
    listed = {one.save for one in committed}
    missing = sorted(set(known) - listed)
    if missing:
        return PrunePlan(refused=f"the listing lacks known committed saves: {', '.join(missing[:3])}")
    if not committed:
        return PrunePlan(refused="the destination has no committed checkpoint")
    folders = {(one.name, one.save): one for one in stored}
    # The marker of an announced checkpoint does not say its name.
    names = {one.save: one.name for one in stored}
    deletions: list[Deletion] = []
    kept: list[tuple[str, str]] = []
    justifying = set(validated) - skipped(committed)
    groups = by_series(committed)
    for series, saves in groups.items():
        newer_validated = 0
        for one in newest_first(saves):
            if reason := _why_keep(one, settings, newer_validated, protected, live):
                kept.append((one.save, reason))
            else:
                why = f"{settings.keep_last} newer are valid"
                name = series or names.get(one.save, "")
                folder = folders.get((name, one.save))
                deletions.append(_deletion(name, one.save, folder, why, marker=(one.key,), may_share=bool(series)))
            newer_validated += one.save in justifying
    newest_commit_at = {series: max(one.modified_at for one in saves) for series, saves in groups.items()}
    orphans = [one for one in stored if one.save not in listed]
    has_snapshots = any(groups) or any(_reserves(orphan) for orphan in orphans)
    for orphan in orphans:
        series = orphan.name if orphan.name in groups or _reserves(orphan) else ""
        if reason := _why_keep_orphan(orphan, settings, newest_commit_at.get(series), protected, live, now):
            kept.append((orphan.save, reason))
        else:
            # What is left of a snapshot that was pruned looks like one that was never committed.
            why = "it is not committed" if series else "it was never committed"
            deletions.append(_deletion(orphan.name, orphan.save, orphan, why, may_share=has_snapshots))
    # Oldest first, so that an interrupted prune has removed the least important.
    return PrunePlan(deletions=tuple(reversed(deletions)), kept=tuple(kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLook:
    """What a prune sees after its tombstones are stored. `folders` are saves with objects, by name and save.

    `committed` is listed after `reserved`, which has the name and save of each snapshot that is named by the
    reservation of a save that is not in `committed`.
    """

    folders: Mapping[tuple[str, str], StoredSave]
    reserved: Collection[tuple[str, str]]
    committed: Sequence[CommittedSave]


def without_reserved(plan: PrunePlan, committed: Iterable[CommittedSave], look: SecondLook) -> PrunePlan:
    """Withhold what a snapshot in progress shares, and what has changed since the plan was made of `committed`."""
    doomed = {key for one in plan.deletions for key in one.markers}
    markers, saves = {one.key for one in look.committed}, {one.save for one in look.committed}
    changed = {one.series for one in committed if one.key not in markers and one.key not in doomed}

    def why_keep(one: Deletion) -> str:
        place = one.name, one.save
        if not one.may_share:
            return ""
        if place in look.reserved:
            return "a snapshot in progress shares its objects"
        if one.committed:
            return "other snapshots of its series were deleted meanwhile" if one.name in changed else ""
        if one.save in saves:
            return "it was committed meanwhile"
        folder = look.folders.get(place)
        return "it is still being written" if folder and folder.modified_at > one.modified_at else ""

    return plan.withhold(why_keep)


def without_named(plan: PrunePlan, named: Collection[str], look: SecondLook) -> PrunePlan:
    """Reduce the deletions to the objects that are not in `named`: the keys that remaining snapshots name."""
    reduced = [
        _deletion(
            one.name,
            one.save,
            look.folders.get((one.name, one.save)),
            one.reason,
            marker=one.markers,
            may_share=True,
            named=named,
        )
        if one.may_share
        else one
        for one in plan.deletions
    ]
    return PrunePlan(deletions=tuple(reduced), kept=plan.kept, refused=plan.refused).withhold(
        lambda one: "" if one.waves else "other snapshots share what is left of it"
    )


def may_abort_upload(
    save: str, started_at: float, settings: RetentionSettings, live: Collection[str], now: float
) -> bool:
    """Whether an unfinished multipart upload is left over: old, of no live save, and of a save id that we generated."""
    old = started_at < now - settings.orphan_age_seconds
    return old and not is_live(save, live) and bool(_GENERATED_SAVE.fullmatch(save))


def _why_keep(
    one: CommittedSave,
    settings: RetentionSettings,
    newer_validated: int,
    protected: Collection[str],
    live: Collection[str],
) -> str:
    if settings.keep_last <= 0:
        return "all committed checkpoints are kept"
    if one.save in protected:
        return "it is being resumed from"
    if not one.series and settings.keep_every_steps > 0 and one.step % settings.keep_every_steps == 0:
        return f"its step is a multiple of {settings.keep_every_steps}"
    if newer_validated < settings.keep_last:
        return f"fewer than {settings.keep_last} newer are valid"
    if one.save in live:
        return "it is still being written"
    return ""


def _why_keep_orphan(
    orphan: StoredSave,
    settings: RetentionSettings,
    newest_commit_at: float | None,
    protected: Collection[str],
    live: Collection[str],
    now: float,
) -> str:
    """`newest_commit_at` is that of the orphan's series; None if nothing of it is committed."""
    if not orphan.shows_save:
        return "nothing shows that it is a save"
    if is_live(orphan.save, live):
        return "its attempt is alive"
    if orphan.save in protected:
        return "it is being resumed from"
    if newest_commit_at is None:
        return "nothing of its kind is committed"
    if orphan.modified_at >= newest_commit_at:
        return "it is younger than the newest commit"
    if orphan.modified_at >= now - settings.orphan_age_seconds:
        return "it is not committed, and too young to be given up"
    return ""


def _reserves(one: StoredSave) -> bool:
    """Whether a save has the reservation of a snapshot."""
    return any(reserving_save(key) for key in one.sizes_bytes)


def _deletion(
    name: str,
    save: str,
    folder: StoredSave | None,
    reason: str,
    *,
    marker: tuple[str, ...] = (),
    may_share: bool,
    named: Collection[str] = (),
) -> Deletion:
    sizes_bytes = folder.sizes_bytes if folder else {}
    free = sorted(key for key in sizes_bytes if key not in named)
    # Manifests and reservations last: after an interruption they still prove that the rest is a save of Mooring. The
    # manifest of a save whose objects others share stays for that reason.
    shared = any(key in named for key in sizes_bytes)
    last = tuple(key for key in free if reserving_save(key) or (not shared and is_manifest(key)))
    files = tuple(key for key in free if not is_manifest(key) and not reserving_save(key))
    return Deletion(
        name=name,
        save=save,
        waves=tuple(wave for wave in (marker, files, last) if wave),
        size_bytes=sum(sizes_bytes[key] for wave in (files, last) for key in wave),
        modified_at=folder.modified_at if folder else 0.0,
        committed=bool(marker),
        reason=f"{reason}; others share some of its objects" if shared else reason,
        may_share=may_share,
    )
