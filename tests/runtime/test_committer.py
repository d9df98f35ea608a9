"""A commit beside other agents, who write and remove at the same time."""

import pytest
from tests.fakes.fake_store import FakeStore

from mooring_agent.adapters.clock import SystemClock
from mooring_agent.core.commands import Commit
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.events import Committed, CommitWaits
from mooring_agent.core.manifest import encode_manifest
from mooring_agent.core.model import Kind, RankManifest, SaveInfo
from mooring_agent.core.object_layout import manifest_key, marker_key
from mooring_agent.core.work import Operation, WorkId
from mooring_agent.runtime.committer import commit

INFO = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=2)
MINE, OTHER = (RankManifest(info=INFO, rank=rank, saved_at=1.0, files=()) for rank in range(2))
COMMIT = Commit(
    work=WorkId(Operation.COMMIT, "save"), info=INFO, manifests=(MINE,), may_write_marker=True, sweep_uploads=False
)


async def test_another_ranks_manifest_that_vanished_since_the_listing_is_waited_for() -> None:
    store, clock = FakeStore(), SystemClock()
    for manifest in (MINE, OTHER):
        await store.put(manifest_key(INFO, manifest.rank), encode_manifest(manifest))
    # The marker, which is not there, and the manifest.
    store.fail("get", ErrorKind.NOT_FOUND, times=2)
    waits = await commit(store, clock, COMMIT)
    assert isinstance(waits, CommitWaits)
    assert waits.missing_ranks == 1
    assert isinstance(await commit(store, clock, COMMIT), Committed)


@pytest.mark.parametrize("bytes_left", [0, 100])
async def test_a_marker_that_was_cut_short_is_written_again(bytes_left: int) -> None:
    store, clock = FakeStore(), SystemClock()
    for manifest in (MINE, OTHER):
        await store.put(manifest_key(INFO, manifest.rank), encode_manifest(manifest))
    await commit(store, clock, COMMIT)
    whole = await store.get(marker_key(INFO), limit_bytes=10_000)
    await store.put(marker_key(INFO), whole[:bytes_left])

    assert isinstance(await commit(store, clock, COMMIT), Committed)
    assert await store.get(marker_key(INFO), limit_bytes=10_000) == whole
