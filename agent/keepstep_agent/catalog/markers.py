"""Commit markers: which saves are committed, by a listing, and what the marker of each says."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from keepstep_agent.catalog.object_reads import DAMAGE, READ_REFUSALS, for_each, if_there, problem_of, read_object
from keepstep_agent.core.errors import ErrorKind, StoreError, checkpoint_corrupt
from keepstep_agent.core.limits import MARKER_BYTES
from keepstep_agent.core.model import CommitMarker
from keepstep_agent.core.policies.restore_choice import CommittedSave, by_line, last_commits, newest_first
from keepstep_agent.core.stored.manifest import decode_marker
from keepstep_agent.core.stored.object_layout import (
    COMMITS_PREFIX,
    SNAPSHOTS_PREFIX,
    WEIGHTS_PREFIX,
    marker_key,
    parse_marker_key,
    parse_snapshot_key,
    parse_weights_key,
    step_prefix,
    weights_key,
    weights_step_prefix,
)
from keepstep_agent.core.stored.weights_marker import decode_weights_marker
from keepstep_agent.ports import ObjectInfo, StoreReader

_MARKERS_AT_ONCE: Final = 8
_MOST_TIMES: Final = 100_000
"""How many saves' times an agent remembers before it reads them again."""


async def list_committed(store: StoreReader) -> tuple[CommittedSave, ...]:
    """Return every committed announced checkpoint, newest first. Reads only markers that share a step with another."""
    return await in_order(store, await list_down_to(store, 0))


async def list_down_to(store: StoreReader, step: int) -> list[CommittedSave]:
    """Return the committed announced checkpoints up to the first one below `step`, in the order of the listing."""
    found: list[CommittedSave] = []
    async for listed in store.list(COMMITS_PREFIX):
        if one := committed_save(listed):
            if one.step < step:
                break
            found.append(one)
    return found


async def newest_of_run(store: StoreReader, run: str, *, most: int) -> tuple[tuple[CommittedSave, ...], bool]:
    """Return up to `most` of a run's announced checkpoints, or of its snapshots if there are none, and whether all.

    Newest first. Reads no marker, so the order of saves that share a step is that of their ids. `run` is its prefix.
    """
    for prefix in (COMMITS_PREFIX, SNAPSHOTS_PREFIX):
        found: list[CommittedSave] = []
        async for listed in store.list(run + prefix):
            if one := committed_save(replace(listed, key=listed.key.removeprefix(run))):
                found.append(one)
            if len(found) > most:
                break
        if found:
            return newest_first(found)[:most], len(found) <= most
    return (), True


async def weights_of_run(store: StoreReader, run: str, *, most: int) -> tuple[CommittedSave, ...]:
    """Return up to `most` of the saves of which only the weights are left, newest first. `run` is the run's prefix."""
    found: list[CommittedSave] = []
    async for listed in store.list(run + WEIGHTS_PREFIX):
        if one := weights_only_save(replace(listed, key=listed.key.removeprefix(run))):
            found.append(one)
        if len(found) >= most:
            break
    return newest_first(found)


async def list_step(store: StoreReader, step: int) -> tuple[CommittedSave, ...]:
    """Return the committed checkpoints of one step, newest first."""
    return await in_order(
        store, [one async for listed in store.list(step_prefix(step)) if (one := committed_save(listed))]
    )


async def list_weights_only(store: StoreReader, *, step: int | None = None) -> tuple[CommittedSave, ...]:
    """Return every save, of one step or of all, of which only the weights are left, newest first.

    A save that still has its commit marker, because a prune was interrupted, is among them.
    """
    prefix = WEIGHTS_PREFIX if step is None else weights_step_prefix(step)
    return await in_order(store, [one async for listed in store.list(prefix) if (one := weights_only_save(listed))])


async def list_weights_alone(
    store: StoreReader, committed: Iterable[CommittedSave], *, step: int | None = None
) -> tuple[CommittedSave, ...]:
    """Return those of `list_weights_only` that are not in `committed`."""
    saves = {one.save for one in committed}
    return tuple([one for one in await list_weights_only(store, step=step) if one.save not in saves])


async def list_snapshots(store: StoreReader) -> dict[str, tuple[CommittedSave, ...]]:
    """Return the committed snapshots of every series, newest first. Reads only markers that share a number."""
    groups = by_line([one async for listed in store.list(SNAPSHOTS_PREFIX) if (one := committed_save(listed))])
    # `node-2` before `node-10`.
    ordered = sorted(groups, key=lambda line: (len(line[0]), line))
    return {line[0]: await in_order(store, groups[line]) for line in ordered}


async def in_order(store: StoreReader, committed: Iterable[CommittedSave]) -> tuple[CommittedSave, ...]:
    """Sort announced checkpoints, or the snapshots of one series, newest first.

    Reads markers that share a step in one output directory. One that is archived counts by the store's clock.
    """

    async def time_of(one: CommittedSave) -> float:
        try:
            return await saved_at(store, one)
        except StoreError as error:
            if error.kind is not ErrorKind.REQUEST_REFUSED:
                raise
            return one.modified_at

    found = tuple(committed)
    shared = Counter((one.output_key, one.step) for one in found)
    return newest_first(
        [one if shared[one.output_key, one.step] == 1 else replace(one, saved_at=await time_of(one)) for one in found]
    )


