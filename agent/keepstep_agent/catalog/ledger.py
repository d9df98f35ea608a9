"""Reads a run's ledger, and merges many objects into few.

Invariants: objects that are damaged or that the store refuses to give are skipped and counted; a merged object is
written before any that it holds is deleted, so a reader who lists again misses nothing; what a merged object holds is
not merged again, though the store may refuse its deletion for ever; entries have an identity, so it does not matter
that some are there twice.
"""

import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import structlog

from keepstep_agent.catalog.object_reads import (
    READ_REFUSALS,
    delete_unlocked,
    for_each,
    get_whole,
    if_there,
    read_object,
)
from keepstep_agent.core.errors import ErrorKind, StoreError, checkpoint_corrupt
from keepstep_agent.core.limits import LEDGER_BYTES, LEDGER_OBJECTS, LEDGER_OBJECTS_BYTES
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_agent.core.stored.ledger import AgentLife, decode_lives, joined_lives, merged
from keepstep_agent.core.stored.object_layout import LEDGER_PREFIX, ledger_key, parse_ledger_key
from keepstep_agent.ports import ObjectInfo, StoreReader, StoreWriter

_READS_AT_ONCE: Final = 16
_LISTINGS: Final = 3
"""How often a reader lists when objects that it wants to read are merged meanwhile."""
_MERGE_AGE_SECONDS: Final = 3600.0
"""Younger objects are left alone: by different clocks their order is not certain yet, and readers look at them most."""
_MERGE_OBJECTS: Final = 16
"""Fewer objects of an attempt are not worth a merge."""
_MERGED_BYTES: Final = LEDGER_BYTES // 4
_MERGED: Final = "merged"
"""In the names of merged objects."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What the agents of one run have noted.

    `run` is its folder below what was read, empty for the destination itself. `unreadable`: how many objects are
    damaged or were refused by the store, and `refusal` is one of its answers. `left_out`: how many of the oldest were
    not read, because there are too many.
    """

    run: str
    lives: tuple[AgentLife, ...]
    unreadable: int = 0
    left_out: int = 0
    refusal: StoreError | None = None

    @property
    def empty(self) -> bool:
        """Whether the run has no ledger."""
        return not (self.lives or self.unreadable or self.left_out)


async def read_ledger(store: StoreReader, run: str = "", *, most_bytes: int = LEDGER_OBJECTS_BYTES) -> Ledger:
    """Read a run's ledger: all of it, or its newest objects with `most_bytes` together."""
    lives: dict[str, Sequence[AgentLife]] = {}
    unreadable: set[str] = set()
    refusals: list[StoreError] = []
    left_out = 0
    for _ in range(_LISTINGS):
        keys, left_out = await newest_objects(store, run, most_bytes=most_bytes)
        wanted = [key for key in keys if key not in lives and key not in unreadable]
        gone = False

        async def read(key: str) -> None:
            nonlocal gone
            try:
                found = await if_there(read_object(store, key, decode_object, limit_bytes=LEDGER_BYTES))
            except StoreError as error:
                if error.kind in READ_REFUSALS:
                    refusals.append(error)
                elif error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
                    raise
                unreadable.add(key)
                return
            if found is None:
                gone = True
            else:
                lives[key] = found

        await for_each(wanted, read, at_once=_READS_AT_ONCE)
        if not gone:
            break
    return Ledger(
        run=run,
        lives=joined_lives(life for found in lives.values() for life in found),
        unreadable=len(unreadable),
        left_out=left_out,
        refusal=refusals[0] if refusals else None,
    )


async def merge_ledger(store: StoreWriter, listed: Iterable[ObjectInfo], *, now: float, dry_run: bool = False) -> int:
    """Merge the older ones of a ledger's objects, attempt by attempt; return how many fewer there are.

    `now` is in unix seconds. What the store's own retention protects stays.
    """
    attempts: dict[str, list[ObjectInfo]] = defaultdict(list)
    for one in listed:
        if parsed := parse_ledger_key(one.key):
            attempts[parsed[0]].append(one)
    fewer = 0
    for objects in attempts.values():
        unmerged, deleted = await _delete_merged(store, objects, before=now - _MERGE_AGE_SECONDS, dry_run=dry_run)
        fewer += deleted
        for group in _groups(unmerged):
            if len(group) >= _MERGE_OBJECTS:
                fewer += len(group) - 1 if dry_run else await _merge(store, group)
    return fewer


