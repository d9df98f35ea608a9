"""Notes of damage: found, read and removed, and no reader depends on them."""

import pytest
from tests.fakes.fake_store import FakeStore

from keepstep_agent.catalog.damage import clear_damage, damaged_saves, note_damage, read_damage
from keepstep_agent.core.errors import ErrorKind, StoreError


async def test_a_note_is_found_in_its_own_run_and_gone_when_the_save_is_found_whole() -> None:
    store = FakeStore()
    await note_damage(store, "save-1", "model.pt is wrong")
    assert await damaged_saves(store) == {"save-1"}
    assert await damaged_saves(store, "another/") == frozenset()
    assert await read_damage(store, "save-1") == "model.pt is wrong"
    await clear_damage(store, "save-1")
    assert (await damaged_saves(store), await read_damage(store, "save-1")) == (frozenset(), "")


@pytest.mark.parametrize("kind", [ErrorKind.ACCESS_DENIED, ErrorKind.REQUEST_REFUSED])
async def test_a_note_that_may_not_be_read_says_nothing(kind: ErrorKind) -> None:
    store = FakeStore()
    await note_damage(store, "save-1", "model.pt is wrong")
    store.fail("get", kind)
    assert await read_damage(store, "save-1") == ""


async def test_a_store_that_is_away_is_not_taken_for_a_note_without_words() -> None:
    store = FakeStore()
    await note_damage(store, "save-1", "model.pt is wrong")
    store.fail("get", ErrorKind.UNREACHABLE)
    with pytest.raises(StoreError, match="get fails"):
        await read_damage(store, "save-1")
