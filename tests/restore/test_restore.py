"""The init step: what is on the volume after it, for every state of the destination and of the volume before it."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import (
    DAMAGE,
    DAMAGED_OBJECT,
    all_files,
    flip_byte,
    rank_files,
    store_checkpoint,
)

from mooring.checkpoints.records import damage, read_records
from mooring_agent.adapters.open_store import open_store
from mooring_agent.adapters.retrying_store import RetryingStore, RetryPolicy
from mooring_agent.adapters.volume.shared_volume import Folder
from mooring_agent.core.errors import ErrorKind, MooringError, RequestError, StoreError, VolumeError
from mooring_agent.core.settings.values import StoreSettings
from mooring_agent.core.stored.object_layout import file_key
from mooring_agent.ports import ObjectStore, StoreWriter
from mooring_agent.restore.init_step import Restored, restore


async def run(store: StoreWriter, volume: Path, **options: Any) -> Restored | None:
    options = {"state_directory": volume / ".mooring" / "agent", **options}
    return await restore(store, checkpoint_directory=volume / "checkpoints", volume=volume, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(volume: Path, name: str) -> Any:
    return json.loads((volume / ".mooring" / "records" / f"{name}.json").read_text())


def leftovers(volume: Path) -> list[Path]:
    return list((volume / ".mooring" / "incoming").iterdir())


def found(folder: Path, name: str) -> list[Path]:
    return list(folder.rglob(name))


async def test_the_newest_committed_checkpoint_is_put_in_its_place_with_a_record(
    real_store: ObjectStore, volume: Path
) -> None:
    for step in (100, 200, 30):
        await store_checkpoint(real_store, step)
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


NAME = "epoch=1-step=7.ckpt"
BODY = rank_files(7)["model-0.safetensors"]


async def test_a_checkpoint_that_is_a_file_comes_back_as_that_file_and_is_known_there(
    real_store: ObjectStore, volume: Path
) -> None:
    info = await store_checkpoint(real_store, 7, name=NAME, ranks=[{NAME: BODY}], single_file=True)
    restored = await run(real_store, volume)
    assert restored is not None
    assert restored.path == volume / "checkpoints" / NAME
    assert restored.path.read_bytes() == BODY
    assert not leftovers(volume)
    # As the client's own records are: the file is the checkpoint.
    assert record(volume, NAME)["files"] == [{"path": "", "size": len(BODY)}]
    assert (one := read_records(volume / ".mooring" / "records")[0]).save == info.save
    assert damage(one, restored.path) is None
    again = await run(real_store, volume)
    assert again is not None
    assert not again.downloaded

    with restored.path.open("r+b") as file:
        file.write(b"damaged")
    again = await run(real_store, volume)
    assert again is not None
    assert again.downloaded
    assert restored.path.read_bytes() == BODY
    assert not leftovers(volume)


@pytest.mark.parametrize("body", [BODY, b""])
@pytest.mark.parametrize("before", ["folder", "file"])
async def test_a_file_takes_the_place_of_whatever_has_its_name(
    before: str, body: bytes, store: FakeStore, volume: Path
) -> None:
    place = volume / "checkpoints" / NAME
    await store_checkpoint(store, 6, name=NAME, ranks=[{NAME: b"other"}], single_file=before == "file")
    await run(store, volume)
    assert place.is_dir() == (before == "folder")
    await store_checkpoint(store, 7, name=NAME, ranks=[{NAME: body}], single_file=True)
    await run(store, volume)
    assert place.read_bytes() == body
    assert not leftovers(volume)
    await store_checkpoint(store, 8, name=NAME, ranks=[{NAME: b"folder"}])
    await run(store, volume)
    assert content(place) == {NAME: b"folder"}
    assert not leftovers(volume)


@pytest.mark.parametrize("ranks", [[{NAME: BODY}, {}, {}], [{}, {NAME: BODY}], [{NAME: BODY}, {NAME: BODY}]])
async def test_ranks_that_brought_one_file_or_nothing_get_that_file(
    ranks: list[dict[str, bytes]], store: FakeStore, volume: Path
) -> None:
    await store_checkpoint(store, 7, name=NAME, ranks=ranks, single_file=True)
    restored = await run(store, volume)
    assert restored is not None
    assert restored.path.read_bytes() == BODY


async def test_ranks_that_brought_a_file_each_get_a_folder_of_them(store: FakeStore, volume: Path) -> None:
    ranks = [{"rank-0.pt": b"0"}, {"rank-1.pt": b"1"}]
    await store_checkpoint(store, 7, ranks=ranks, single_file=True)
    restored = await run(store, volume)
    assert restored is not None
    assert content(restored.path) == {"rank-0.pt": b"0", "rank-1.pt": b"1"}


async def test_an_empty_destination_means_a_fresh_start(real_store: ObjectStore, volume: Path) -> None:
    assert await run(real_store, volume) is None
    assert not list((volume / "checkpoints").iterdir())


async def test_saves_without_a_marker_do_not_count(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 1)
    await store_checkpoint(store, 2, committed=False)
    restored = await run(store, volume)
    assert restored is not None
    assert restored.step == 1


@pytest.mark.parametrize("what", DAMAGE)
async def test_damage_leads_to_the_next_older_checkpoint_and_names_the_object(
    what: str, real_store: ObjectStore, volume: Path
) -> None:
    await store_checkpoint(real_store, 100)
    newest = await store_checkpoint(real_store, 200)
    await DAMAGE[what](real_store, newest)
    restored = await run(real_store, volume)
    assert restored is not None
    assert restored.step == 100
    assert content(restored.path) == all_files(100)
    assert len(restored.skipped) == 1
    assert DAMAGED_OBJECT[what] in restored.skipped[0]
    assert {path.name for path in (volume / "checkpoints").iterdir()} == {"checkpoint-100"}
    assert not leftovers(volume)


async def test_a_run_whose_checkpoints_are_all_damaged_stops_instead_of_starting_from_zero(
    store: FakeStore, volume: Path
) -> None:
    for step in (1, 2):
        await flip_byte(store, file_key(await store_checkpoint(store, step), "model-0.safetensors"), 9)
    with pytest.raises(StoreError, match=r"none of 2 .*checkpoint-2/.*model-0\.safetensors") as caught:
        await run(store, volume)
    assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT
    assert "mooring verify" in caught.value.hint
    assert not list((volume / "checkpoints").iterdir())
    assert not leftovers(volume)


@pytest.mark.parametrize("path", ["../../escape", "/etc/escape", ".mooring/escape", "a/../../../escape"])
async def test_a_manifest_whose_paths_leave_the_checkpoint_is_damage(
    path: str, store: FakeStore, volume: Path, tmp_path: Path
) -> None:
    await store_checkpoint(store, 1, ranks=[{path: b"x"}])
    with pytest.raises(StoreError) as caught:
        await run(store, volume)
    assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT
    assert not found(tmp_path, "escape")


async def test_a_path_that_is_both_file_and_folder_is_damage(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 1, ranks=[{"a": b"x", "a/b": b"y"}])
    with pytest.raises(StoreError, match="lies below the file a"):
        await run(store, volume)


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
    place = volume / "checkpoints" / "checkpoint-5"
    place.mkdir(parents=True)
    (place / "stale").write_text("of another save")
    await store_checkpoint(store, 5)
    restored = await run(store, volume)
    assert restored is not None
    assert content(place) == all_files(5)
    assert not leftovers(volume)


async def test_no_record_speaks_for_a_place_that_is_being_changed(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_checkpoint(store, 5)
    first = await run(store, volume)
    assert first is not None
    (first.path / "rng_state_0.pth").unlink()

    rename = Folder.rename

    def fail(folder: Folder, path: str, to: Folder, to_path: str) -> None:
        if to_path.startswith("checkpoints/"):
            raise OSError(errno.EIO, "Input/output error")
        rename(folder, path, to, to_path)

    monkeypatch.setattr(Folder, "rename", fail)
    with pytest.raises(VolumeError):
        await run(store, volume)
    assert not list((volume / ".mooring" / "records").iterdir())


async def test_garbage_of_an_earlier_restore_is_removed_even_when_there_is_nothing_to_restore(
    store: FakeStore, volume: Path
) -> None:
    garbage = volume / ".mooring" / "incoming" / "0123abcd-000001"
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


async def test_a_byte_flipped_on_the_way_is_fetched_again(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 5)
    flipping = _FlipsOnce(store)
    restored = await run(flipping, volume)
    assert restored is not None
    assert restored.skipped == ()
    assert content(restored.path) == all_files(5)


class _FlipsOnce(RetryingStore):
    """The first answer with bytes has a wrong one."""

    flipped = False

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, version: str, descriptor: int) -> int:
        checksum = await super().get_into(
            key, offset_bytes=offset_bytes, size_bytes=size_bytes, version=version, descriptor=descriptor
        )
        if not self.flipped and size_bytes:
            self.flipped = True
            os.pwrite(descriptor, b"?", offset_bytes)
            return checksum ^ 1
        return checksum


async def test_passing_errors_are_waited_out(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 5)
    for method in ("list", "get", "get_into"):
        store.fail(method, ErrorKind.UNREACHABLE, times=2)
    restored = await run(RetryingStore(store, RetryPolicy(first_wait_seconds=0.01)), volume)
    assert restored is not None


@pytest.mark.parametrize("method", ["list", "get", "get_into"])
@pytest.mark.parametrize("kind", [ErrorKind.UNREACHABLE, ErrorKind.ACCESS_DENIED, ErrorKind.BUCKET_MISSING])
async def test_trouble_with_the_store_is_an_error_and_never_an_older_checkpoint_or_a_fresh_start(
    method: str, kind: ErrorKind, store: FakeStore, volume: Path
) -> None:
    await store_checkpoint(store, 1)
    await store_checkpoint(store, 2)
    store.fail(method, kind, times=1000)
    with pytest.raises(StoreError) as caught:
        await run(RetryingStore(store, RetryPolicy(attempts=3, first_wait_seconds=0.01)), volume)
    assert caught.value.kind is kind
    assert not list((volume / "checkpoints").iterdir())
    assert not leftovers(volume)


async def test_a_checkpoint_directory_that_leads_out_of_the_volume_is_refused(
    store: FakeStore, volume: Path, tmp_path: Path
) -> None:
    await store_checkpoint(store, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (volume / "checkpoints").symlink_to(outside)
    with pytest.raises(RequestError) as caught:
        await run(store, volume)
    assert caught.value.kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert list(outside.iterdir()) == []


@pytest.fixture
def small_volume(volume: Path) -> Iterator[Path]:
    """A volume of 256 KiB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", volume], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield volume
    subprocess.run(["umount", volume], check=True)


