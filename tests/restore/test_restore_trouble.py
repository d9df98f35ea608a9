"""The init step on damaged checkpoints, a store that fails and a volume that is too small or not usable."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.restored_volume import content, leftovers, run
from tests.restore.stored_checkpoints import DAMAGE, DAMAGED_OBJECT, all_files, flip_byte, store_checkpoint

from keepstep_agent.adapters.retrying_store import RetryingStore, RetryPolicy
from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError, StoreError, VolumeError
from keepstep_agent.core.stored.object_layout import file_key
from keepstep_agent.ports import ObjectStore


def found(folder: Path, name: str) -> list[Path]:
    return list(folder.rglob(name))


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
    assert "keepstep verify" in caught.value.hint
    assert not list((volume / "checkpoints").iterdir())
    assert not leftovers(volume)


@pytest.mark.parametrize("path", ["../../escape", "/etc/escape", ".keepstep/escape", "a/../../../escape"])
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
    with pytest.raises(KeepstepError, match="attempt"):
        await run(store, volume, attempt="../x")
