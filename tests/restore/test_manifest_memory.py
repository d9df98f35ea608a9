"""Manifests are fetched only if they fit into the memory that there is; a forged one blocks no older save."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.harness.forged_checkpoint import of_nothing, of_parts, store_forged
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog import reading
from keepstep_agent.catalog.markers import list_committed, read_marker
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.catalog.reading import examine, load
from keepstep_agent.core.agent.commands import Commit, Turn
from keepstep_agent.core.agent.events import Committed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, RequestError, StoreError
from keepstep_agent.core.limits import MANIFEST_BYTES
from keepstep_agent.core.model import FileEntry
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored import manifest
from keepstep_agent.core.stored.manifest import decode_manifest, encode_marker, needed_bytes
from keepstep_agent.core.stored.object_layout import DAMAGED_PREFIX, manifest_key
from keepstep_agent.restore.init_step import Restored
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work import committer

MIB = 1024**2


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little as an agent may have."""
    for module in (reading, committer):
        monkeypatch.setattr(module, "memory_limit_bytes", lambda: 128 * MIB)


async def restored(store: FakeStore, volume: Path) -> Restored | None:
    return await restore(
        store,
        checkpoint_directory=volume / "checkpoints",
        volume=volume,
        state_directory=volume / ".keepstep",
    )


def fetched_manifests(store: FakeStore) -> list[str]:
    return [key for method, key in store.calls if method == "get" and "/.keepstep/manifest-" in key]


@pytest.mark.usefixtures("memory")
async def test_a_checkpoint_that_needs_more_memory_is_skipped_unread_and_said(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 1)
    sizes = await store_forged(store, 2, of_parts, files_of_rank=20, ranks=4)
    store.calls.clear()
    found = await restored(store, volume)
    assert found is not None
    assert found.step == 1
    needed = needed_bytes(files=80, manifests_bytes=sizes)
    assert f"needs {-(-needed // MIB)} MiB of memory" in found.skipped[0]
    assert "this process may have 128 MiB: raise its memory limit (`keepstep.dev/memory`)" in found.skipped[0]
    assert all("checkpoint-1/" in key for key in fetched_manifests(store))
    # It may be all right: nothing is said of it that prune would act on.
    assert not [one async for one in store.list(DAMAGED_PREFIX)]


async def test_a_checkpoint_of_few_files_is_stored_and_restored_with_less_memory_than_is_counted_on(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reading, committer):
        monkeypatch.setattr(module, "memory_limit_bytes", lambda: 64 * MIB)
    commit = await with_a_large_part_of_another_pod(store, files_of_rank=500, entry=of_nothing)
    assert isinstance(await committer.Committer(SystemClock()).commit(store, commit), Committed)
    assert (await restored(store, volume)) is not None


@pytest.mark.usefixtures("memory")
async def test_where_every_checkpoint_needs_more_memory_restore_fails_and_says_so(
    store: FakeStore, volume: Path
) -> None:
    await store_forged(store, 2, of_parts, files_of_rank=20, ranks=4)
    with pytest.raises(StoreError, match=r"keepstep\.dev/memory"):
        await restored(store, volume)


@pytest.mark.usefixtures("memory")
async def test_prune_does_not_count_on_a_checkpoint_that_needs_more_memory(store: FakeStore) -> None:
    await store_checkpoint(store, 1)
    await store_forged(store, 2, of_parts, files_of_rank=20, ranks=4)
    report = await prune(store, RetentionSettings(keep_last=1), now=2_000_000_000.0, dry_run=False)
    assert 1 in {one.step for one in await list_committed(store)}, report


@pytest.mark.usefixtures("memory")
async def test_verify_names_the_memory_that_a_checkpoint_needs(store: FakeStore) -> None:
    await store_forged(store, 2, of_parts, files_of_rank=20, ranks=4)
    (problem,) = tuple((await examine(store, (await list_committed(store))[0])).problems)
    assert "MiB of memory" in problem.what


async def test_a_marker_with_more_files_than_its_manifests_can_name_is_damage(store: FakeStore) -> None:
    await store_checkpoint(store, 2)
    await forge_file_count(store, 10**15)
    with pytest.raises(StoreError, match="more than manifests") as refused:
        await load(store, (await list_committed(store))[0])
    assert refused.value.kind is ErrorKind.CHECKPOINT_CORRUPT
    assert not fetched_manifests(store)


async def test_manifests_with_more_files_than_their_marker_says_are_not_all_read(store: FakeStore) -> None:
    await store_forged(store, 2, of_nothing, files_of_rank=200, ranks=100)
    await forge_file_count(store, 1000)
    with pytest.raises(StoreError, match="1000 files") as refused:
        await load(store, (await list_committed(store))[0])
    assert refused.value.kind is ErrorKind.CHECKPOINT_CORRUPT
    # Twice, for what one look finds wrong another may not; those of a look that were on their way included.
    assert len(fetched_manifests(store)) < 2 * 20


