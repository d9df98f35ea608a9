"""Checkpoints whose small files lie in packs: what is on the volume after a restore, and what is said of damage."""

import asyncio
import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore import stored_checkpoints
from tests.restore.one_output import restore
from tests.restore.restored_volume import content
from tests.restore.stored_checkpoints import flip_byte, rank_files, store_packed_checkpoint, truncate

from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.catalog.reading import examine
from keepstep_agent.core.errors import ErrorKind, StoreError, VolumeError
from keepstep_agent.core.model import SaveInfo
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import manifest_key, marker_key, pack_key
from keepstep_agent.ports import ObjectStore
from keepstep_agent.restore.init_step import Restored


def small_files(step: int) -> dict[str, bytes]:
    files = {f"shard-{index % 7}/{index}.bin": f"{step}/{index}".encode() * index for index in range(100)}
    return files | {"empty": b""}


def all_files(step: int) -> dict[str, bytes]:
    return rank_files(step) | small_files(step)


async def stored(store: ObjectStore, step: int) -> SaveInfo:
    return await store_packed_checkpoint(store, step, alone=rank_files(step), packed=small_files(step))


async def run(store: ObjectStore, volume: Path) -> Restored | None:
    return await restore(
        store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / "state"
    )


async def test_packed_files_and_others_are_restored_together(real_store: ObjectStore, volume: Path) -> None:
    info = await stored(real_store, 100)
    seen: list[tuple[int, int]] = []
    restored = await restore(
        real_store,
        checkpoint_directory=volume / "checkpoints",
        volume=volume,
        state_directory=volume / "state",
        on_progress=lambda _, done, total: seen.append((done, total)),
    )
    assert restored is not None
    assert content(restored.path) == all_files(100)
    size = sum(len(body) for body in all_files(100).values())
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert restored.save == info.save


async def test_many_files_take_as_many_requests_as_there_are_packs(store: FakeStore, volume: Path) -> None:
    await store_packed_checkpoint(store, 1, alone={}, packed=small_files(1))
    store.calls.clear()
    await run(store, volume)
    packs = [key for method, key in store.calls if method == "get" and key.endswith(".tar")]
    assert len(packs) == len(set(packs)) == 3
    assert not [key for method, key in store.calls if method == "get_into"]


