"""Prunes a destination: reads what `core.policies.retention` needs to know, and carries out its verdict.

Invariants: nothing is deleted unless two listings agree on what is committed and enough newer checkpoints were checked
just now; a save that is committed meanwhile is neither judged nor touched; a save that a young pin names stays, and so
does the pin of an attempt that may be alive; a save that restore noted as damaged never justifies a deletion; of
snapshots only those objects go that no remaining one names. What a save loses that stays, docs/design/0020 says.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from keepstep_agent.catalog.ledger import merge_ledger
from keepstep_agent.catalog.listing import list_all
from keepstep_agent.catalog.markers import SaveTimes, committed_save, in_order, list_down_to, read_marker
from keepstep_agent.catalog.object_reads import DAMAGE, UNREADABLE, delete_unlocked, for_each, if_there, read_object
from keepstep_agent.catalog.reading import examine
from keepstep_agent.catalog.sharing import spare_shared
from keepstep_agent.catalog.weights_only import read_weights_only, reduce_saves
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.limits import PIN_BYTES
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.restore_choice import CommittedSave, by_line, decode_pin
from keepstep_agent.core.policies.retention.deletions import Deletion, PrunePlan
from keepstep_agent.core.policies.retention.horizon import Horizon, horizon_of, skipped
from keepstep_agent.core.policies.retention.verdict import FINAL, may_abort_upload, plan_prune, without_finals
from keepstep_agent.core.policies.retention.weights_only import Reduction, plan_reductions
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import (
    DRAINING_PREFIX,
    LEDGER_PREFIX,
    PROBE_PREFIX,
    RESUME_PREFIX,
    damage_key,
    parse_pin_key,
    parse_place_key,
    passed_over_key,
)
from keepstep_agent.ports import ObjectInfo, StoreReader, StoreWriter, UploadInfo
from keepstep_api.names import STATE_DIRECTORY

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

REQUESTS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was deleted and aborted, or would be in a dry run. `plan.refused` says why nothing was.

    `reductions`: what was dropped of saves that stay.
    `litter`: pins and places of starts that are over, and what killed probes, prunes and agents have left.
    `ledger_objects`: by how many the merge of the ledger makes it smaller. `horizon`: how far down `prune_recent` looks
    from now on.
    """

    plan: PrunePlan
    horizon: Horizon
    reductions: tuple[Reduction, ...] = ()
    aborted_uploads: tuple[str, ...] = ()
    litter: tuple[str, ...] = ()
    ledger_objects: int = 0

    @property
    def freed_bytes(self) -> int:
        deleted = sum(one.size_bytes for one in self.plan.deletions)
        return deleted + sum(one.size_bytes for one in self.reductions)


