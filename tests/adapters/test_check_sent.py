"""What the last look at pins notices, on a disk and in memory; it reads nothing where nothing can have happened."""

import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.memory_folder import folder_in_memory
from tests.regions import region_of

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.volume import content_check
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.model import FileEntry, Kind, RankManifest, SaveInfo
from keepstep_agent.ports import StagedDescriptor, StageRequest

SIZE_BYTES = 64 * 1024


@pytest.fixture(params=["disk", "memory"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "memory":
        with folder_in_memory() as folder:
            yield folder
        return
    if content_check._is_in_memory(tmp_path.stat().st_dev):
        pytest.skip("the tests' own folder is in memory here")
    yield tmp_path


@pytest.fixture
def weights(volume: Path) -> Path:
    path = volume / "checkpoint-1" / "weights.bin"
    path.parent.mkdir()
    path.write_bytes(b"a" * SIZE_BYTES)
    return path


def stage(volume: Path, source: Path) -> StagedFiles:
    request = StageRequest(
        save="save", rank=0, path=str(source), files=(), private=False, descriptor=StagedDescriptor(announcements=())
    )
    return LocalStagingArea(volume).stage(request)


def sent(volume: Path, files: StagedFiles) -> RankManifest:
    """The manifest of what would have been sent just now."""
    return RankManifest(
        info=SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=1),
        rank=0,
        saved_at=0.0,
        files=tuple(
            FileEntry(
                path=file.path,
                size_bytes=file.size_bytes,
                part_size_bytes=SIZE_BYTES,
                checksums=(region_checksum(region_of(volume / file.pin)),),
            )
            for file in files
        ),
    )


def refused(
    volume: Path,
    manifest: RankManifest,
    files: StagedFiles,
    may_read: Callable[[], bool] = lambda: True,
) -> bool:
    try:
        LocalStagingArea(volume).check_sent(manifest, files, may_read=may_read)
    except VolumeError as error:
        found = error
    else:
        return False
    assert found.kind is ErrorKind.FILE_CHANGED
    # It does not tell what a file must look like to be taken for another.
    assert not any(word in str(found) for word in ("inode=", "mtime_ns="))
    return True


def write_and_set_mtime_back(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_write_whose_mtime_is_set_back_is_noticed(volume: Path, weights: Path) -> None:
    files = stage(volume, weights.parent)
    manifest = sent(volume, files)
    write_and_set_mtime_back(weights)
    assert refused(volume, manifest, files)


def test_a_write_through_a_mapping_that_was_kept_is_noticed(volume: Path, weights: Path) -> None:
    with weights.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0:1] = b"a"
        files = stage(volume, weights.parent)
        manifest = sent(volume, files)
        mapped[0:1] = b"b"
        assert refused(volume, manifest, files)


def test_a_trainer_that_unlinks_or_renames_its_own_name_is_no_change(volume: Path, weights: Path) -> None:
    files = stage(volume, weights.parent)
    manifest = sent(volume, files)
    weights.rename(weights.with_name("best.bin"))
    assert not refused(volume, manifest, files)
    weights.with_name("best.bin").unlink()
    assert not refused(volume, manifest, files)


def test_without_time_to_read_a_write_that_shows_is_noticed_and_no_other(volume: Path, weights: Path) -> None:
    files = stage(volume, weights.parent)
    manifest = sent(volume, files)
    write_and_set_mtime_back(weights)
    assert refused(volume, manifest, files)
    assert not refused(volume, manifest, files, may_read=lambda: False)
    os.utime(weights)
    assert refused(volume, manifest, files, may_read=lambda: False)


def test_when_time_runs_out_the_part_that_is_being_read_is_the_last(
    volume: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        weights.with_name(f"more-{number}.bin").write_bytes(b"a" * SIZE_BYTES)
    files = stage(volume, weights.parent)
    manifest = sent(volume, files)
    # As rotation does; on a disk it is what makes the files doubtful.
    shutil.rmtree(weights.parent)
    read: list[str] = []
    monkeypatch.setattr(content_check, "check_region", lambda region, _: read.append(region.path))
    assert not refused(volume, manifest, files, may_read=lambda: len(read) < 2)
    assert len(read) == 2


def test_where_nothing_can_have_happened_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if content_check._is_in_memory(tmp_path.stat().st_dev):
        pytest.skip("the tests' own folder is in memory here, where pins are always read again")
    source = tmp_path / "checkpoint-1"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"a" * SIZE_BYTES)
    files = stage(tmp_path, source)
    manifest = sent(tmp_path, files)

    def fail(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(content_check, "check_region", fail)
    assert not refused(tmp_path, manifest, files)
    shutil.rmtree(tmp_path / ".keepstep" / "staged")
    # All of it was sent: a pin that is gone by now takes nothing back.
    assert not refused(tmp_path, manifest, files)
