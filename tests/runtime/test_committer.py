"""A commit beside other agents, who write and remove at the same time: what it reads, and what it writes."""

import asyncio
from dataclasses import replace

import pytest
from tests.fakes.fake_store import FakeStore

from keepstep_agent.core.agent.commands import Commit, Turn
from keepstep_agent.core.agent.events import Committed, CommitWaits, Event, ObjectsLost
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import Kind, RankManifest, SaveInfo
from keepstep_agent.core.stored.commit import manifest_key_of
from keepstep_agent.core.stored.manifest import decode_marker, encode_manifest
from keepstep_agent.core.stored.object_layout import manifest_key, marker_key
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.committer import Committer

INFO = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=2)
MINE, OTHER = (RankManifest(info=INFO, rank=rank, saved_at=1.0, files=()) for rank in range(2))
COMMIT = Commit(work=WorkId(Operation.COMMIT, "save"), info=INFO, ranks=(MINE,), turn=Turn.WRITE, sweep_uploads=False)


async def commit(store: FakeStore, command: Commit = COMMIT) -> Event:
    """Try once, as an agent that has just started."""
    return await Committer(SystemClock()).commit(store, command)


async def put(store: FakeStore, *ranks: RankManifest) -> None:
    """The manifest of an agent that has these ranks."""
    await store.put(manifest_key_of(ranks), encode_manifest(ranks))


def of(*numbers: int, world_size: int) -> tuple[RankManifest, ...]:
    info = replace(INFO, world_size=world_size)
    return tuple(replace(MINE, info=info, rank=number) for number in numbers)


async def test_another_agents_manifest_that_vanished_since_the_listing_is_waited_for() -> None:
    store, committer = FakeStore(), Committer(SystemClock())
    await put(store, MINE)
    await put(store, OTHER)
    # The marker, which is not there, and the manifest, at both times that it is asked for.
    store.fail("get", ErrorKind.NOT_FOUND, times=3)
    waits = await committer.commit(store, COMMIT)
    assert isinstance(waits, CommitWaits)
    assert waits.missing_ranks == 1
    assert isinstance(await committer.commit(store, COMMIT), Committed)


async def test_an_agent_that_finds_the_marker_reads_nothing_else() -> None:
    store, mine = FakeStore(), of(8, 9, world_size=300)
    await put(store, *of(*range(8), world_size=300))
    await put(store, *mine)
    await put(store, *of(*range(10, 300), world_size=300))
    command = replace(COMMIT, info=mine[0].info, ranks=mine)
    assert isinstance(await commit(store, command), Committed)
    store.calls.clear()
    assert isinstance(await commit(store, replace(command, turn=Turn.READ)), Committed)
    assert store.calls == [("get", marker_key(mine[0].info))]


async def test_whose_turn_it_is_not_asks_for_the_marker_alone() -> None:
    store = FakeStore()
    await put(store, MINE)
    waits = await commit(store, replace(COMMIT, turn=Turn.READ))
    assert isinstance(waits, CommitWaits)
    assert waits.missing_ranks is None
    assert store.calls[1:] == [("get", marker_key(INFO))]


async def test_who_lists_reads_no_manifest_and_writes_no_marker() -> None:
    store = FakeStore()
    await put(store, MINE)
    for missing in (1, 0):
        store.calls.clear()
        waits = await commit(store, replace(COMMIT, turn=Turn.LIST))
        assert isinstance(waits, CommitWaits)
        assert waits.missing_ranks == missing
        assert [key for method, key in store.calls if method == "get"] == [marker_key(INFO)]
        await put(store, OTHER)
    assert marker_key(INFO) not in store.objects


@pytest.mark.parametrize("turn", [Turn.LIST, Turn.WRITE])
async def test_our_manifest_that_the_store_has_lost_is_noticed_while_others_are_missing(turn: Turn) -> None:
    assert isinstance(await commit(FakeStore(), replace(COMMIT, turn=turn)), ObjectsLost)


async def test_a_marker_that_does_not_name_what_this_agent_has_sent_is_no_commit_of_it() -> None:
    store, _ = await _committed()
    other = replace(MINE, saved_at=2.0)
    await put(store, other)
    with pytest.raises(StoreError, match="does not match the manifests"):
        await commit(store, replace(COMMIT, ranks=(other,)))


async def test_the_manifests_of_many_agents_are_read_sixteen_at_a_time() -> None:
    class Slow(FakeStore):
        reading = most = 0

        async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
            self.reading += 1
            self.most = max(self.most, self.reading)
            await asyncio.sleep(0)
            self.reading -= 1
            return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)

    store, ranks = Slow(), of(*range(100), world_size=100)
    for one in ranks:
        await put(store, one)
    command = replace(COMMIT, info=ranks[0].info, ranks=ranks[:1])
    assert isinstance(await commit(store, command), Committed)
    assert store.most == 16


async def test_what_came_before_the_last_manifest_is_read_once() -> None:
    store, ranks, committer = FakeStore(), of(*range(4), world_size=4), Committer(SystemClock())
    command = replace(COMMIT, info=ranks[0].info, ranks=ranks[:1])
    reads = []
    for one in ranks:
        await put(store, one)
        store.calls.clear()
        outcome = await committer.commit(store, command)
        reads.append([key for method, key in store.calls if method == "get" and "/manifest-" in key])
    assert isinstance(outcome, Committed)
    assert reads == [[], *([manifest_key_of([one])] for one in ranks[1:])]


async def test_a_manifest_that_a_larger_one_of_its_agent_replaces_is_not_in_the_marker() -> None:
    store, ranks = FakeStore(), of(*range(6), world_size=6)
    # Ranks that announce one by one make their agent's manifest larger; the last one has the lowest rank.
    for together in (ranks[:1], ranks[5:], (ranks[3], ranks[5]), (ranks[1], ranks[3], ranks[5]), (ranks[2], ranks[4])):
        await put(store, *together)
    command = replace(COMMIT, info=ranks[0].info, ranks=ranks[:1])
    assert isinstance(await commit(store, command), Committed)
    marker = decode_marker(store.objects[marker_key(ranks[0].info)].body, "key")
    assert [(one.first_rank, one.rank_count) for one in marker.manifests] == [(0, 1), (1, 3), (2, 2)]


async def test_a_manifest_that_does_not_have_the_ranks_of_its_name_is_damage() -> None:
    store = FakeStore()
    await put(store, MINE)
    await store.put(manifest_key(INFO, 1, 1), encode_manifest([MINE]))
    with pytest.raises(StoreError, match="does not have the ranks that its name says"):
        await commit(store)


@pytest.mark.parametrize("bytes_left", [0, 100])
async def test_a_marker_that_was_cut_short_is_written_again(bytes_left: int) -> None:
    store, whole = await _committed()
    await store.put(marker_key(INFO), whole[:bytes_left])
    assert isinstance(await commit(store), Committed)
    assert store.objects[marker_key(INFO)].body == whole


async def _committed() -> tuple[FakeStore, bytes]:
    """A store with a save of two empty ranks, and its marker."""
    store = FakeStore()
    await put(store, MINE)
    await put(store, OTHER)
    await commit(store)
    return store, store.objects[marker_key(INFO)].body