async def prune(
    store: StoreWriter,
    settings: RetentionSettings,
    *,
    now: float,
    resumed_from: str = "",
    live: Collection[str] = (),
    known: Collection[str] = (),
    times: SaveTimes | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Delete what `settings` does not keep. `core.policies.retention.verdict` explains `live` and `known`.

    `resumed_from` is the save that the caller's volume resumed from: it is kept. `now` is in unix seconds. `times` has
    what earlier prunes have read of markers.
    """
    times = times or SaveTimes()
    long_ago = now - settings.orphan_age_seconds
    listed = await list_down_to(store, 0)
    horizon = horizon_of(listed, settings)
    announced = await in_order(store, listed)
    listing = await list_all(store)
    snapshots = by_line(one for one in listing.committed if one.series)
    committed = (*announced, *[one for found in snapshots.values() for one in await in_order(store, found)])
    judged = {one.save for one in committed}
    suspects = listing.damaged | skipped(committed)
    there = {one.key for one in listing.committed}
    weights_only = await read_weights_only(store, listing)
    validated: set[str] = set()
    for (series, _), found in by_line(committed).items():
        # Fewer than that are all kept anyway.
        if len(found) + (0 if series else len(weights_only.saves)) > settings.keep_last:
            good = [one for one in found if one.save not in suspects]
            validated |= await validate(store, good, found, times, enough=settings.keep_last)
    late = {one.save for one in listing.committed} - judged
    protected = {resumed_from, *await pinned(store, listing.pins, long_ago)} - {""}
    agreed = (*[one for one in committed if one.key in there], *weights_only.saves)
    if settings.goes_by_time:
        agreed = tuple(await times.read(store, agreed))
    stored = tuple(one for one in listing.stored() if one.save not in late | weights_only.unreadable)
    plan = plan_prune(
        agreed,
        stored,
        settings,
        validated=validated,
        damaged=listing.damaged,
        protected=protected,
        live=live,
        known={*known, *judged},
        now=now,
        weights_markers=weights_only.second_markers,
    )
    if not plan.refused:
        plan = replace(plan, kept=(*plan.kept, *weights_only.kept()))
    if settings.keep_final:
        doomed = {key for one in plan.deletions if not one.may_share for key in one.markers}
        plan = without_finals(plan, await finals(store, [one for one in agreed if one.key in doomed]))
    reductions: tuple[Reduction, ...] = ()
    try:
        # However old a pin is: its run may be alive, and may start again.
        pinned_ever = await pinned(store, listing.pins, 0.0) if settings.weights_only_after else set()
    except StoreError as error:
        if error.kind not in UNREADABLE:
            raise
        _log.warning("retention.weights_only_waits", error=str(error), hint=error.hint)
    else:
        reductions = plan_reductions(
            plan,
            agreed,
            stored,
            settings,
            recorded=weights_only.patterns,
            validated=validated,
            damaged=listing.damaged,
            protected=protected | pinned_ever,
            live=live,
        )
    # The second listing is as large.
    del stored
    listing.folders.clear()
    tombstones: tuple[str, ...] = ()
    if any(one.may_share for one in plan.deletions):
        spared = await spare_shared(store, plan, agreed, dry_run=dry_run)
        plan, tombstones = spared.plan, spared.tombstones
    uploads = tuple(
        [
            one
            async for one in store.list_uploads("")
            # A probe's upload, or an object that was half-written to a directory: they belong to no save.
            if (one.key.startswith(f"{STATE_DIRECTORY}/") and one.started_at < long_ago)
            or (not plan.refused and may_abort_upload(_save_of(one.key), one.started_at, settings, live, now))
        ]
    )
    litter = () if plan.refused else _litter(listing.pins, listing.leftovers, long_ago)
    if not dry_run:
        plan = await _without_late(store, plan)
        plan = await delete_saves(store, plan, listing.damaged)
        await delete_unlocked(store, tombstones, at_once=REQUESTS_AT_ONCE)
        reductions = await reduce_saves(store, reductions, settings, listing)
        await _clear(store, uploads, litter)
    return PruneReport(
        plan=plan,
        reductions=reductions,
        horizon=horizon,
        aborted_uploads=tuple(one.key for one in uploads),
        litter=litter,
        ledger_objects=await _merged_ledger(store, listing.ledger, now=now, dry_run=dry_run),
    )


async def remove_litter(store: StoreWriter, settings: RetentionSettings, *, now: float) -> int:
    """Delete what `prune` deletes besides saves, and merge the ledger. Lists no saves.

    Returns how many leftovers there were.
    """
    long_ago = now - settings.orphan_age_seconds
    pins = [one async for one in store.list(RESUME_PREFIX)]
    leftovers = [one for prefix in (PROBE_PREFIX, DRAINING_PREFIX) async for one in store.list(prefix)]
    uploads = [one async for one in store.list_uploads(f"{STATE_DIRECTORY}/") if one.started_at < long_ago]
    litter = _litter(pins, leftovers, long_ago)
    await _clear(store, uploads, litter)
    await merge_ledger(store, [one async for one in store.list(LEDGER_PREFIX)], now=now)
    return len(litter) + len(uploads)


async def _merged_ledger(store: StoreWriter, listed: Iterable[ObjectInfo], *, now: float, dry_run: bool) -> int:
    """Merge the ledger. A failure costs no more than this merge: what was pruned is to be told all the same."""
    try:
        return await merge_ledger(store, listed, now=now, dry_run=dry_run)
    except StoreError as error:
        _log.warning("ledger.not_merged", error=str(error), hint=error.hint)
        return 0


async def validate(
    store: StoreReader,
    committed: Iterable[CommittedSave],
    line: Sequence[CommittedSave],
    times: SaveTimes,
    *,
    enough: int,
    older_commits_at: float = 0.0,
) -> set[str]:
    """Return the newest saves that sizes and manifests show to be restorable, at most `enough` of them.

    Leaves out those that were skipped, as `horizon.skipped` says, by the times in the markers. `line`: all saves of
    their line, newest first. `older_commits_at`: when the last of those below was committed, by the store's clock.
    """
    validated: set[str] = set()
    for one in committed:
        if len(validated) >= enough:
            break
        try:
            examination = await examine(store, one)
        except StoreError as error:
            if error.kind not in UNREADABLE:
                raise
            continue
        if examination.checkpoint is None:
            continue
        at = replace(one, saved_at=examination.checkpoint.marker.saved_at).committed_at
        # Nothing was committed after it was stored here, so the others need not be read.
        later = [lower for lower in line[line.index(one) + 1 :] if lower.modified_at > at]
        if older_commits_at <= at and not any(lower.committed_at > at for lower in await times.read(store, later)):
            validated.add(one.save)
    return validated


async def finals(store: StoreReader, announced: Iterable[CommittedSave]) -> dict[str, str]:
    """Return the saves that are final checkpoints, or may be, and why each stays. Reads the marker of each."""
    found: dict[str, str] = {}

    async def look(one: CommittedSave) -> None:
        try:
            if (await read_marker(store, one)).info.kind is Kind.FINAL:
                found[one.save] = FINAL
        except StoreError as error:
            if error.kind not in UNREADABLE:
                raise
            if error.kind not in DAMAGE:
                found[one.save] = f"it may be final: {error}"

    await for_each(announced, look, at_once=REQUESTS_AT_ONCE)
    return found


async def pinned(store: StoreReader, pins: Iterable[ObjectInfo], since: float) -> set[str]:
    """Return the saves named by pins that were written at or after `since`."""
    saves: set[str] = set()
    for one in pins:
        if one.modified_at < since or not parse_pin_key(one.key):
            continue
        pin = await if_there(read_object(store, one.key, decode_pin, limit_bytes=PIN_BYTES))
        # If the pin was removed after the listing, no attempt resumes by it.
        saves |= set(pin.saves) if pin else set()
    return saves


def _litter(pins: Sequence[ObjectInfo], leftovers: Sequence[ObjectInfo], since: float) -> tuple[str, ...]:
    """Return the leftovers that are old, and the pins and places of starts that are over.

    A start is over if a later one of the run began before `since`. The newest of the old pins stays, however old it is:
    that start may be alive, and one of its pods may start again.
    """
    begun = {found: one.modified_at for one in pins if (found := parse_pin_key(one.key))}
    newest_old = max((moment for moment in begun.values() if moment < since), default=0.0)

    def begun_at(one: ObjectInfo) -> float:
        place = parse_place_key(one.key)
        return begun.get(place[:2], 0.0) if place else one.modified_at

    return (
        *(one.key for one in pins if one.modified_at < since and begun_at(one) < newest_old),
        *(one.key for one in leftovers if one.modified_at < since),
    )


async def _clear(store: StoreWriter, uploads: Iterable[UploadInfo], litter: Sequence[str]) -> None:
    for upload in uploads:
        await store.abort_upload(upload.key, upload.upload)
    await delete_unlocked(store, litter, at_once=REQUESTS_AT_ONCE)


async def _without_late(store: StoreReader, plan: PrunePlan) -> PrunePlan:
    """List once more, as late as possible: a save that was not committed may be by this time."""
    if all(one.committed for one in plan.deletions):
        return plan
    # One listing for both kinds of markers.
    saves = {one.save async for listed in store.list(f"{STATE_DIRECTORY}/") if (one := committed_save(listed))}
    return plan.withhold(lambda one: "it was committed meanwhile" if not one.committed and one.save in saves else "")


async def delete_saves(store: StoreWriter, plan: PrunePlan, damaged: Collection[str]) -> PrunePlan:
    """Carry out the deletions of a plan. Return it without those that the store's own retention does not let go.

    A save that has lost its marker is deleted, though objects of it may stay for a later prune: those that are
    protected, or that a protected snapshot may share. Of such a save the plan names the marker alone.
    """
    stays: dict[tuple[str, str], str] = {}
    unmarked: set[tuple[str, str]] = set()

    async def delete(deletion: Deletion, waves: Iterable[Sequence[str]]) -> None:
        for wave in waves:
            keys = await delete_unlocked(store, wave, at_once=REQUESTS_AT_ONCE)
            if keys:
                stays[deletion.name, deletion.save] = "the store's retention protects it"
                _log.warning("retention.locked", save=deletion.save, objects=len(keys), first=keys[0])
                return
            if deletion.committed and wave == deletion.markers:
                unmarked.add((deletion.name, deletion.save))

    # Snapshots share objects: none may go while one that is about to be deleted still has its marker.
    sharing = [one for one in plan.deletions if one.may_share]
    for deletion in sharing:
        await delete(deletion, [deletion.markers])
        if stays:
            why = "the store's retention protects a snapshot that may share its objects"
            stays |= {place: why for one in sharing if (place := (one.name, one.save)) not in stays}
            break
    for deletion in plan.deletions:
        if (deletion.name, deletion.save) in stays:
            continue
        await delete(deletion, deletion.data if deletion.may_share else deletion.waves)
        if deletion.save in damaged and (deletion.name, deletion.save) not in stays:
            notes = (damage_key(deletion.save), passed_over_key(deletion.save))
            await delete_unlocked(store, notes, at_once=REQUESTS_AT_ONCE)
    plan = plan.withhold(lambda one: "" if (place := (one.name, one.save)) in unmarked else stays.get(place, ""))
    deletions = (
        replace(one, waves=(one.markers,), size_bytes=0, reason=f"{one.reason}; objects of it stay: {protection}")
        if (protection := stays.get((one.name, one.save)))
        else one
        for one in plan.deletions
    )
    return replace(plan, deletions=tuple(deletions))


def _save_of(key: str) -> str:
    parts = key.split("/", 2)
    return parts[1] if len(parts) == 3 else ""
