"""Reads a run's ledger, and merges many objects into few.

Invariants: objects that are damaged or that the store refuses to give are skipped and counted; a merged object is
written before any that it holds is deleted, so a reader who lists again misses nothing; entries have an identity, so it
does not matter that some are there twice.
"""

import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import structlog

from keepstep_agent.catalog.object_reads import REFUSALS, for_each, get_whole, if_there, read_object
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
                if error.kind in REFUSALS:
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

    `now` is in unix seconds.
    """
    attempts: dict[str, list[ObjectInfo]] = defaultdict(list)
    for one in listed:
        parsed = parse_ledger_key(one.key)
        if parsed and one.modified_at < now - _MERGE_AGE_SECONDS and one.size_bytes < _MERGED_BYTES:
            attempts[parsed[0]].append(one)
    fewer = 0
    for found in attempts.values():
        for group in _groups(sorted(found, key=lambda one: one.key)):
            fewer += len(group) - 1 if dry_run else await _merge(store, group)
    return fewer


def _groups(objects: Iterable[ObjectInfo]) -> list[list[ObjectInfo]]:
    groups: list[list[ObjectInfo]] = [[]]
    size_bytes = 0
    for one in objects:
        if size_bytes + one.size_bytes > _MERGED_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(one)
        size_bytes += one.size_bytes
    return [group for group in groups if len(group) >= _MERGE_OBJECTS]


async def _merge(store: StoreWriter, group: Sequence[ObjectInfo]) -> int:
    bodies: dict[str, bytes] = {}

    async def read(one: ObjectInfo) -> None:
        try:
            body = await if_there(get_whole(store, one.key, limit_bytes=LEDGER_BYTES))
        except StoreError as error:
            if error.kind is ErrorKind.CHECKPOINT_CORRUPT or error.kind in REFUSALS:
                return
            raise
        if body is not None and merged([body]) is not None:
            bodies[one.key] = body

    await for_each(group, read, at_once=_READS_AT_ONCE)
    whole = merged([bodies[key] for key in sorted(bodies)])
    if whole is None or len(bodies) < _MERGE_OBJECTS:
        return 0
    attempt, written_ms = max(parsed for key in bodies if (parsed := parse_ledger_key(key)))
    await store.put(ledger_key(attempt, written_ms / 1000, f"merged-{secrets.token_hex(4)}"), whole)
    await for_each(bodies, store.delete, at_once=_READS_AT_ONCE)
    _log.info("ledger.merged", attempt=attempt, objects=len(bodies))
    return len(bodies) - 1


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
