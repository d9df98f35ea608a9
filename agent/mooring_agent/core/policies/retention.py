"""Decides what may be deleted from a destination. The last good checkpoint always stays.

Owns the verdict over a whole listing; deletes nothing itself. Invariants:

- A committed save is deleted only if `keep_last` newer saves justify it, each of them validated and none skipped. So
  the newest by step, the one committed last and the only valid one always stay.
- Its marker is deleted before its data, so no reader sees a marker whose data is being deleted.
- Objects that do not prove to be a save of Mooring are left alone.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mooring_agent.core.policies.restore_choice import CommittedSave, newest_first
from mooring_agent.core.settings.values import RetentionSettings
from mooring_api.names import STATE_DIRECTORY

# The save ids that client and agent generate when nobody chose the attempt: `<attempt>-<counter or nonce>`. A folder
# with another name and without a rank manifest may be anybody's.
_GENERATED_SAVE: Final = re.compile(r"[0-9a-f]{8}[0-9a-f-]*-(?:[0-9a-f]{8}|c?\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSave:
    """The objects below one `<name>/<save>/`. `modified_at` is that of the youngest object, by the store's clock."""

    name: str
    save: str
    keys: tuple[str, ...]
    size_bytes: int
    modified_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """One save to delete. `waves` are deleted one after the other: the marker, the files, the rank manifests."""

    save: str
    waves: tuple[tuple[str, ...], ...]
    size_bytes: int
    committed: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What to delete, or why nothing may be deleted. `kept` has the id of every other save and why it stays."""

    deletions: tuple[Deletion, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    refused: str = ""


def is_live(save: str, live: Collection[str]) -> bool:
    """Whether a save is in `live`, which holds save ids and attempts (the part of an id before the counter)."""
    return save in live or save.rpartition("-")[0] in live


def skipped(committed: Iterable[CommittedSave]) -> set[str]:
    """Return the saves that are newer than a save that was committed after them.

    A run continued from an older checkpoint then, perhaps because these cannot be restored although their sizes are
    right. They may be kept, but they justify no deletion. So the save that was committed last stays: all saves newer
    than that one are skipped.
    """
    found: set[str] = set()
    last_commit_at = 0.0
    for one in reversed(newest_first(committed)):
        if one.modified_at < last_commit_at:
            found.add(one.save)
        last_commit_at = max(last_commit_at, one.modified_at)
    return found


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

    `validated`: marker, manifests and sizes agree, and no restore found the save damaged. `protected`: a run resumes
    from it. `known`: known from elsewhere to be committed; if the listing lacks one, the plan refuses all deletions.
    """
    listed = {one.save for one in committed}
    missing = sorted(set(known) - listed)
    if missing:
        return PrunePlan(refused=f"the listing lacks known committed saves: {', '.join(missing[:3])}")
    if not committed:
        return PrunePlan(refused="the destination has no committed checkpoint")
    data = {one.save: one for one in stored}
    deletions: list[Deletion] = []
    kept: list[tuple[str, str]] = []
    justifying = set(validated) - skipped(committed)
    newer_validated = 0
    for one in newest_first(committed):
        reason = _why_keep(one, settings, newer_validated, protected, live)
        if reason:
            kept.append((one.save, reason))
        else:
            deletions.append(_deletion(one.key, one.save, data.get(one.save), f"{settings.keep_last} newer are valid"))
        newer_validated += one.save in justifying
    newest_commit_at = max(one.modified_at for one in committed)
    for orphan in stored:
        if orphan.save in listed:
            continue
        reason = _why_keep_orphan(orphan, settings, newest_commit_at, protected, live, now)
        if reason:
            kept.append((orphan.save, reason))
        else:
            deletions.append(_deletion("", orphan.save, orphan, "it was never committed"))
    # Oldest first, so that an interrupted prune has removed the least important.
    return PrunePlan(deletions=tuple(reversed(deletions)), kept=tuple(kept))


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
    if settings.keep_every_steps > 0 and one.step % settings.keep_every_steps == 0:
        return f"its step is a multiple of {settings.keep_every_steps}"
    if newer_validated < settings.keep_last:
        return f"fewer than {settings.keep_last} newer are valid"
    if one.save in live:
        return "it is still being written"
    return ""


def _why_keep_orphan(
    orphan: StoredSave,
    settings: RetentionSettings,
    newest_commit_at: float,
    protected: Collection[str],
    live: Collection[str],
    now: float,
) -> str:
    has_manifest = any(key.startswith(f"{orphan.name}/{orphan.save}/{STATE_DIRECTORY}/rank-") for key in orphan.keys)
    if not has_manifest and not _GENERATED_SAVE.fullmatch(orphan.save):
        return "nothing shows that it is a save"
    if is_live(orphan.save, live):
        return "its attempt is alive"
    if orphan.save in protected:
        return "it is being resumed from"
    if orphan.modified_at >= newest_commit_at:
        return "it is younger than the newest commit"
    if orphan.modified_at >= now - settings.orphan_age_seconds:
        return "it is not committed, and too young to be given up"
    return ""


def _deletion(marker_key: str, save: str, stored: StoredSave | None, reason: str) -> Deletion:
    keys = sorted(stored.keys) if stored else []
    manifests = tuple(key for key in keys if f"/{STATE_DIRECTORY}/rank-" in key)
    files = tuple(key for key in keys if f"/{STATE_DIRECTORY}/rank-" not in key)
    # Manifests last: after an interruption they still prove that the rest is a save of Mooring.
    waves = ((marker_key,) if marker_key else (), files, manifests)
    return Deletion(
        save=save,
        waves=tuple(wave for wave in waves if wave),
        size_bytes=stored.size_bytes if stored else 0,
        committed=bool(marker_key),
        reason=reason,
    )