async def _delete_merged(
    store: StoreWriter, objects: Iterable[ObjectInfo], *, before: float, dry_run: bool
) -> tuple[list[ObjectInfo], int]:
    """Delete what a merged object of the attempt holds: an earlier merge was killed, or the store refused a deletion.

    Return the objects written before that moment which may be merged, and how many were deleted. Once the store
    protects one, nothing up to the newest merged object is deleted or merged: what is younger is protected for longer.
    """
    unmerged: list[ObjectInfo] = []
    since_merge: list[ObjectInfo] = []
    deleted, is_locked = 0, False
    for one in sorted(objects, key=_merge_order):
        if _is_merged(one.key):
            if not is_locked and not all(_is_merged(other.key) for other in since_merge):
                held = await _held(store, one, since_merge)
                since_merge = [other for other in since_merge if other.key not in held]
                for key in held:
                    is_locked = not dry_run and bool(await delete_unlocked(store, [key], at_once=1))
                    if is_locked:
                        break
                    deleted += 1
            unmerged = [] if is_locked else [*unmerged, *since_merge]
            since_merge = []
        if one.modified_at < before and one.size_bytes < _MERGED_BYTES:
            since_merge.append(one)
    return [*unmerged, *since_merge], deleted


def _merge_order(one: ObjectInfo) -> tuple[int, bool, float, str]:
    """Sort key: a merged object comes after those that it holds, and before an older one of the same moment."""
    parsed = parse_ledger_key(one.key)
    assert parsed
    is_merged = _is_merged(one.key)
    return parsed[1], is_merged, -one.modified_at if is_merged else 0.0, one.key


def _is_merged(key: str) -> bool:
    return f"-{_MERGED}-" in key.rpartition("/")[2]


async def _held(store: StoreReader, merged_object: ObjectInfo, objects: Iterable[ObjectInfo]) -> list[str]:
    """Return the keys of the objects, in their order, whose entries are all in a merged one."""
    whole = (await _mergeable(store, [merged_object])).get(merged_object.key)
    held: list[str] = []
    if whole is not None:
        for group in _groups(objects):
            bodies = await _mergeable(store, group)
            if merged([whole, *bodies.values()]) == whole:
                held += bodies
    return held


def _groups(objects: Iterable[ObjectInfo]) -> list[list[ObjectInfo]]:
    """Cut the objects into groups that fit into one object."""
    groups: list[list[ObjectInfo]] = [[]]
    size_bytes = 0
    for one in objects:
        if size_bytes + one.size_bytes > _MERGED_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(one)
        size_bytes += one.size_bytes
    return groups


async def _mergeable(store: StoreReader, group: Sequence[ObjectInfo]) -> dict[str, bytes]:
    """Return the objects of a group that can be read and merged, by key."""
    bodies: dict[str, bytes] = {}

    async def read(one: ObjectInfo) -> None:
        try:
            body = await if_there(get_whole(store, one.key, limit_bytes=LEDGER_BYTES))
        except StoreError as error:
            if error.kind is ErrorKind.CHECKPOINT_CORRUPT or error.kind in READ_REFUSALS:
                return
            raise
        if body is not None and merged([body]) is not None:
            bodies[one.key] = body

    await for_each(group, read, at_once=_READS_AT_ONCE)
    return {one.key: bodies[one.key] for one in group if one.key in bodies}


async def _merge(store: StoreWriter, group: Sequence[ObjectInfo]) -> int:
    """Merge the objects of a group into one; return how many fewer there are."""
    bodies = await _mergeable(store, group)
    whole = merged(list(bodies.values()))
    if whole is None or len(bodies) < _MERGE_OBJECTS:
        return 0
    attempt, written_ms = max(parsed for key in bodies if (parsed := parse_ledger_key(key)))
    await store.put(ledger_key(attempt, written_ms / 1000, f"{_MERGED}-{secrets.token_hex(4)}"), whole)
    locked = await delete_unlocked(store, bodies, at_once=_READS_AT_ONCE)
    _log.info("ledger.merged", attempt=attempt, objects=len(bodies), protected=len(locked))
    return max(0, len(bodies) - len(locked) - 1)


async def newest_objects(store: StoreReader, run: str, *, most_bytes: int) -> tuple[list[str], int]:
    """Return the keys of the newest objects, as many as the limits allow, and how many there are besides."""
    found = sorted(
        [
            (parsed[1], one.key, one.size_bytes)
            async for one in store.list(run + LEDGER_PREFIX)
            if (parsed := parse_ledger_key(one.key.removeprefix(run)))
        ],
        reverse=True,
    )
    together_bytes = accumulate(size_bytes for _, _, size_bytes in found)
    fitting = sum(1 for total_bytes in together_bytes if total_bytes <= most_bytes)
    count = min(fitting, LEDGER_OBJECTS)
    return [key for _, key, _ in found[:count]], len(found) - count


def decode_object(body: bytes, key: str) -> tuple[AgentLife, ...]:
    """Decode an object of a ledger. Raises StoreError(CHECKPOINT_CORRUPT), which names `key`."""
    try:
        return decode_lives(body)
    except UndecodableError as error:
        raise checkpoint_corrupt(f"{key} is no part of a ledger: {error}") from error
