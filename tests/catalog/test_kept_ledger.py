"""A ledger that is kept from look to look says the same as one that is read whole, reads objects once, stays small."""

import random
from dataclasses import replace

import pytest
from tests.catalog.test_ledger import LIVES, by_agent, many, merge, note
from tests.fakes.fake_store import FakeStore

from keepstep_agent.catalog import kept_ledger
from keepstep_agent.catalog.kept_ledger import KeptLedger
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.policies.goodput import report_goodput
from keepstep_agent.core.policies.run_history import run_history
from keepstep_agent.core.stored.object_layout import LEDGER_PREFIX


async def look(kept: KeptLedger, store: FakeStore, run: str = "") -> int:
    """Look once; return how many objects were read."""
    before = len(store.calls)
    found = await kept.fetch(store, run, needed=False)
    if found is not None:
        kept.add(found)
    return sum(method == "get" for method, _ in store.calls[before:])


async def test_it_says_the_same_as_the_whole_ledger_and_reads_each_object_once() -> None:
    store, kept = FakeStore(), KeptLedger()
    for number, life in enumerate(many()):
        await note(store, [life], run="one/")
        assert await look(kept, store, "one/") == len(life.entries), number
    assert by_agent(kept.lives()) == by_agent(many())
    assert await look(kept, store, "one/") == 0
    assert kept.unread == 0


async def test_a_merge_at_the_destination_costs_one_read_and_changes_nothing() -> None:
    store, kept = FakeStore(), KeptLedger()
    await note(store, many())
    await look(kept, store)
    await merge(store, 2)
    assert await look(kept, store) == 1
    assert report_goodput(run_history(kept.lives())) == report_goodput(run_history(many()))


async def test_another_ledger_in_the_same_place_replaces_it() -> None:
    store, kept = FakeStore(), KeptLedger()
    await note(store)
    await look(kept, store)
    store.objects.clear()
    other = [replace(LIVES[0], agent="other", attempt="next")]
    await note(store, other)
    await look(kept, store)
    assert by_agent(kept.lives()) == by_agent(other)


async def test_a_look_that_fails_is_made_up_for_by_the_next() -> None:
    store, kept = FakeStore(), KeptLedger()
    await note(store, LIVES[:1])
    await look(kept, store)
    await note(store, LIVES[1:])
    store.fail("get", ErrorKind.UNREACHABLE)
    with pytest.raises(StoreError):
        await look(kept, store)
    await look(kept, store)
    assert by_agent(kept.lives()) == by_agent(LIVES)


async def test_what_cannot_be_read_is_counted_and_not_asked_for_again() -> None:
    store, kept = FakeStore(), KeptLedger()
    keys = await note(store)
    await store.put(keys[0], b"garbage")
    await look(kept, store)
    assert kept.unread == 1
    await note(store, [replace(LIVES[0], agent="later")])
    assert await look(kept, store) == len(LIVES[0].entries)
    assert kept.unread == 1


async def test_what_the_store_refuses_is_tried_by_one_read_a_look_until_it_gives_it() -> None:
    store, kept = FakeStore(), KeptLedger()
    keys = await note(store)
    store.fail("get", ErrorKind.ACCESS_DENIED, times=len(keys) + 2)
    assert await look(kept, store) == len(keys)
    assert (kept.unread, "a test wants it" in kept.refusal) == (len(keys), True)
    for _ in range(2):
        assert await look(kept, store) == 1
        assert kept.unread == len(keys)
    assert await look(kept, store) == len(keys)
    assert (kept.unread, kept.refusal) == (0, "")
    assert by_agent(kept.lives()) == by_agent(LIVES)
    assert await look(kept, store) == 0


async def test_of_too_large_a_ledger_the_newest_part_is_kept_and_the_rest_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, kept = FakeStore(), KeptLedger()
    keys = await note(store)
    monkeypatch.setattr(kept_ledger, "MOST_BYTES", 900)
    await look(kept, store)
    entries = [entry for life in kept.lives() for entry in life.entries]
    assert 0 < len(entries) == len(keys) - kept.unread < len(keys)
    assert entries == list(LIVES[1].entries[-len(entries) :])


async def test_pieces_that_are_too_many_leave_the_oldest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_ledger, "_PIECE_BYTES", 400)
    store, kept = FakeStore(), KeptLedger()
    await note(store, many())
    await look(kept, store)
    assert by_agent(kept.lives()) == by_agent(many())
    monkeypatch.setattr(kept_ledger, "MOST_BYTES", 2000)
    kept.add([])
    assert kept.unread > 0
    assert 0 < len(kept.lives()) < len(many())


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_happens_to_the_ledger_in_between_it_ends_at_what_is_there(seed: int) -> None:
    chance, store, kept = random.Random(seed), FakeStore(), KeptLedger()
    lives = many()
    for life in lives:
        await note(store, [life])
        if chance.random() < 0.5:
            store.now += chance.choice([0.0, 9_000.0])
            await merge(store, chance.choice([0.5, 2]))
        if chance.random() < 0.2:
            kept.forget()
        if chance.random() < 0.3:
            store.fail(chance.choice(["get", "list"]), ErrorKind.UNREACHABLE)
        try:
            await look(kept, store)
        except StoreError:
            continue
    await note(store, [replace(LIVES[0], agent="last")])
    store._failures.clear()
    await look(kept, store)
    expected = [*lives, replace(LIVES[0], agent="last")]
    assert report_goodput(run_history(kept.lives())) == report_goodput(run_history(expected))
    listed = [one.key async for one in store.list(LEDGER_PREFIX)]
    assert kept.kept_bytes < 100 * len(listed) + 10_000