@pytest.mark.root
async def test_a_volume_that_is_too_small_is_said_with_sizes_before_anything_is_fetched(
    store: FakeStore, small_volume: Path
) -> None:
    await store_checkpoint(store, 1, ranks=[{"small": b"x"}])
    await store_checkpoint(store, 2)
    with pytest.raises(VolumeError, match=r"needs [\d,]+ bytes .* has [\d,]+ .* free") as caught:
        await run(store, small_volume)
    assert caught.value.kind is ErrorKind.DISK_FULL
    assert "get_into" not in {method for method, _ in store.calls}
    assert not leftovers(small_volume)
    assert not list((small_volume / "checkpoints").iterdir())


async def test_the_size_limit_of_the_volume_counts_although_the_filesystem_does_not_show_it(
    store: FakeStore, volume: Path
) -> None:
    await store_checkpoint(store, 2)
    with pytest.raises(VolumeError, match=r"has 0 .* free"):
        await run(store, volume, size_limit_bytes=1000)
    (volume / "ballast").write_bytes(b"x" * 300_000)
    with pytest.raises(VolumeError) as caught:
        await run(store, volume, size_limit_bytes=600_000)
    assert caught.value.kind is ErrorKind.DISK_FULL
    (volume / "ballast").unlink()
    assert await run(store, volume, size_limit_bytes=600_000)


async def test_a_volume_that_cannot_be_written_is_an_error_with_a_hint(store: FakeStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(VolumeError) as caught:
        await run(store, tmp_path / "file")
    assert caught.value.hint


async def test_an_attempt_that_cannot_be_part_of_a_key_is_refused(store: FakeStore, volume: Path) -> None:
    with pytest.raises(MooringError, match="attempt"):
        await run(store, volume, attempt="../x")


_KILLED_MIDWAY = """
import asyncio, sys, time
from pathlib import Path
from mooring_agent.adapters.open_store import open_store
from mooring_agent.core.settings.values import StoreSettings
from mooring_agent.restore.init_step import restore

def hang_midway(name, done_bytes, total_bytes):
    if done_bytes > total_bytes // 2:
        print("midway", flush=True)
        time.sleep(60)

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
        process.communicate(timeout=30)
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