async def test_objects_that_no_manifest_can_name_are_not_all_kept(store: FakeStore) -> None:
    info = await store_checkpoint(store, 1)
    for number in range(1200):
        await store.put(f"{info.name}/{info.save}/other-{number}", b"")
    with pytest.raises(StoreError, match="has more than 1010 objects, and its marker names 4 files"):
        await load(store, (await list_committed(store))[0])
    assert not fetched_manifests(store)


async def test_of_thousands_of_problems_the_first_are_kept_and_all_are_counted(store: FakeStore) -> None:
    await store_forged(store, 2, of_nothing, files_of_rank=2000, ranks=1)
    for key in [one.key async for one in store.list("checkpoint-2/") if one.key.endswith(".tar")]:
        await store.delete(key)
    examination = await reading.examine(store, (await list_committed(store))[0])
    assert len(examination.problems) + examination.more_problems == 1
    await store_forged(store, 3, missing, files_of_rank=2000, ranks=1)
    for key in [one.key async for one in store.list("checkpoint-3/") if "/missing-" in one.key]:
        await store.delete(key)
    examination = await reading.examine(store, (await list_committed(store))[0])
    assert (len(examination.problems), examination.more_problems) == (1000, 1000)
    with pytest.raises(StoreError, match=r"\(and 1999 more\)"):
        await load(store, (await list_committed(store))[0])


@pytest.mark.usefixtures("memory")
async def test_a_commit_does_not_decode_others_manifests_that_no_restore_could_hold(store: FakeStore) -> None:
    commit = await with_a_large_part_of_another_pod(store, files_of_rank=40)
    with pytest.raises(RequestError, match=r"this agent cannot commit the save: .* MiB of memory"):
        await committer.Committer(SystemClock()).commit(store, commit)
    assert not fetched_manifests(store)


async def test_a_commit_counts_packed_files_and_packs_as_restore_does(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = await with_a_large_part_of_another_pod(store, files_of_rank=2000, entry=of_nothing)
    sizes = [one.size_bytes async for one in store.list("checkpoint-2/") if "/manifest-" in one.key]
    needed = needed_bytes(files=4000, manifests_bytes=sizes, largest_pack_bytes=1024)
    monkeypatch.setattr(committer, "memory_limit_bytes", lambda: needed - 1)
    with pytest.raises(RequestError, match="MiB of memory"):
        await committer.Committer(SystemClock()).commit(store, commit)
    monkeypatch.setattr(committer, "memory_limit_bytes", lambda: needed)
    assert isinstance(await committer.Committer(SystemClock()).commit(store, commit), Committed)


async def test_without_a_memory_limit_a_commit_has_that_of_the_table(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "memory_limit_bytes", lambda: None)
    # Of the other's, what a file of ten thousand parts takes: a tenth of it, to be quick.
    monkeypatch.setattr(committer, "MANIFEST_BYTES", MANIFEST_BYTES // 10)
    commit = await with_a_large_part_of_another_pod(store, files_of_rank=1 + MANIFEST_BYTES // 10 // 190_000)
    with pytest.raises(RequestError, match="nobody could restore this save"):
        await committer.Committer(SystemClock()).commit(store, commit)
    assert not fetched_manifests(store)


@pytest.mark.usefixtures("memory")
async def test_a_commit_does_not_keep_a_listing_that_does_not_fit(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "memory_limit_bytes", lambda: needed_bytes(files=50))
    monkeypatch.setattr(manifest, "_LITTLE_BYTES", 0)
    commit = await with_a_large_part_of_another_pod(store, files_of_rank=1)
    for number in range(100):
        await store.put(f"{commit.info.name}/{commit.info.save}/other-{number}", b"")
    with pytest.raises(RequestError, match="this agent cannot commit"):
        await committer.Committer(SystemClock()).commit(store, commit)


def missing(number: int) -> FileEntry:
    return FileEntry(path=f"missing-{number}", size_bytes=0, part_size_bytes=1, checksums=())


async def forge_file_count(store: FakeStore, count: int) -> None:
    """Of the newest marker."""
    (committed, *_) = await list_committed(store)
    marker = await read_marker(store, committed)
    changed = replace(marker, file_count=count)
    await store.put(committed.key, encode_marker(changed))
    store.calls.clear()


async def with_a_large_part_of_another_pod(
    store: FakeStore, *, files_of_rank: int, entry: Callable[[int], FileEntry] = of_parts
) -> Commit:
    """What the pod of rank 0 is about to commit."""
    await store_forged(store, 2, entry, files_of_rank=files_of_rank, ranks=2)
    (committed,) = await list_committed(store)
    marker = await read_marker(store, committed)
    key = manifest_key(marker.info, 0, 1)
    own = decode_manifest(await store.get(key, limit_bytes=1 << 30), key)
    await store.delete(committed.key)
    store.calls.clear()
    return Commit(
        work=WorkId(Operation.COMMIT, marker.info.save),
        info=marker.info,
        ranks=own,
        turn=Turn.WRITE,
        sweep_uploads=False,
    )
