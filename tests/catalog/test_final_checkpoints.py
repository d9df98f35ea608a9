"""Final checkpoints stay although newer ones are there: their markers say that they are, and the listing does not."""

import pytest
from tests.core.listings import why_kept
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.catalog.pruning import PruneReport, prune
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.policies.retention.horizon import Horizon
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import marker_key

_KEEP = RetentionSettings(keep_last=1)


class _GarblingStore(FakeStore):
    """Answers some reads of one object with other bytes than are stored, and refuses those of another."""

    garbled = ""
    times = 0
    refused = ""

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        if key == self.refused:
            raise StoreError(ErrorKind.UNREACHABLE, "no answer")
        body = await super().get(key, limit_bytes=limit_bytes, fresh=fresh)
        if key != self.garbled or not self.times:
            return body
        self.times -= 1
        return body[:-5]


@pytest.fixture
def store() -> _GarblingStore:
    return _GarblingStore()


async def fill(store: FakeStore) -> SaveInfo:
    """Four checkpoints, of which the second is a final one: that is returned."""
    kinds = (Kind.PERIODIC, Kind.FINAL, Kind.JUST_IN_TIME, Kind.PERIODIC)
    return [await store_checkpoint(store, step, kind=kind) for step, kind in enumerate(kinds, start=1)][1]


async def pruned(store: FakeStore, settings: RetentionSettings, *, whole: bool) -> PruneReport:
    if whole:
        return await prune(store, settings, now=store.now)
    report = await prune_recent(store, settings, Horizon(), series={""}, now=store.now)
    assert report is not None
    return report


async def steps_left(store: FakeStore) -> list[int]:
    left = await list_committed(store)
    for one in left:
        assert await check(store, one) == ()
    return [one.step for one in left]


both_prunes = pytest.mark.parametrize("whole", [True, False], ids=["everything", "the newest alone"])


@both_prunes
async def test_a_final_checkpoint_stays_whole_unless_the_setting_lets_it_go(whole: bool, store: _GarblingStore) -> None:
    final = await fill(store)
    for _ in range(2):
        report = await pruned(store, _KEEP, whole=whole)
        assert await steps_left(store) == [4, 2]
        assert why_kept(report.plan)[final.save] == "final"
    await pruned(store, RetentionSettings(keep_last=1, keep_final=False), whole=whole)
    assert await steps_left(store) == [4]


@both_prunes
async def test_an_answer_that_is_damaged_once_costs_no_final_checkpoint(whole: bool, store: _GarblingStore) -> None:
    store.garbled, store.times = marker_key(await fill(store)), 1
    await pruned(store, _KEEP, whole=whole)
    assert store.times == 0
    assert 2 in await steps_left(store)


async def test_a_final_checkpoint_with_a_damaged_marker_is_not_told_from_another(store: _GarblingStore) -> None:
    store.garbled, store.times = marker_key(await fill(store)), 2
    await pruned(store, _KEEP, whole=True)
    assert await steps_left(store) == [4]


@both_prunes
async def test_trouble_with_the_store_stops_a_prune_that_asks_what_is_final(whole: bool, store: _GarblingStore) -> None:
    final = await fill(store)
    store.refused = marker_key(final)
    with pytest.raises(StoreError, match="no answer"):
        await pruned(store, _KEEP, whole=whole)
    assert [one.step for one in await list_committed(store)] == [4, 3, 2, 1]
