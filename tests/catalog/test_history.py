"""Destinations with a long history: what is read is what was asked for, not everything that there ever was."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from mooring_agent.catalog import markers
from mooring_agent.catalog.markers import list_step, newest_committed
from mooring_agent.core.model import Kind, SaveInfo
from mooring_agent.core.stored.object_layout import marker_key
from mooring_agent.ports import ObjectInfo
from mooring_agent.restore.init_step import Restored, restore


class ListingStore(FakeStore):
    """Counts what its listings have shown. `backwards`: it lists in an order of its own."""

    def __init__(self, *, backwards: bool = False) -> None:
        super().__init__()
        self.listed = 0
        self._backwards = backwards

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        found = [one async for one in super().list(prefix)]
        for one in reversed(found) if self._backwards else found:
            self.listed += 1
            yield one


async def store_markers(store: FakeStore, steps: Iterable[int]) -> None:
    """Store what a listing shows of checkpoints. Their markers are damaged."""
    for step in steps:
        info = SaveInfo(save=f"0123abcd-{step:06d}", name="n", step=step, kind=Kind.PERIODIC, world_size=1)
        await store.put(marker_key(info), b"")


async def run(store: FakeStore, volume: Path) -> Restored | None:
    agent = volume / ".mooring" / "agent"
    return await restore(store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=agent)


async def test_the_newest_are_found_on_the_first_page_of_a_listing() -> None:
    store = ListingStore()
    await store_markers(store, range(1, 10_001))
    newest = await newest_committed(store)
    assert [one.step for one in newest] == list(range(10_000, 9_001, -1))
    assert store.listed == 1_000


async def test_the_saves_of_one_step_are_listed_alone() -> None:
    store = ListingStore()
    await store_markers(store, range(1, 2_001))
    await store_checkpoint(store, 7, save="aaaaaaaa-000001")
    assert [one.save for one in await list_step(store, 7)] == ["aaaaaaaa-000001", "0123abcd-000007"]
    assert store.listed == 2


async def test_saves_that_share_a_step_with_others_on_the_next_page_are_not_torn_apart() -> None:
    store = ListingStore()
    await store_markers(store, range(1, 300))
    for number in range(1_100):
        await store_checkpoint(store, 300, save=f"aaaaaaaa-{number:06d}", saved_at=float(number))
    newest = await newest_committed(store)
    assert [one.save for one in newest[:2]] == ["aaaaaaaa-001099", "aaaaaaaa-001098"]
    assert len(newest) == 1_399


async def test_a_store_that_lists_in_another_order_is_listed_whole() -> None:
    store = ListingStore(backwards=True)
    await store_markers(store, range(1, 2_001))
    assert [one.step for one in await newest_committed(store)] == list(range(2_000, 0, -1))


async def test_restore_looks_further_back_when_all_of_the_newest_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markers, "_PAGE", 10)
    # After each checkpoint that it skips. That frees memory, and takes a second where a test's process has much.
    monkeypatch.setattr("gc.collect", lambda: 0)
    store = ListingStore()
    await store_checkpoint(store, 1)
    await store_markers(store, range(2, 46))
    restored = await run(store, tmp_path)
    assert restored is not None
    assert restored.step == 1
    assert len(restored.skipped) == 44


async def test_a_restore_of_the_newest_lists_one_page_of_markers_and_its_own_objects(tmp_path: Path) -> None:
    store = ListingStore()
    await store_markers(store, range(1, 5_001))
    await store_checkpoint(store, 6_000)
    own = sum(not key.startswith(".mooring/") for key in store.objects)
    restored = await run(store, tmp_path)
    assert restored is not None
    assert restored.step == 6_000
    assert store.listed == 1_000 + own