DAMAGE = {
    "a flipped byte": lambda store, info: flip_byte(store, pack_key(info, 0, 1), 2000),
    "a truncated pack": lambda store, info: truncate(store, pack_key(info, 0, 1)),
    "a missing pack": lambda store, info: store.delete(pack_key(info, 0, 1)),
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_a_damaged_pack_leads_to_the_next_older_checkpoint_and_is_named(
    what: str, store: FakeStore, volume: Path
) -> None:
    await stored(store, 100)
    await DAMAGE[what](store, await stored(store, 200))
    restored = await run(store, volume)
    assert restored is not None
    assert (restored.step, content(restored.path)) == (100, all_files(100))
    (reason,) = restored.skipped
    assert "pack-00000-00001.tar" in reason
    assert not list((volume / ".keepstep" / "incoming").iterdir())
    newest = (await list_committed(store))[0]
    (problem,) = await check(store, newest)
    assert problem.key.endswith("pack-00000-00001.tar")


async def test_a_damaged_file_in_a_pack_is_named_with_the_object_that_holds_it(store: FakeStore) -> None:
    info = await stored(store, 1)
    body = store.objects[pack_key(info, 0, 0)].body
    await flip_byte(store, pack_key(info, 0, 0), body.index(b"1/50" * 5))
    (committed,) = await list_committed(store)
    assert tuple((await examine(store, committed)).problems) == ()
    (problem,) = await check(store, committed)
    assert problem.key == pack_key(info, 0, 0)
    assert "shard-1/50.bin" in problem.what


async def test_a_byte_flipped_on_the_way_is_fetched_again(store: FakeStore, volume: Path) -> None:
    flipping = _FlipsOnce(store)
    await stored(flipping, 1)
    restored = await run(flipping, volume)
    assert restored is not None
    assert (restored.skipped, content(restored.path)) == ((), all_files(1))
    assert flipping.flipped


class _FlipsOnce(FakeStore):
    def __init__(self, store: FakeStore) -> None:
        super().__init__()
        self.objects = store.objects
        self.flipped = False

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        body = await super().get(key, limit_bytes=limit_bytes, fresh=fresh)
        if key.endswith("pack-00000-00000.tar") and not self.flipped:
            self.flipped = True
            position = body.index(b"1/50" * 5)
            return body[:position] + b"x" + body[position + 1 :]
        return body


async def test_a_pack_that_no_manifest_names_does_no_harm(store: FakeStore, volume: Path) -> None:
    info = await stored(store, 1)
    await store.put(pack_key(info, 0, 7), b"left by a try that another one replaced")
    restored = await run(store, volume)
    assert restored is not None
    assert restored.skipped == ()


async def test_a_file_that_the_volume_refuses_is_an_error_that_names_it(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_packed_checkpoint(store, 1, alone={}, packed=small_files(1))
    open_file = Folder.open_file

    def refuse(folder: Folder, path: str, *arguments: int) -> int:
        if path.endswith("38.bin"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(folder, path, *arguments)

    monkeypatch.setattr(Folder, "open_file", refuse)
    with pytest.raises(VolumeError, match=r"shard-3/38\.bin"):
        await run(store, volume)
    assert not list((volume / ".keepstep" / "incoming").iterdir())


async def test_a_pruned_save_loses_its_packs_before_its_manifests(store: FakeStore) -> None:
    old = await stored(store, 1)
    for step in (2, 3):
        await stored(store, step)
    store.calls.clear()
    await prune(store, RetentionSettings(keep_last=1), now=store.now)
    deleted = [key for method, key in store.calls if method == "delete" and old.save in key]
    assert deleted[0] == marker_key(old)
    assert deleted[-1] == manifest_key(old, 0, 1)
    assert pack_key(old, 0, 0) in deleted
    assert not [key for key in store.objects if old.save in key]


class _Changing(FakeStore):
    """Between the listing and the reading somebody else writes to one of the packs."""

    def __init__(self, store: FakeStore, key: str) -> None:
        super().__init__()
        self.objects = store.objects
        self._key = key

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        if key == self._key:
            await self.put(key, self.objects[key].body + b"more")
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)


async def test_a_pack_that_grew_after_it_was_listed_leads_to_the_next_older_checkpoint(
    store: FakeStore, volume: Path
) -> None:
    await stored(store, 100)
    key = pack_key(await stored(store, 200), 0, 1)
    restored = await run(_Changing(store, key), volume)
    assert restored is not None
    assert (restored.step, content(restored.path)) == (100, all_files(100))
    (reason,) = restored.skipped
    assert reason.startswith(f"{key} has ")


async def test_a_store_that_refuses_to_give_a_pack_does_not_make_it_damaged(store: FakeStore, volume: Path) -> None:
    info = await stored(store, 1)

    class Refusing(_Changing):
        async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
            if key == self._key:
                raise StoreError(ErrorKind.REQUEST_REFUSED, "the object is archived")
            return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)

    with pytest.raises(StoreError, match="archived"):
        await run(Refusing(store, pack_key(info, 0, 0)), volume)


@pytest.fixture
def few_open_files() -> Iterator[None]:
    """What a process may have open is far less than the files of a pack."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 200, before[1])
    )
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_open_files")
async def test_packs_of_more_files_than_a_process_may_open_are_restored(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_checkpoints, "_FILES_PER_PACK", 250)
    files = {f"{index:04d}": f"{index}".encode() for index in range(1000)}
    await store_packed_checkpoint(store, 1, alone={}, packed=files)
    restored = await run(store, volume)
    assert restored is not None
    assert content(restored.path) == files


async def test_every_packed_file_is_waited_for_once_it_is_written(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = await store_packed_checkpoint(store, 1, alone={}, packed=small_files(1))
    really_sync, on_disk = os.fsync, dict[Path, bytes]()

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_file():
            on_disk[path] = path.read_bytes()
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    await run(store, volume)
    incoming = volume / ".keepstep" / "incoming" / info.save
    assert {path: on_disk.get(incoming / path) for path in small_files(1)} == small_files(1)


async def test_an_error_of_the_disk_names_the_packed_file_whose_bytes_it_did_not_take(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_packed_checkpoint(store, 1, alone={}, packed=small_files(1))
    really_sync = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "38.bin":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(VolumeError, match=r"shard-3/38\.bin: Input/output error"):
        await run(store, volume)


async def test_a_restore_that_is_cancelled_while_the_disk_hangs_waits_for_it_without_stopping_everything_else(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = await store_packed_checkpoint(store, 1, alone={}, packed=small_files(1))
    began, released, seen = threading.Event(), threading.Event(), list[bool]()
    really_sync = os.fsync

    def hang(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "empty":
            began.set()
            seen.append(released.wait(HANG_SECONDS))
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", hang)
    restoring = asyncio.create_task(run(store, volume))
    assert await asyncio.to_thread(began.wait, HANG_SECONDS)
    restoring.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    restoring.cancel()  # nor does a second signal make it leave the thread behind
    for _ in range(100):
        await asyncio.sleep(0)
    incoming = volume / ".keepstep" / "incoming"
    assert list(incoming.iterdir()) == [incoming / info.save]
    assert not restoring.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    assert seen == [True]
    assert not list(incoming.iterdir())