async def read_marker(store: StoreReader, committed: CommittedSave, *, run: str = "") -> CommitMarker:
    """Return the commit marker of a save. `run` is the prefix of its run if the store holds many.

    Raises StoreError(CHECKPOINT_CORRUPT), which names the marker, if it is missing or not what was written.
    """
    place = run + committed.key

    def decode(body: bytes, key: str) -> CommitMarker:
        marker = (decode_weights_marker if committed.weights_only else decode_marker)(body, key)
        info = marker.info
        if (weights_key if committed.weights_only else marker_key)(info) != committed.key:
            what = f"{info.kind} of {info.name}, " if info.is_snapshot or committed.series else ""
            raise checkpoint_corrupt(f"{key} is the marker of {what}step {info.step} (save {info.save})")
        if info.is_snapshot and info.world_size != 1:
            raise checkpoint_corrupt(f"{key} is the marker of a snapshot of {info.world_size} ranks")
        return marker

    try:
        return await read_object(store, place, decode, limit_bytes=MARKER_BYTES)
    except StoreError as error:
        if error.kind in DAMAGE:
            raise checkpoint_corrupt(f"{place} {problem_of(place, error)}") from error
        raise


async def named(store: StoreReader, name: str, committed: Iterable[CommittedSave]) -> tuple[CommittedSave, ...]:
    """Return those of the announced checkpoints that have this name, newest first. Reads all their markers."""
    found: list[CommittedSave] = []

    async def look(one: CommittedSave) -> None:
        try:
            if (await read_marker(store, one)).info.name == name:
                found.append(one)
        except StoreError as error:
            if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN):
                raise

    await for_each(tuple(committed), look, at_once=_MARKERS_AT_ONCE)
    return newest_first(found)


async def has_marker(store: StoreReader, committed: CommittedSave) -> bool:
    """Return whether the save still has its marker. A deletion removes that first, and what is left looks damaged."""
    return await if_there(store.head(committed.key)) is not None


def committed_save(marker: ObjectInfo) -> CommittedSave | None:
    """Return what the key of a listed marker says; None for any other object."""
    if parsed := parse_marker_key(marker.key):
        step, save, output_key = parsed
        return CommittedSave(
            key=marker.key, step=step, save=save, output_key=output_key, modified_at=marker.modified_at
        )
    if snapshot := parse_snapshot_key(marker.key):
        return CommittedSave(
            key=marker.key,
            step=snapshot.number,
            save=snapshot.save,
            series=snapshot.series,
            modified_at=marker.modified_at,
        )
    return None


def weights_only_save(marker: ObjectInfo) -> CommittedSave | None:
    """Return what the key of a listed marker says of a save of which only the weights are left; None otherwise.

    `modified_at` is then when that marker was written, and not when the save was committed.
    """
    if parsed := parse_weights_key(marker.key):
        step, save, output_key = parsed
        return CommittedSave(
            key=marker.key,
            step=step,
            save=save,
            output_key=output_key,
            modified_at=marker.modified_at,
            weights_only=True,
        )
    return None


async def saved_at(store: StoreReader, committed: CommittedSave, *, run: str = "") -> float:
    """Return when a save was announced, unix seconds; 0 if its marker cannot be read. `run` as for `read_marker`."""
    try:
        return (await read_marker(store, committed, run=run)).saved_at
    except StoreError as error:
        if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN):
            raise
        return 0.0


async def _saved_at_if_readable(store: StoreReader, committed: CommittedSave, *, run: str = "") -> float:
    """As `saved_at`, and 0 too if the store does not give the marker: archived, or of another owner."""
    try:
        return await saved_at(store, committed, run=run)
    except StoreError as error:
        if error.kind not in READ_REFUSALS:
            raise
        return 0.0


class SaveTimes:
    """When saves were announced. A marker never changes, so each is read once."""

    def __init__(self) -> None:
        self._saved_at: dict[str, float] = {}

    async def read(self, store: StoreReader, committed: Iterable[CommittedSave]) -> list[CommittedSave]:
        """Return the saves with `saved_at`, which stays 0 where a marker is damaged or archived.

        Raises ACCESS_DENIED: keys may be replaced at this moment, and the store's clock alone could delete too much.
        """
        saves = list(committed)
        if len(self._saved_at) > _MOST_TIMES:
            self._saved_at.clear()

        async def look(one: CommittedSave) -> None:
            try:
                self._saved_at[one.key] = await saved_at(store, one)
            except StoreError as error:
                # An archived object may be readable again later.
                if error.kind is not ErrorKind.REQUEST_REFUSED:
                    raise

        unread = [one for one in saves if not one.saved_at and one.key not in self._saved_at]
        await for_each(unread, look, at_once=_MARKERS_AT_ONCE)
        return [replace(one, saved_at=one.saved_at or self._saved_at.get(one.key, 0.0)) for one in saves]


async def with_last_commits(
    store: StoreReader, committed: Iterable[CommittedSave], *, run: str = ""
) -> tuple[CommittedSave, ...]:
    """Return the saves, and where they are of several lines, with what tells which of those was committed to last.

    That takes the markers of up to two saves of each line, because the store's times are those of a copy in a copied
    bucket. Without the right to read them, the store's times count. `run` as for `read_marker`.
    """
    saves = tuple(committed)
    lines = by_line(saves).values()
    found: dict[str, float] = {}

    async def look(one: CommittedSave) -> None:
        found[one.key] = await _saved_at_if_readable(store, one, run=run)

    if len(lines) > 1:
        last = {one.key: one for line in lines for one in last_commits(line) if not one.saved_at}
        await for_each(last.values(), look, at_once=_MARKERS_AT_ONCE)
    return tuple([replace(one, saved_at=found.get(one.key, one.saved_at)) for one in saves])
