"""The init step: the newest committed checkpoint is on the volume after it, whatever was there before."""

import asyncio
import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore.restored_volume import content, leftovers, record, run
from tests.restore.stored_checkpoints import all_files, rank_files, store_checkpoint

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.core.errors import StoreError, VolumeError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectStore


async def test_the_newest_committed_checkpoint_is_put_in_its_place_with_a_record(
    real_store: ObjectStore, volume: Path
) -> None:
    for step in (100, 200, 30):
        await store_checkpoint(real_store, step, saved_at=1000.0)
    seen: list[tuple[str, int, int]] = []
    restored = await run(real_store, volume, on_progress=lambda *progress: seen.append(progress))
    assert restored is not None
    assert (restored.step, restored.downloaded, restored.skipped) == (200, True, ())
    assert restored.path == volume / "checkpoints" / "checkpoint-200"
    assert content(restored.path) == all_files(200)
    assert {path.name for path in (volume / "checkpoints").iterdir()} == {"checkpoint-200"}
    files = [{"path": path, "size": len(body)} for path, body in sorted(all_files(200).items())]
    assert record(volume, "checkpoint-200") == {
        "format": 1,
        "name": "checkpoint-200",
        "step": 200,
        "save": "0123abcd-000200",
        "kind": "periodic",
        "world_size": 1,
        "saved_at": 1000.0,
        "committed": True,
        "files": files,
    }
    assert not leftovers(volume)
    size = sum(len(body) for body in all_files(200).values())
    assert seen[0] == ("checkpoint-200", 0, size)
    assert seen[-1] == ("checkpoint-200", size, size)


async def test_a_checkpoint_of_two_ranks_is_put_together_from_both_manifests(
    real_store: ObjectStore, volume: Path
) -> None:
    await store_checkpoint(real_store, 7, world_size=2)
    restored = await run(real_store, volume)
    assert restored is not None
    assert content(restored.path) == all_files(7, ranks=2)


async def test_a_file_that_two_ranks_saved_alike_is_restored_once(store: FakeStore, volume: Path) -> None:
    shared = {"config.json": b"{}"}
    await store_checkpoint(store, 7, ranks=[rank_files(7, 0) | shared, rank_files(7, 1) | shared])
    restored = await run(store, volume)
    assert restored is not None
    assert content(restored.path) == all_files(7, ranks=2) | shared


async def test_a_file_that_two_ranks_saved_with_different_bytes_is_damage(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 7, ranks=[{"config.json": b"1"}, {"config.json": b"2"}])
    with pytest.raises(StoreError, match=r"config\.json has different bytes on two ranks"):
        await run(store, volume)


async def test_an_empty_destination_means_a_fresh_start(real_store: ObjectStore, volume: Path) -> None:
    assert await run(real_store, volume) is None
    assert not list((volume / "checkpoints").iterdir())


async def test_saves_without_a_marker_do_not_count(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 1)
    await store_checkpoint(store, 2, committed=False)
    restored = await run(store, volume)
    assert restored is not None
    assert restored.step == 1


async def test_the_very_same_save_that_is_here_already_is_not_downloaded_again(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 5)
    first = await run(store, volume)
    assert first is not None
    inode = (first.path / "model-0.safetensors").stat().st_ino
    store.calls.clear()
    again = await run(store, volume)
    assert again is not None
    assert not again.downloaded
    assert "get_into" not in {method for method, _ in store.calls}
    assert (first.path / "model-0.safetensors").stat().st_ino == inode


async def test_a_local_copy_with_other_bytes_of_the_same_size_is_replaced(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 5)
    first = await run(store, volume)
    assert first is not None
    (first.path / "rng_state_0.pth").write_bytes(b"0" * 100)
    again = await run(store, volume)
    assert again is not None
    assert again.downloaded
    assert content(again.path) == all_files(5)


async def test_another_save_under_the_same_name_is_replaced_whole(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 4, name="checkpoint-5", ranks=[{"stale": b"4", "folder/stale": b"4"}])
    await run(store, volume)
    await store_checkpoint(store, 5)
    restored = await run(store, volume)
    assert restored is not None
    assert content(restored.path) == all_files(5)
    assert not (restored.path / "folder").exists()
    assert not leftovers(volume)


async def test_no_record_speaks_for_a_place_that_is_being_changed(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_checkpoint(store, 5)
    first = await run(store, volume)
    assert first is not None
    (first.path / "rng_state_0.pth").unlink()

    rename = Folder.rename

    records = volume / ".keepstep" / "records"

    def fail(folder: Folder, path: str, to: Folder, to_path: str) -> None:
        if to_path.startswith("checkpoints/"):
            assert not list(records.iterdir())
            raise OSError(errno.EIO, "Input/output error")
        rename(folder, path, to, to_path)

    monkeypatch.setattr(Folder, "rename", fail)
    with pytest.raises(VolumeError):
        await run(store, volume)
    # The old one is back, with its record.
    assert len(content(first.path)) == len(all_files(5)) - 1
    assert record(volume, "checkpoint-5")["save"] == first.save


async def test_garbage_of_an_earlier_restore_is_removed_even_when_there_is_nothing_to_restore(
    store: FakeStore, volume: Path
) -> None:
    garbage = volume / ".keepstep" / "incoming" / "0123abcd-000001"
    garbage.mkdir(parents=True)
    (garbage / "half").write_bytes(b"x" * 1000)
    assert await run(store, volume) is None
    assert not leftovers(volume)


async def test_of_two_saves_of_one_step_the_one_saved_later_is_taken(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 5, save="ffffffff-000001", saved_at=1000.0)
    await store_checkpoint(store, 5, save="00000000-000001", saved_at=2000.0)
    restored = await run(store, volume)
    assert restored is not None
    assert restored.save == "00000000-000001"


_KILLED_MIDWAY = """
import asyncio, sys, time
from pathlib import Path
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.settings.values import StoreSettings
from tests.restore.one_output import restore

def hang_midway(name, done_bytes, total_bytes):
    if done_bytes > total_bytes // 2:
        print("midway", flush=True)
        time.sleep(600)

async def main(destination, volume):
    async with open_store(StoreSettings(destination=destination)) as store:
        places = {"checkpoint_directory": volume / "checkpoints", "volume": volume, "state_directory": volume / "state"}
        await restore(store, **places, on_progress=hang_midway)

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.fixture
def killed_midway(tmp_path: Path, volume: Path) -> str:
    """A destination with one checkpoint, whose restore to `volume` was killed when half of the bytes were there."""
    (tmp_path / "bucket").mkdir()
    destination = f"file://{tmp_path}/bucket"

    async def fill() -> None:
        async with open_store(StoreSettings(destination=destination)) as store:
            await store_checkpoint(store, 5)

    asyncio.run(fill())
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED_MIDWAY, destination, str(volume)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert any(line == "midway\n" for line in process.stdout)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=HANG_SECONDS)
    return destination


async def test_a_restore_killed_midway_shows_nothing_and_the_next_one_is_whole(
    killed_midway: str, volume: Path
) -> None:
    assert leftovers(volume)
    assert not list((volume / "checkpoints").iterdir())
    async with open_store(StoreSettings(destination=killed_midway)) as store:
        restored = await run(store, volume)
    assert restored is not None
    assert content(restored.path) == all_files(5)
    assert not leftovers(volume)
