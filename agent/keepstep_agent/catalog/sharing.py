"""Finds out which objects of snapshots a prune may delete: those that no other snapshot names, now or in a moment.

Each side writes first and looks second, as docs/design/0014 says: a snapshot stores a reservation of the one that it
shares objects with, and a prune a tombstone for each snapshot that it is about to delete.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from keepstep_agent.adapters.control_group import memory_limit_bytes
from keepstep_agent.catalog.listing import Listing, list_all
from keepstep_agent.catalog.markers import committed_save
from keepstep_agent.catalog.object_reads import UNREADABLE, at_once, for_each, if_there, problem_of, read_object
from keepstep_agent.core.errors import StoreError, checkpoint_corrupt
from keepstep_agent.core.limits import MANIFEST_BYTES
from keepstep_agent.core.model import Kind, RankManifest, SaveInfo
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.retention.deletions import PrunePlan
from keepstep_agent.core.policies.retention.shared_objects import SecondLook, without_named, without_reserved
from keepstep_agent.core.stored.manifest import decode_manifest, largest_manifest_bytes
from keepstep_agent.core.stored.object_layout import (
    SERIES,
    SNAPSHOTS_PREFIX,
    base_key,
    manifest_key,
    object_key,
    tombstone_key,
)
from keepstep_agent.core.stored.reservation import RESERVATION_BYTES, decode_reservation
from keepstep_agent.ports import StoreReader, StoreWriter
from keepstep_api.names import STATE_DIRECTORY

_REQUESTS_AT_ONCE: Final = 8
_TOGETHER_BYTES: Final = 4 * 1024**2
"""The most bytes of manifests that are read at a time, unless one alone has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDeletions:
    """`plan` has only deletions that take nothing from other snapshots. `tombstones` are to be removed after them."""

    plan: PrunePlan
    tombstones: tuple[str, ...]


async def spare_shared(
    store: StoreWriter,
    plan: PrunePlan,
    committed: Sequence[CommittedSave],
    *,
    snapshots_alone: bool = False,
    dry_run: bool = False,
) -> SharedDeletions:
    """Withhold from a plan, which was made of `committed`, what other snapshots need.

    If that cannot be found out, because a manifest or a reservation cannot be read, all of it is withheld. With
    `snapshots_alone` the plan deletes no save that is not committed; then only what snapshots consist of is listed.
    """
    prune = secrets.token_hex(8)
    tombstones = tuple(tombstone_key(one.save, prune) for one in plan.deletions if one.may_share and one.committed)
    if not dry_run:
        await for_each(tombstones, lambda key: store.put(key, b""), at_once=_REQUESTS_AT_ONCE)
    listing = await list_all(store, SERIES if snapshots_alone else "")
    # A reservation counts until its save is committed. So the markers are listed after the reservations.
    below = SNAPSHOTS_PREFIX if snapshots_alone else f"{STATE_DIRECTORY}/"
    markers = [one async for listed in store.list(below) if (one := committed_save(listed))]
    try:
        reserved = await _reserved(store, listing, markers)
        look = _second_look(plan, listing, reserved, markers)
        plan = without_reserved(plan, committed, look)
        doomed = {key for one in plan.deletions for key in one.markers}
        remaining = [_info(one) for one in markers if one.series and one.key not in doomed]
        # A reserved snapshot that has lost its marker may still have its manifest.
        remaining += [info for info in reserved if info not in remaining and _manifest_bytes(look, info)]
        plan = without_named(plan, await _named(store, remaining, look, plan), look)
    except StoreError as error:
        if error.kind not in UNREADABLE:
            raise
        reason = str(error)
        plan = plan.withhold(lambda one: reason if one.may_share else "")
    return SharedDeletions(plan=plan, tombstones=tombstones)


def _second_look(
    plan: PrunePlan, listing: Listing, reserved: Iterable[SaveInfo], markers: Sequence[CommittedSave]
) -> SecondLook:
    places = {(one.name, one.save) for one in plan.deletions}
    places |= {(info.name, info.save) for info in reserved}
    places |= {(one.series, one.save) for one in markers}
    return SecondLook(
        folders={place: one for one in listing.stored() if (place := (one.name, one.save)) in places},
        reserved={(info.name, info.save) for info in reserved},
        committed=markers,
    )


def _info(snapshot: CommittedSave) -> SaveInfo:
    return SaveInfo(save=snapshot.save, name=snapshot.series, step=snapshot.step, kind=Kind.SNAPSHOT, world_size=1)


def _manifest_key(info: SaveInfo) -> str:
    """Return the key of a snapshot's manifest: an agent takes it alone, as rank 0."""
    return manifest_key(info, 0, 1)


def _manifest_bytes(look: SecondLook, info: SaveInfo) -> int:
    """Return the size of a snapshot's manifest; 0 if it is not there."""
    folder = look.folders.get((info.name, info.save))
    return folder.sizes_bytes.get(_manifest_key(info), 0) if folder else 0


async def _reserved(store: StoreReader, listing: Listing, committed: Iterable[CommittedSave]) -> list[SaveInfo]:
    """Return the snapshots that saves in progress have reserved."""
    reserved: list[SaveInfo] = []
    done = {one.save for one in committed}

    async def read(key: str) -> None:
        try:
            base = await if_there(read_object(store, key, decode_reservation, limit_bytes=RESERVATION_BYTES))
        except StoreError as error:
            raise _unreadable(key, error) from error
        # Whoever removed it has given up that save, or deleted it.
        if base is not None:
            reserved.append(
                SaveInfo(save=base.save, name=base.series, step=base.number, kind=Kind.SNAPSHOT, world_size=1)
            )

    keys = [key for save, keys in listing.reservations.items() if save not in done for key in keys]
    await for_each(keys, read, at_once=_REQUESTS_AT_ONCE)
    return reserved


async def _named(store: StoreReader, snapshots: Sequence[SaveInfo], look: SecondLook, plan: PrunePlan) -> set[str]:
    """Return the objects that `snapshots` consist of, as far as the plan would delete them."""
    at_risk = {
        key
        for one in plan.deletions
        if one.may_share and (folder := look.folders.get((one.name, one.save)))
        for key in folder.sizes_bytes
    }
    named: set[str] = set()
    limit_bytes = largest_manifest_bytes(memory_limit_bytes(), MANIFEST_BYTES)

    async def read(info: SaveInfo) -> None:
        key = _manifest_key(info)

        def decode(body: bytes, key: str) -> RankManifest:
            manifest, *others = decode_manifest(body, key)
            if manifest.info != info or others:
                raise checkpoint_corrupt(f"{key} is the manifest of another save")
            return manifest

        try:
            manifest = await read_object(store, key, decode, limit_bytes=limit_bytes)
        except StoreError as error:
            raise _unreadable(key, error) from error
        keys = {object_key(info, 0, file) for file in manifest.files if not file.link}
        named.update(at_risk & {*keys, key, base_key(info)})

    if at_risk:
        sizes = [_manifest_bytes(look, info) for info in snapshots]
        together = at_once(sizes, most=_REQUESTS_AT_ONCE, together_bytes=_TOGETHER_BYTES)
        await for_each(snapshots, read, at_once=together)
    return named


def _unreadable(key: str, error: StoreError) -> StoreError:
    """Return an error that says why nothing is deleted; any other trouble with the store as it is."""
    if error.kind not in UNREADABLE:
        return error
    return StoreError(error.kind, f"what other snapshots share is not known: {key} {problem_of(key, error)}")
