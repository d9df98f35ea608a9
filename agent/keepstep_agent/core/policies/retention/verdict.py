"""The verdict over one listing: what is to be deleted, and why everything else stays."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from keepstep_agent.core.policies.restore_choice import CommittedSave, by_line, newest_first, run_of
from keepstep_agent.core.policies.retention.deletions import (
    Deletion,
    Kept,
    PrunePlan,
    StoredSave,
    deletion_of,
    is_generated,
)
from keepstep_agent.core.policies.retention.horizon import skipped
from keepstep_agent.core.policies.retention.policies import policies_of, why_wanted
from keepstep_agent.core.settings.values import RetentionSettings

FINAL: Final = "final"
"""Why a final checkpoint stays."""


def plan_prune(
    committed: Sequence[CommittedSave],
    stored: Sequence[StoredSave],
    settings: RetentionSettings,
    *,
    validated: Collection[str],
    damaged: Collection[str],
    protected: Collection[str],
    live: Collection[str],
    known: Collection[str],
    now: float,
    weights_markers: Mapping[str, str] = MappingProxyType({}),
) -> PrunePlan:
    """Return the verdict over one listing. All collections hold save ids; `live` may hold attempts too.

    `committed` are announced checkpoints and snapshots. `validated`: marker, manifests and sizes agree, and no restore
    found the save damaged. `damaged`: a restore noted that. `protected`: a run resumes from it. `known`: known from
    elsewhere to be committed; if the listing lacks one, the plan refuses all deletions. `weights_markers`: the keys of
    the weights markers of saves that are committed too, because a prune was interrupted.
    """
    listed = {one.save for one in committed}
    missing = sorted(set(known) - listed)
    if missing:
        return PrunePlan(refused=f"the listing lacks known committed saves: {', '.join(missing[:3])}")
    if all(one.weights_only for one in committed):
        return PrunePlan(refused="the destination has no committed checkpoint")
    folders = {(one.name, one.save): one for one in stored}
    # The marker of an announced checkpoint does not say its name.
    names = {one.save: one.name for one in stored}
    deletions: list[Deletion] = []
    kept: list[Kept] = []
    justifying = set(validated) - skipped(committed)
    lines = by_line(committed)
    for (series, _), saves in lines.items():
        ordered = newest_first(saves)
        wanted = why_wanted(ordered, policies_of(settings, justifying), damaged)
        for one in ordered:
            name = series or names.get(one.save, "")
            if reason := _why_keep(one, settings, wanted.get(one.save, ()), protected, live):
                kept.append(Kept(name=name, save=one.save, reason=reason))
            else:
                why = f"{settings.keep_last} newer {'is' if settings.keep_last == 1 else 'are'} valid"
                folder = folders.get((name, one.save))
                marker = (one.key, second) if (second := weights_markers.get(one.save)) else (one.key,)
                deletions.append(deletion_of(name, one.save, folder, why, marker=marker, may_share=bool(series)))
    newest_commit_at: dict[str, float] = {}
    for one in committed:
        if not one.weights_only:
            newest_commit_at[one.series] = max(one.modified_at, newest_commit_at.get(one.series, 0.0))
    orphans = [one for one in stored if one.save not in listed]
    all_series = {one.series for one in committed}
    has_snapshots = any(all_series) or any(orphan.reserves for orphan in orphans)
    for orphan in orphans:
        series = orphan.name if orphan.name in all_series or orphan.reserves else ""
        if reason := _why_keep_orphan(orphan, settings, newest_commit_at.get(series), protected, live, now):
            kept.append(Kept(name=orphan.name, save=orphan.save, reason=reason))
        else:
            # What is left of a snapshot that was pruned looks like one that was never committed.
            why = "it is not committed" if series else "it was never committed"
            deletions.append(deletion_of(orphan.name, orphan.save, orphan, why, may_share=has_snapshots))
    # Oldest first, so that an interrupted prune has removed the least important.
    return PrunePlan(deletions=tuple(reversed(deletions)), kept=tuple(kept))


def without_finals(plan: PrunePlan, finals: Mapping[str, str]) -> PrunePlan:
    """Withhold the deletions of the saves in `finals`, which says why each stays."""
    return plan.withhold(lambda one: finals.get(one.save, "") if one.committed else "")


def may_abort_upload(
    save: str, started_at: float, settings: RetentionSettings, live: Collection[str], now: float
) -> bool:
    """Whether an unfinished multipart upload is left over: old, of no live save, and of a save id that we generated."""
    old = started_at < now - settings.orphan_age_seconds
    return old and not is_live(save, live) and is_generated(save)


def is_live(save: str, live: Collection[str]) -> bool:
    """Whether a save is in `live`, which holds save ids and attempts (the part of an id before the counter)."""
    return save in live or run_of(save) in live


def _why_keep(
    one: CommittedSave,
    settings: RetentionSettings,
    wanted: Sequence[str],
    protected: Collection[str],
    live: Collection[str],
) -> str:
    """`wanted` says why policies want it."""
    if settings.keep_last <= 0:
        return "all committed checkpoints are kept"
    reasons = list(wanted)
    if one.save in protected:
        reasons.append("it is being resumed from")
    if one.save in live:
        reasons.append("it is still being written")
    return ", ".join(reasons)


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
