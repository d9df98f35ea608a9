"""Prunes the newest saves of a destination after a commit, without a listing of everything that it holds.

It trusts a whole prune that looked at everything a while ago (`catalog.pruning`), lists the markers down to that one's
horizon, and the objects of what is to be deleted. What was never committed, leftovers, and what lies below the horizon
wait for the next whole prune.

Invariants: those of `catalog.pruning`, and it deletes nothing that a whole prune would keep. A checkpoint counts as
skipped if one below the horizon was committed after it; only what another run has committed down there since the whole
prune is not seen. The oldest that it sees may look like a milestone: then it too waits for the next whole prune.
"""

from collections.abc import Collection, Iterable
from functools import partial

from keepstep_agent.catalog.damage import damaged_saves
from keepstep_agent.catalog.markers import (
    SaveTimes,
    committed_save,
    in_order,
    list_down_to,
    read_marker,
    weights_only_save,
)
from keepstep_agent.catalog.object_reads import UNREADABLE, delete_unlocked, for_each
from keepstep_agent.catalog.pruning import REQUESTS_AT_ONCE, PruneReport, delete_saves, pinned, validate
from keepstep_agent.catalog.sharing import spare_shared
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.restore_choice import CommittedSave, by_line
from keepstep_agent.core.policies.retention.deletions import PrunePlan, StoredSave
from keepstep_agent.core.policies.retention.horizon import Horizon
from keepstep_agent.core.policies.retention.verdict import FINAL, plan_prune, without_finals
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import (
    RESUME_PREFIX,
    WEIGHTS_PREFIX,
    save_prefix,
    series_prefix,
)
from keepstep_agent.ports import StoreReader, StoreWriter


async def prune_recent(
    store: StoreWriter,
    settings: RetentionSettings,
    horizon: Horizon,
    *,
    series: Collection[str],
    now: float,
    resumed_from: str = "",
    live: Collection[str] = (),
    known: Collection[str] = (),
    times: SaveTimes | None = None,
) -> PruneReport | None:
    """Delete what `settings` does not keep of these series; "" is that of the announced checkpoints.

    Returns None if `known`, which are saves of these series, are not all found: only a whole prune can judge then. The
    other arguments are those of `prune`.
    """
    times = times or SaveTimes()
    committed = [
        one for found in by_line(await _listed(store, horizon, series)).values() for one in await in_order(store, found)
    ]
    judged = {one.save for one in committed}
    if not judged.issuperset(known):
        return None
    noted = await damaged_saves(store)
    suspects = noted | horizon.skipped(committed)
    good = [one for one in committed if one.save not in suspects]
    judge = partial(plan_prune, settings=settings, damaged=noted, live=live, now=now)
    most = judge(committed, (), validated={one.save for one in good}, protected=(), known=())
    if not most.deletions:
        return PruneReport(plan=most, horizon=horizon)
    concerned = {one.name for one in most.deletions}
    validated: set[str] = set()
    lines = by_line(committed)
    for (name, output_key), found in by_line(good).items():
        if name in concerned:
            validated |= await validate(
                store,
                found,
                lines[name, output_key],
                times,
                enough=settings.keep_last,
                older_commits_at=0.0 if name else horizon.older_commits_at.get(output_key, 0.0),
            )
    pins = [one async for one in store.list(RESUME_PREFIX)]
    protected = {resumed_from, *await pinned(store, pins, now - settings.orphan_age_seconds)} - {""}
    there = {one.key for one in await _listed(store, horizon, series)}
    agreed = [one for one in committed if one.key in there]
    if settings.goes_by_time:
        agreed = await times.read(store, agreed)
    # A prune that was interrupted may have left a second marker.
    second: dict[str, str] = {}
    if "" in concerned:
        left = [one async for listed in store.list(WEIGHTS_PREFIX) if (one := weights_only_save(listed))]
        second = {one.save: one.key for one in left}
    judge = partial(
        judge, agreed, validated=validated, protected=protected, known={*known, *judged}, weights_markers=second
    )
    folders, final = await _folders(store, judge(()), agreed)
    plan = judge(tuple(folders.values()))
    if settings.keep_final:
        plan = without_finals(plan, final)
    plan = plan.withhold(
        lambda one: "" if one.may_share or one.save in folders else "its marker does not say where its objects are"
    )
    tombstones: tuple[str, ...] = ()
    if any(one.may_share for one in plan.deletions):
        spared = await spare_shared(store, plan, agreed, snapshots_alone=True)
        plan, tombstones = spared.plan, spared.tombstones
    plan = await delete_saves(store, plan, noted)
    await delete_unlocked(store, tombstones, at_once=REQUESTS_AT_ONCE)
    return PruneReport(plan=plan, horizon=horizon)


async def _listed(store: StoreReader, horizon: Horizon, series: Iterable[str]) -> list[CommittedSave]:
    found: list[CommittedSave] = []
    for name in series:
        if name:
            found += [one async for listed in store.list(series_prefix(name)) if (one := committed_save(listed))]
        else:
            found += await list_down_to(store, horizon.step)
    return found


async def _folders(
    store: StoreReader, plan: PrunePlan, committed: Iterable[CommittedSave]
) -> tuple[dict[str, StoredSave], dict[str, str]]:
    """Return what is stored of the announced checkpoints that a plan deletes, and which of them are final, by save.

    Both leave out those whose markers cannot be read.
    """
    doomed = {one.save for one in plan.deletions if not one.may_share}
    folders: dict[str, StoredSave] = {}
    final: dict[str, str] = {}

    async def find(one: CommittedSave) -> None:
        try:
            info = (await read_marker(store, one)).info
        except StoreError as error:
            if error.kind not in UNREADABLE:
                raise
            return
        if info.kind is Kind.FINAL:
            final[one.save] = FINAL
        objects = [listed async for listed in store.list(save_prefix(info))]
        folders[one.save] = StoredSave(
            name=info.name,
            save=info.save,
            sizes_bytes={listed.key: listed.size_bytes for listed in objects},
            modified_at=max((listed.modified_at for listed in objects), default=one.modified_at),
        )

    await for_each([one for one in committed if one.save in doomed], find, at_once=REQUESTS_AT_ONCE)
    return folders, final
