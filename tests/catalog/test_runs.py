"""Runs below a prefix are found by a walk of folders, whatever else lies there, with few requests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.catalog import runs
from keepstep_agent.catalog.runs import find_runs
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.object_layout import PROBE_PREFIX

MARKER = ".keepstep/commits/999999999899.0123abcd-000100.json"


async def stored(*keys: str) -> FakeStore:
    store = FakeStore()
    for key in keys:
        await store.put(key, b"x")
    store.calls.clear()
    return store


async def test_a_destination_is_one_run_and_a_prefix_has_those_below_it() -> None:
    store = await stored(f"b/two/{MARKER}", "a/.keepstep/ledger/job/1.json", "b/notes/readme", "top", "c/plain/file")
    found = await find_runs(store)
    assert (found.runs, found.complete) == (("a/", "b/two/"), True)
    await store.put(MARKER, b"x")
    assert (await find_runs(store)).runs == ("",)


async def test_what_looks_like_a_run_in_the_saves_of_another_is_none() -> None:
    store = FakeStore()
    await store_checkpoint(store, 100)
    for key in list(store.objects):
        store.objects[f"one/{key}"] = store.objects.pop(key)
    await store.put(f"one/checkpoint-100/0123abcd-000100/{MARKER}", b"x")
    assert (await find_runs(store)).runs == ("one/",)


async def test_a_probe_of_a_prefix_makes_it_no_run() -> None:
    store = await stored(f"{PROBE_PREFIX}0a1b", f"one/{MARKER}")
    assert (await find_runs(store)).runs == ("one/",)


async def test_a_known_run_costs_no_request_and_no_object_is_listed_to_find_the_others() -> None:
    names = [f"team/{number}/" for number in range(50)]
    store = await stored(*(f"{name}{MARKER}" for name in names), *(f"{name}checkpoint-1/a/b" for name in names))
    first = await find_runs(store, known=frozenset(names[:-1]))
    assert first.runs == tuple(sorted(names))
    assert store.calls == [
        ("list_folders", ""),
        ("list_folders", "team/"),
        ("list_folders", "team/49/"),
        ("list", "team/49/.keepstep/"),
    ]


async def test_names_that_only_a_bucket_may_have_are_folders_like_others() -> None:
    names = ["../", "./", "%2e%2e/", "<script>alert(1)</script>/", "a//b/", "\u202egnp/", " /", "é/"]
    store = await stored(*(f"{name}{MARKER}" for name in names))
    assert (await find_runs(store)).runs == tuple(sorted(names))


async def test_the_walk_ends_at_its_depth_and_says_so() -> None:
    deepest = "".join(f"{level}/" for level in range(runs.MOST_LEVELS))
    store = await stored(f"{deepest}{MARKER}")
    assert (await find_runs(store)).runs == (deepest,)
    below = await find_runs(await stored(f"{deepest}more/{MARKER}"))
    assert (below.runs, below.complete) == ((), False)


@pytest.mark.parametrize("most", [1, 2, 5, 9])
async def test_the_walk_looks_into_so_many_folders_and_no_more(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(runs, "MOST_FOLDERS", most)
    store = await stored(*(f"{number}/{MARKER}" for number in range(9)))
    found = await find_runs(store)
    assert (len(found.runs), found.complete) == (most - 1, False)
    assert len([call for call in store.calls if call[0] == "list_folders"]) == most


async def test_a_store_that_is_away_is_no_empty_prefix() -> None:
    store = await stored(f"one/{MARKER}")
    store.fail("list_folders", ErrorKind.UNREACHABLE)
    with pytest.raises(StoreError):
        await find_runs(store)


async def test_a_folder_that_may_not_be_listed_hides_no_other_and_is_named() -> None:
    class Refusing(FakeStore):
        async def list_folders(self, prefix: str) -> AsyncIterator[str]:
            if prefix == self.refused:
                raise StoreError(ErrorKind.ACCESS_DENIED, "not yours")
            async for one in super().list_folders(prefix):
                yield one

        refused = "secret/"

    store = Refusing()
    for key in (f"one/{MARKER}", f"secret/two/{MARKER}"):
        await store.put(key, b"x")
    found = await find_runs(store)
    assert (found.runs, found.refused, found.complete) == (("one/",), ("secret/",), True)
    store.refused = ""
    with pytest.raises(StoreError):
        await find_runs(store)


async def test_runs_are_found_in_a_directory_too(tmp_path: Path) -> None:
    async with open_store(StoreSettings(destination=f"file://{tmp_path}/bucket")) as store:
        await store.probe()
        for run in ("one/", "team/two/"):
            await store.put(f"{run}{MARKER}", b"x")
        # What an upload that was killed leaves beside the runs.
        (tmp_path / "bucket" / ".keepstep" / "uploads" / "left").mkdir(parents=True)
        found = await find_runs(store)
    assert (found.runs, found.complete) == (("one/", "team/two/"), True)
