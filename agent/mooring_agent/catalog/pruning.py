"""Prunes a destination: reads what `core.policies.retention` needs to know, and carries out its verdict.

Invariants: nothing is deleted unless two listings agree on what is committed and enough newer checkpoints were checked
just now; a save that is committed meanwhile is neither judged nor touched; a save that a young pin names stays, and so
does the pin of an attempt that may be alive; a save that restore noted as damaged never justifies a deletion.

A note of damage is a hint, not a condition: a reader without write access does without it, and a wrong note only keeps
more.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from mooring_agent.catalog.object_reads import for_each, if_there, read_object
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
from mooring_agent.ports import ObjectInfo, StoreReader, StoreWriter, UploadInfo
from mooring_api.names import STATE_DIRECTORY

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def note_damage(store: StoreWriter, save: str, reason: str) -> None:
    try:
        await store.put(damage_key(save), f"{reason}\n".encode(errors="backslashreplace"))
    except StoreError as error:
        _log.warning("damage.not_noted", save=save, error=str(error))


async def clear_damage(store: StoreWriter, save: str) -> None:
    """Remove a save's note of damage, because every byte of it was just found good."""
    key = damage_key(save)
    try:
        # The HEAD comes first: few saves have a note, and fewer readers may delete.
        if await if_there(store.head(key)):
            await store.delete(key)
            _log.info("damage.note_removed", save=save)
    except StoreError as error:
        _log.warning("damage.note_stays", save=save, error=str(error))


_DELETES_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was deleted and aborted, or would be in a dry run. `plan.refused` says why nothing was.

    `litter`: pins of attempts that are over, and what killed probes have left.
    """

    plan: PrunePlan
    aborted_uploads: tuple[str, ...]
    litter: tuple[str, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(deletion.size_bytes for deletion in self.plan.deletions)


@dataclass(slots=True)
class _Listing:
    """The whole destination, sorted into what pruning distinguishes. Foreign objects are left out."""

    committed: set[str] = field(default_factory=set)
    saves: dict[tuple[str, str], list[ObjectInfo]] = field(default_factory=lambda: defaultdict(list))
    pins: list[ObjectInfo] = field(default_factory=list)
    probes: list[ObjectInfo] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)

    def stored(self) -> Iterator[StoredSave]:
        for (name, save), objects in self.saves.items():
            yield StoredSave(
                name=name,
                save=save,
                keys=tuple(one.key for one in objects),
                size_bytes=sum(one.size_bytes for one in objects),
                modified_at=max(one.modified_at for one in objects),
            )


async def prune(
    store: StoreWriter,
    settings: RetentionSettings,
    *,
    now: float,
    resumed_from: str = "",
    live: Collection[str] = (),
    known: Collection[str] = (),
    dry_run: bool = False,
) -> PruneReport:
    """Delete what `settings` does not keep. `core.policies.retention.plan_prune` explains `live` and `known`.

    `resumed_from` is the save that the caller's volume resumed from: it is kept. `now` is in unix seconds.
    """
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
        tuple(one for one in listing.stored() if one.save not in late),
        settings,
        validated=validated,
        protected=protected,
        live=live,
        known={*known, *judged},
        now=now,
    )
    uploads = tuple(
        [
            one
            async for one in store.list_uploads("")
            # A probe's upload, or an object that was half-written to a directory: they belong to no save.
            if (one.key.startswith(f"{STATE_DIRECTORY}/") and one.started_at < long_ago)
            or (not plan.refused and may_abort_upload(_save_of(one.key), one.started_at, settings, live, now))
        ]
    )
    litter = () if plan.refused else _litter(listing.pins, listing.probes, long_ago)
    if not dry_run:
        await _delete_saves(store, plan.deletions, listing.damaged)
        await _clear(store, uploads, litter)
    return PruneReport(plan=plan, aborted_uploads=tuple(one.key for one in uploads), litter=litter)


async def remove_litter(store: StoreWriter, settings: RetentionSettings, *, now: float) -> int:
    """Delete what `prune` deletes besides saves; return how many objects and uploads that was. Lists no saves."""
    long_ago = now - settings.orphan_age_seconds
    pins = [one async for one in store.list(RESUME_PREFIX)]
    probes = [one async for one in store.list(PROBE_PREFIX)]
    uploads = [one async for one in store.list_uploads(f"{STATE_DIRECTORY}/") if one.started_at < long_ago]
    litter = _litter(pins, probes, long_ago)
    await _clear(store, uploads, litter)
    return len(litter) + len(uploads)


async def _validated(store: StoreReader, committed: Iterable[CommittedSave], *, enough: int) -> set[str]:
    """Return the newest saves that sizes and manifests show to be restorable, at most `enough` of them."""
    validated: set[str] = set()
    for one in committed:
        if len(validated) >= enough:
            break
        try:
            examination = await examine(store, one)
        except StoreError as error:
            if error.kind is not ErrorKind.FORMAT_UNKNOWN:
                raise
            continue
        if examination.checkpoint is not None:
            validated.add(one.save)
    return validated


async def _list_all(store: StoreReader) -> _Listing:
    found = _Listing()
    async for one in store.list(""):
        if one.key.startswith(COMMITS_PREFIX):
            if marker := committed_save(one):
                found.committed.add(marker.save)
        elif one.key.startswith(RESUME_PREFIX):
            found.pins.append(one)
        elif one.key.startswith(PROBE_PREFIX):
            found.probes.append(one)
        elif one.key.startswith(DAMAGED_PREFIX):
            found.damaged.add(one.key.removeprefix(DAMAGED_PREFIX))
        elif not one.key.startswith(f"{STATE_DIRECTORY}/") and one.key.count("/") >= 2:
            name, save, _ = one.key.split("/", 2)
            found.saves[name, save].append(one)
    return found


async def _pinned(store: StoreReader, pins: Iterable[ObjectInfo], since: float) -> set[str]:
    """Return the saves named by pins that were written at or after `since`."""
    saves: set[str] = set()
    for one in pins:
        if one.modified_at < since:
            continue
        pin = await if_there(read_object(store, one.key, decode_pin, limit_bytes=PIN_BYTES))
        # If the pin was removed after the listing, no attempt resumes by it.
        saves |= {pin.save} if pin else set()
    return saves


def _litter(pins: Sequence[ObjectInfo], probes: Sequence[ObjectInfo], since: float) -> tuple[str, ...]:
    """Return what killed probes have left, and the pins of attempts that are over.

    An attempt is over if a later attempt of the run began before `since`. The newest of the old pins stays, however old
    it is: its attempt may be alive, and one of its pods may start again.
    """
    newest_old = max((one.modified_at for one in pins if one.modified_at < since), default=0.0)
    return (
        *(one.key for one in pins if one.modified_at < newest_old),
        *(one.key for one in probes if one.modified_at < since),
    )


async def _clear(store: StoreWriter, uploads: Iterable[UploadInfo], litter: Sequence[str]) -> None:
    for upload in uploads:
        await store.abort_upload(upload.key, upload.upload)
    await for_each(litter, store.delete, at_once=_DELETES_AT_ONCE)


async def _delete_saves(store: StoreWriter, deletions: Sequence[Deletion], damaged: Collection[str]) -> None:
    committed: set[str] = set()
    if not all(one.committed for one in deletions):
        # List once more, as late as possible: a save that was not committed may be by this time.
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
