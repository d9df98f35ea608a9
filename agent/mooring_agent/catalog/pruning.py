"""Prunes a destination: reads what `core.policies.retention` has to know, and carries out its verdict.

Invariants: nothing is deleted unless two listings agree on what is committed and enough newer checkpoints were checked
just now; a save that is committed meanwhile is neither judged nor touched; what a young pin names stays, and so does
the pin of an attempt that may be alive; nothing is deleted because of a save that restore noted as damaged.

Such a note of damage is a hint and no condition: a reader without write access does without it, and a wrong note only
keeps more.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from mooring_agent.catalog.object_reads import for_each, read_object
from mooring_agent.catalog.reading import committed_save, examine, list_committed
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.limits import PIN_BYTES
from mooring_agent.core.policies.restore_choice import CommittedSave, decode_pin
from mooring_agent.core.policies.retention import (
    Deletion,
    PrunePlan,
    StoredSave,
    may_abort_upload,
    plan_prune,
    skipped,
)
from mooring_agent.core.settings.values import RetentionSettings
from mooring_agent.core.stored.object_layout import (
    COMMITS_PREFIX,
    DAMAGED_PREFIX,
    PROBE_PREFIX,
    RESUME_PREFIX,
    damage_key,
)
from mooring_agent.ports import ObjectInfo, ObjectStore, UploadInfo
from mooring_api.names import STATE_DIRECTORY

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def note_damage(store: ObjectStore, save: str, reason: str) -> None:
    try:
        await store.put(damage_key(save), f"{reason}\n".encode(errors="backslashreplace"))
    except StoreError as error:
        _log.warning("damage.not_noted", save=save, error=str(error))


async def clear_damage(store: ObjectStore, save: str) -> None:
    """Every byte of the save was just found good: what was noted of it is over."""
    key = damage_key(save)
    try:
        # Few saves have a note, and fewer readers may delete.
        await store.head(key)
        await store.delete(key)
    except StoreError as error:
        if error.kind is not ErrorKind.NOT_FOUND:
            _log.warning("damage.note_stays", save=save, error=str(error))
        return
    _log.info("damage.note_removed", save=save)


_DELETES_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was, or with `dry_run` would be, deleted and aborted. `plan.refused` says why nothing was.

    `litter`: pins of attempts that are over, and what probes that were killed have left.
    """

    plan: PrunePlan
    aborted_uploads: tuple[str, ...]
    litter: tuple[str, ...]
    dry_run: bool

    @property
    def freed_bytes(self) -> int:
        return sum(deletion.size_bytes for deletion in self.plan.deletions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The whole destination, sorted into what pruning tells apart; foreign objects are left out."""

    committed: frozenset[str]
    stored: tuple[StoredSave, ...]
    pins: tuple[ObjectInfo, ...]
    probes: tuple[ObjectInfo, ...]
    damaged: frozenset[str]


async def prune(
    store: ObjectStore,
    settings: RetentionSettings,
    *,
    now: float,
    resumed_from: str = "",
    live: Collection[str] = (),
    known: Collection[str] = (),
    dry_run: bool = False,
) -> PruneReport:
    """Delete what `settings` no longer wants; `core.policies.retention.plan_prune` explains the other arguments."""
    long_ago = now - settings.orphan_age_seconds
    committed = await list_committed(store)
    judged = {one.save for one in committed}
    listing = await _list_all(store)
    suspects = listing.damaged | skipped(committed)
    validated = await _validated(
        store, [one for one in committed if one.save not in suspects], enough=settings.keep_last
    )
    late = listing.committed - judged
    protected = {resumed_from, *await _pinned(store, listing.pins, long_ago)} - {""}
    plan = plan_prune(
        tuple(one for one in committed if one.save in listing.committed),
        tuple(one for one in listing.stored if one.save not in late),
        settings,
        validated=validated,
        protected=protected,
        live=live,
        known={*known, *judged},
        now=now,
    )
    uploads: tuple[UploadInfo, ...] = ()
    litter: tuple[str, ...] = ()
    if not plan.refused:
        uploads = tuple(
            [
                one
                async for one in store.list_uploads("")
                if may_abort_upload(_save_of(one.key), one.started_at, settings, live, now)
                # A probe's, or an object that was half-written to a directory.
                or (one.key.startswith(f"{STATE_DIRECTORY}/") and one.started_at < long_ago)
            ]
        )
        litter = _litter(listing.pins, listing.probes, long_ago)
    if not dry_run:
        await _delete_saves(store, plan.deletions, listing.damaged)
        await _clear(store, uploads, litter)
    return PruneReport(plan=plan, aborted_uploads=tuple(one.key for one in uploads), litter=litter, dry_run=dry_run)


async def remove_litter(store: ObjectStore, settings: RetentionSettings, *, now: float) -> int:
    """Delete what `prune` deletes besides saves; how many objects and uploads that was. Lists no saves."""
    long_ago = now - settings.orphan_age_seconds
    pins = [one async for one in store.list(RESUME_PREFIX)]
    probes = [one async for one in store.list(PROBE_PREFIX)]
    uploads = [one async for one in store.list_uploads(f"{STATE_DIRECTORY}/") if one.started_at < long_ago]
    litter = _litter(pins, probes, long_ago)
    await _clear(store, uploads, litter)
    return len(litter) + len(uploads)


async def _validated(store: ObjectStore, committed: Iterable[CommittedSave], *, enough: int) -> set[str]:
    """The newest saves that can be restored as far as sizes and manifests tell; no more than `enough` of them."""
    validated: set[str] = set()
    for one in committed:
        if len(validated) >= enough:
            break
        if (await examine(store, one)).checkpoint is not None:
            validated.add(one.save)
    return validated


async def _list_all(store: ObjectStore) -> _Listing:
    committed: set[str] = set()
    pins: list[ObjectInfo] = []
    probes: list[ObjectInfo] = []
    damaged: set[str] = set()
    saves: dict[tuple[str, str], list[ObjectInfo]] = defaultdict(list)
    async for one in store.list(""):
        if one.key.startswith(COMMITS_PREFIX):
            marker = committed_save(one)
            committed |= {marker.save} if marker else set()
        elif one.key.startswith(RESUME_PREFIX):
            pins.append(one)
        elif one.key.startswith(PROBE_PREFIX):
            probes.append(one)
        elif one.key.startswith(DAMAGED_PREFIX):
            damaged.add(one.key.removeprefix(DAMAGED_PREFIX))
        elif not one.key.startswith(f"{STATE_DIRECTORY}/") and one.key.count("/") >= 2:
            name, save, _ = one.key.split("/", 2)
            saves[name, save].append(one)
    stored = tuple(
        StoredSave(
            name=name,
            save=save,
            keys=tuple(one.key for one in objects),
            size_bytes=sum(one.size_bytes for one in objects),
            modified_at=max(one.modified_at for one in objects),
        )
        for (name, save), objects in saves.items()
    )
    return _Listing(
        committed=frozenset(committed),
        stored=stored,
        pins=tuple(pins),
        probes=tuple(probes),
        damaged=frozenset(damaged),
    )


async def _pinned(store: ObjectStore, pins: Iterable[ObjectInfo], since: float) -> set[str]:
    """Saves that an attempt which began lately resumes from."""
    saves: set[str] = set()
    for one in pins:
        if one.modified_at < since:
            continue
        try:
            saves.add((await read_object(store, one.key, decode_pin, limit_bytes=PIN_BYTES)).save)
        except StoreError as error:
            # Removed since it was listed: so nobody resumes by it.
            if error.kind is not ErrorKind.NOT_FOUND:
                raise
    return saves


def _litter(pins: Sequence[ObjectInfo], probes: Sequence[ObjectInfo], since: float) -> tuple[str, ...]:
    return (*_superseded(pins, since), *(one.key for one in probes if one.modified_at < since))


async def _clear(store: ObjectStore, uploads: Iterable[UploadInfo], litter: Sequence[str]) -> None:
    for upload in uploads:
        await store.abort_upload(upload.key, upload.upload_id)
    await for_each(litter, store.delete, at_once=_DELETES_AT_ONCE)


def _superseded(pins: Iterable[ObjectInfo], since: float) -> list[str]:
    """Pins of attempts that are over: another one of the run had begun already before `since`.

    The newest of old pins stays, however old it is: its attempt may live, and a pod of it may start again.
    """
    newest_old = max((one.modified_at for one in pins if one.modified_at < since), default=0.0)
    return [one.key for one in pins if one.modified_at < newest_old]


async def _delete_saves(store: ObjectStore, deletions: Sequence[Deletion], damaged: Collection[str]) -> None:
    committed: set[str] = set()
    if not all(one.committed for one in deletions):
        # Once more, and late: what was never committed may have been just now.
        committed = {one.save async for listed in store.list(COMMITS_PREFIX) if (one := committed_save(listed))}
    for deletion in deletions:
        if not deletion.committed and deletion.save in committed:
            continue
        for wave in deletion.waves:
            await for_each(wave, store.delete, at_once=_DELETES_AT_ONCE)
        if deletion.save in damaged:
            await store.delete(damage_key(deletion.save))


def _save_of(key: str) -> str:
    parts = key.split("/", 2)
    return parts[1] if len(parts) == 3 else ""
