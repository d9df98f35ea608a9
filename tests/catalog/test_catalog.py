"""Reading, checking and pruning a destination."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import (
    DAMAGE,
    DAMAGED_OBJECT,
    PART_BYTES,
    all_files,
    flip_byte,
    rank_files,
    store_checkpoint,
    truncate,
)

from keepstep_agent.adapters.records import recorded_save
from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.catalog.reading import examine, load
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.policies.restore_choice import Pin, encode_pin
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import file_key, manifest_key, marker_key, pin_key
from keepstep_agent.ports import ObjectInfo
from keepstep_api.names import RESUMED

DAY = 24 * 3600.0


async def test_committed_saves_are_listed_newest_first_and_others_not(store: FakeStore) -> None:
    for step in (30, 100, 9):
        await store_checkpoint(store, step)
    await store_checkpoint(store, 200, committed=False)
    await store.put(".keepstep/commits/notes.txt", b"not ours")
    assert [one.step for one in await list_committed(store)] == [100, 30, 9]


async def test_markers_are_read_only_to_order_saves_of_one_step(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    await store_checkpoint(store, 2, save="ffffffff-000001", saved_at=5.0)
    await store_checkpoint(store, 2, save="00000000-000001", saved_at=6.0)
    store.calls.clear()
    assert [one.save for one in await list_committed(store)] == [
        "00000000-000001",
        "ffffffff-000001",
        "0123abcd-000001",
    ]
    assert len([key for method, key in store.calls if method == "get"]) == 2


async def test_a_loaded_checkpoint_has_every_file_of_every_rank(store: FakeStore) -> None:
    await store_checkpoint(store, 1, world_size=3)
    (committed,) = await list_committed(store)
    checkpoint = await load(store, committed)
    assert [file.entry.path for file in checkpoint.files] == sorted(all_files(1, ranks=3))
    assert [manifest.rank for manifest in checkpoint.manifests] == [0, 1, 2]
    assert checkpoint.size_bytes == checkpoint.marker.size_bytes


@pytest.mark.parametrize("part_size_bytes", [PART_BYTES // 3, 2 * PART_BYTES])
async def test_a_file_of_two_ranks_may_be_cut_into_different_parts_and_is_there_once(
    part_size_bytes: int, store: FakeStore
) -> None:
    files = rank_files(1)
    await store_checkpoint(store, 1, ranks=[files, files], part_sizes_bytes={1: part_size_bytes})
    (committed,) = await list_committed(store)
    assert await check(store, committed) == ()
    checkpoint = await load(store, committed)
    assert [file.entry.path for file in checkpoint.files] == sorted(files)


@pytest.mark.parametrize("part_size_bytes", [PART_BYTES // 3, PART_BYTES, 2 * PART_BYTES])
async def test_two_ranks_that_claim_one_path_for_different_bytes_are_a_problem_that_names_it(
    part_size_bytes: int, store: FakeStore
) -> None:
    body = rank_files(1)["model-0.safetensors"]
    ranks = [{"state.pt": body}, {"state.pt": body[:-1] + bytes([body[-1] ^ 1])}]
    info = await store_checkpoint(store, 1, ranks=ranks, part_sizes_bytes={1: part_size_bytes})
    (committed,) = await list_committed(store)
    (problem,) = tuple((await examine(store, committed)).problems)
    assert problem.key == file_key(info, "state.pt")
    assert "different bytes" in problem.what


@pytest.mark.parametrize("what", DAMAGE)
async def test_every_damage_is_a_problem_that_names_its_object(what: str, store: FakeStore) -> None:
    await DAMAGE[what](store, await store_checkpoint(store, 1))
    (committed,) = await list_committed(store)
    (problem,) = await check(store, committed)
    assert DAMAGED_OBJECT[what] in problem.key
    assert problem.what


async def test_all_problems_are_found_at_once(store: FakeStore) -> None:
    info = await store_checkpoint(store, 1, world_size=2)
    await store.delete(file_key(info, "rng_state_0.pth"))
    await truncate(store, file_key(info, "optimizer/state-1.pt"))
    await store.put(manifest_key(info, 2, 1), b"{}")
    (committed,) = await list_committed(store)
    problems = tuple((await examine(store, committed)).problems)
    assert {problem.key for problem in problems} == {
        file_key(info, "rng_state_0.pth"),
        file_key(info, "optimizer/state-1.pt"),
        manifest_key(info, 2, 1),
    }
    with pytest.raises(StoreError, match=r"\(and 2 more\)"):
        await load(store, committed)


async def test_sizes_alone_do_not_see_a_flipped_byte_and_the_deep_check_says_where_it_is(store: FakeStore) -> None:
    info = await store_checkpoint(store, 1)
    key = file_key(info, "model-0.safetensors")
    for position in (PART_BYTES + 1, 4 * PART_BYTES):
        await flip_byte(store, key, position)
    (committed,) = await list_committed(store)
    assert tuple((await examine(store, committed)).problems) == ()
    seen: list[tuple[int, int]] = []
    problems = await check(store, committed, on_progress=lambda *progress: seen.append(progress))
    assert [problem.key for problem in problems] == [key, key]
    assert [f"bytes {part * PART_BYTES} to" in str(problems) for part in (0, 1, 4)] == [False, True, True]
    assert seen[-1][0] == seen[-1][1] == sum(len(body) for body in all_files(1).values())


async def test_a_marker_of_another_save_is_damage(store: FakeStore) -> None:
    first, second = await store_checkpoint(store, 1), await store_checkpoint(store, 2)
    await store.put(marker_key(second), await store.get(marker_key(first), limit_bytes=100_000))
    with pytest.raises(StoreError, match="is the marker of step 1"):
        await load(store, (await list_committed(store))[0])


async def test_a_manifest_of_another_save_is_damage(store: FakeStore) -> None:
    info = await store_checkpoint(store, 1)
    other = replace(info, save="99999999-000001")
    await store_checkpoint(store, 1, save=other.save)
    await store.put(manifest_key(info, 0, 1), await store.get(manifest_key(other, 0, 1), limit_bytes=100_000))
    committed = {one.save: one for one in await list_committed(store)}
    with pytest.raises(StoreError, match=r"manifest-00000-00001\.json"):
        await load(store, committed[info.save])


async def test_trouble_with_the_store_is_raised_and_no_problem_of_the_checkpoint(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    (committed,) = await list_committed(store)
    for method in ("get", "list", "get_into"):
        store.fail(method, ErrorKind.UNREACHABLE)
        with pytest.raises(StoreError) as caught:
            await check(store, committed)
        assert caught.value.kind is ErrorKind.UNREACHABLE


async def steps_left(store: FakeStore) -> list[int]:
    left = await list_committed(store)
    for one in left:
        assert await check(store, one) == ()
    return [one.step for one in left]


async def test_prune_keeps_the_last_ones_whole_and_leaves_nothing_of_the_others(store: FakeStore) -> None:
    infos = [await store_checkpoint(store, step) for step in (1, 2, 3, 4)]
    await store.put("README.md", b"somebody's")
    report = await prune(store, RetentionSettings(keep_last=2), now=store.now)
    assert await steps_left(store) == [4, 3]
    assert {one.save for one in report.plan.deletions} == {infos[0].save, infos[1].save}
    assert report.freed_bytes > 0
    assert not [key for key in store.objects if infos[0].save in key or infos[1].save in key]
    assert "README.md" in store.objects


async def test_a_dry_run_deletes_nothing_and_says_the_same(store: FakeStore) -> None:
    for step in (1, 2, 3):
        await store_checkpoint(store, step)
    before = dict(store.objects)
    shown = await prune(store, RetentionSettings(keep_last=1), now=store.now, dry_run=True)
    assert store.objects == before
    assert (await prune(store, RetentionSettings(keep_last=1), now=store.now)).plan == shown.plan


async def test_each_marker_goes_before_its_data(store: FakeStore) -> None:
    infos = [await store_checkpoint(store, step) for step in (1, 2, 3)]
    await prune(store, RetentionSettings(keep_last=1), now=store.now)
    deletes = [key for method, key in store.calls if method == "delete"]
    for info in infos[:2]:
        own = [key for key in deletes if info.save in key]
        assert own[0] == marker_key(info)
        assert own[-1] == manifest_key(info, 0, 1)


@pytest.mark.parametrize("what", DAMAGE)
async def test_a_damaged_newest_that_restore_skipped_does_not_cost_the_older_good_one(
    what: str, store: FakeStore, tmp_path: Path
) -> None:
    await store_checkpoint(store, 1)
    await store_checkpoint(store, 2)
    damaged = await store_checkpoint(store, 3)
    await DAMAGE[what](store, damaged)
    assert (await resume(store, tmp_path)) == 2
    await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert [one.step for one in await list_committed(store)] == [3, 2]
    store.now += 1
    await store_checkpoint(store, 4)
    await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert await steps_left(store) == [4]
    assert not [key for key in store.objects if damaged.save in key]


async def test_what_a_run_commits_after_it_fell_back_stays_though_the_damaged_one_has_a_higher_step(
    store: FakeStore, tmp_path: Path
) -> None:
    await store_checkpoint(store, 900)
    await flip_byte(store, file_key(await store_checkpoint(store, 1000), "model-0.safetensors"), 100)
    # Its rights are to read only: nothing in the bucket says what it found.
    store.fail("put", ErrorKind.ACCESS_DENIED)
    assert (await resume(store, tmp_path / "first")) == 900
    store.now += 100
    again = await store_checkpoint(store, 950)
    for resumed in (recorded_save(tmp_path / "first" / "state", RESUMED), ""):
        await prune(store, RetentionSettings(keep_last=1), now=store.now, resumed_from=resumed, known=[again.save])
    assert [one.step for one in await list_committed(store)] == [1000, 950]
    assert (await resume(store, tmp_path / "second")) == 950


async def test_the_record_of_what_was_resumed_from_is_that_of_the_last_restore(
    store: FakeStore, tmp_path: Path
) -> None:
    older, newer = [await store_checkpoint(store, step) for step in (1, 2)]
    assert recorded_save(tmp_path / "state", RESUMED) == ""
    await resume(store, tmp_path)
    assert recorded_save(tmp_path / "state", RESUMED) == newer.save
    await truncate(store, file_key(newer, "model-0.safetensors"))
    await resume(store, tmp_path)
    assert recorded_save(tmp_path / "state", RESUMED) == older.save


async def resume(store: FakeStore, volume: Path) -> int:
    """The step that a restore on this volume ends at."""
    restored = await restore(
        store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / "state"
    )
    assert restored is not None
    return restored.step


async def test_what_is_resumed_from_and_what_a_recent_pin_names_stay(store: FakeStore) -> None:
    infos = {step: await store_checkpoint(store, step) for step in (1, 2, 3, 4)}
    for attempt, step, age in (("new", 1, 0.0), ("old", 3, 2 * DAY)):
        store.now -= age
        pin = Pin(attempt=attempt, markers=(marker_key(infos[step]),))
        await store.put(pin_key(attempt, 0), encode_pin(pin))
        store.now += age
    await prune(store, RetentionSettings(keep_last=1), now=store.now, resumed_from=infos[2].save)
    assert await steps_left(store) == [4, 2, 1]


async def test_a_listing_that_shrank_refuses(store: FakeStore) -> None:
    for step in (1, 2, 3):
        await store_checkpoint(store, step)
    report = await prune(store, RetentionSettings(keep_last=1), now=store.now, known=["0123abcd-000009"])
    assert "0123abcd-000009" in report.plan.refused
    assert await steps_left(store) == [3, 2, 1]


async def test_an_interrupted_prune_leaves_no_marker_without_data_and_the_next_one_finishes(store: FakeStore) -> None:
    old = await store_checkpoint(store, 1)
    store.now += 3 * DAY
    await store_checkpoint(store, 2)
    store.fail("delete", ErrorKind.UNREACHABLE, after_acting=True)
    with pytest.raises(StoreError):
        await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert await steps_left(store) == [2]
    assert any(old.save in key for key in store.objects)
    await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert not any(old.save in key for key in store.objects)


async def test_a_save_without_marker_is_deleted_even_if_the_store_protects_its_files(store: FakeStore) -> None:
    for step in (1, 2):
        await store_checkpoint(store, step)
        store.now += 60
    delete = store.delete

    async def refuse(key: str) -> None:
        if key.startswith("checkpoint-1/"):
            raise StoreError(ErrorKind.OBJECT_LOCKED, f"{key} is protected")
        await delete(key)

    store.delete = refuse  # type: ignore[method-assign]
    report = await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert [one.step for one in await list_committed(store)] == [2]
    (deletion,) = report.plan.deletions
    assert (deletion.save, report.freed_bytes) == ("0123abcd-000001", 0)
    assert deletion.reason == "1 newer is valid; objects of it stay: the store's retention protects it"
    store.delete = delete  # type: ignore[method-assign]
    store.now += 2 * 24 * 3600.0
    await store_checkpoint(store, 3)
    await prune(store, RetentionSettings(keep_last=2), now=store.now)
    assert not [key for key in store.objects if key.startswith("checkpoint-1/")]


async def test_a_save_that_commits_while_prune_looks_is_neither_judged_nor_collected(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    racing = _CommitsDuringTheListing()
    racing.objects = store.objects
    await store_checkpoint(racing, 5, save="aaaaaaaa-000005")
    racing.now += 9 * DAY
    await store_checkpoint(racing, 6)
    report = await prune(racing, RetentionSettings(keep_last=1), now=racing.now + 2 * DAY)
    assert {one.save for one in report.plan.deletions} == {"aaaaaaaa-000005", "0123abcd-000001"}
    assert 3 in await steps_left(racing)
    await racing.close()


class _CommitsDuringTheListing(FakeStore):
    """Step 3 shows as committed between the listing of the markers and that of everything, and its objects are old."""

    raced = False

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        if not prefix and not self.raced:
            self.raced = True
            self.now -= 5 * DAY
            await store_checkpoint(self, 3)
            self.now += 5 * DAY
        async for one in super().list(prefix):
            yield one


async def test_left_over_uploads_are_aborted_and_young_ones_not(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    await store.create_upload("checkpoint-2/0123abcd-c000002/model.pt")
    store.now += 2 * DAY
    young = await store.create_upload("checkpoint-3/0123abcd-c000003/model.pt")
    report = await prune(store, RetentionSettings(), now=store.now)
    assert report.aborted_uploads == ("checkpoint-2/0123abcd-c000002/model.pt",)
    assert list(store.uploads) == [young]


async def test_many_saves_that_never_committed_cost_one_more_listing(store: FakeStore) -> None:
    for number in range(20):
        await store_checkpoint(store, 1, save=f"89abcdef-{number:06}", committed=False)
    store.now += 2 * DAY
    await store_checkpoint(store, 2)
    store.calls.clear()
    report = await prune(store, RetentionSettings(), now=store.now + DAY)
    assert len(report.plan.deletions) == 20
    assert len([key for method, key in store.calls if method == "list"]) <= 5
