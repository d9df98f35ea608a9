"""The folders of the volume that trainer and agent both write into, when they are different users."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep_agent.adapters.volume.identity import claim
from keepstep_agent.adapters.volume.shared_folders import (
    limit_own_folder,
    make_shared_folders,
    make_state_directory,
    share_tree,
)
from keepstep_agent.adapters.volume.shared_volume import open_volume
from keepstep_agent.core.settings.values import Settings, StoreSettings
from keepstep_agent.restore.local_copy import LocalCopies
from keepstep_agent.runtime.process.open_volume import claim_volume

SHARED = (".keepstep/records", ".keepstep/ranks", ".keepstep/saving", "runs", "runs/checkpoints")


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(volume: Path) -> set[int]:
    return {stat.S_IMODE((volume / name).stat().st_mode) for name in SHARED}


@pytest.mark.parametrize(
    ("of_volume", "of_folders"),
    [
        (0o777, 0o777),  # an emptyDir
        (0o775, 0o775),  # a claim with fsGroup
        (0o755, 0o755),
        (0o700, 0o755),  # what the umask says, as ever: nobody gets through the volume
        (0o1777, 0o755),  # like /tmp: everybody's own
    ],
    ids=oct,
)
def test_whoever_may_write_the_volume_may_write_its_folders(tmp_path: Path, of_volume: int, of_folders: int) -> None:
    tmp_path.chmod(of_volume)
    make_shared_folders(tmp_path, tmp_path / "runs" / "checkpoints")
    assert modes(tmp_path) == {of_folders}


def test_a_folder_that_was_there_is_left_as_it_is_and_the_volume_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / ".keepstep").mkdir(mode=0o700)
    make_shared_folders(tmp_path, tmp_path)
    assert stat.S_IMODE((tmp_path / ".keepstep").stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o777


@pytest.mark.parametrize(("of_volume", "of_folders"), [(0o777, 0o777), (0o775, 0o775), (0o755, 0o755)], ids=oct)
def test_what_was_restored_may_be_removed_by_whoever_may_write_the_volume(
    tmp_path: Path, of_volume: int, of_folders: int
) -> None:
    tmp_path.chmod(of_volume)
    restored = tmp_path / "checkpoints" / "checkpoint-4"
    (restored / "nested").mkdir(parents=True)
    (restored / "nested" / "model.bin").touch()
    with open_volume(tmp_path) as root, root.folder("checkpoints/checkpoint-4") as folder:
        share_tree(folder, root)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (restored, restored / "nested")} == {of_folders}
    assert stat.S_IMODE((restored / "nested" / "model.bin").stat().st_mode) == 0o644


MAKERS: dict[str, Callable[[Path], object]] = {
    "shared folders": lambda volume: make_shared_folders(volume, volume),
    "state directory on the volume": lambda volume: make_state_directory(volume, volume / ".keepstep" / "agent"),
    "the volume's destination": lambda volume: claim(volume, "s3://bucket/run"),
    "restore": lambda volume: LocalCopies(volume, volume / "checkpoints", volume.parent / "state").prepare(),
    "agent": lambda volume: claim_volume(
        Settings(
            volume=str(volume),
            checkpoint_directory=f"{volume}/checkpoints",
            socket=f"{volume}/.keepstep/agent.sock",
            state_directory=f"{volume}/.keepstep/agent",
            store=StoreSettings(destination="s3://bucket/run"),
        )
    ),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("before", [None, 0o777, 0o775])
def test_the_folder_with_the_socket_is_its_owners_alone_to_change(
    tmp_path: Path, maker: str, before: int | None
) -> None:
    """Also with no umask at all, and where an earlier version let everybody write there."""
    os.umask(0)
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o777)
    if before is not None:
        (volume / ".keepstep").mkdir(mode=before)
    MAKERS[maker](volume)
    assert stat.S_IMODE((volume / ".keepstep").stat().st_mode) == 0o755


def test_what_cannot_be_made_is_left_to_whoever_needs_it(tmp_path: Path) -> None:
    make_shared_folders(tmp_path / "missing", tmp_path / "missing" / "checkpoints")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "volume").touch()
    make_shared_folders(tmp_path / "volume", tmp_path / "volume" / "checkpoints")
    assert (tmp_path / "volume").is_file()


@pytest.mark.parametrize(
    ("volume_mode", "alone_mode"), [(0o755, 0o700), (0o700, 0o700), (0o775, 0o755), (0o777, 0o755)]
)
def test_a_run_keeps_its_folder_to_itself_and_a_pod_after_it_opens_it(
    tmp_path: Path, volume_mode: int, alone_mode: int
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(volume_mode)
    for to_owner, mode in ((True, alone_mode), (False, 0o755), (True, alone_mode)):
        limit_own_folder(volume, to_owner=to_owner)
        make_own_folders_again(volume)
        assert stat.S_IMODE((volume / ".keepstep").stat().st_mode) == mode


def make_own_folders_again(volume: Path) -> None:
    """As restore, agent and clients do."""
    make_shared_folders(volume, volume / "checkpoints")
    make_state_directory(volume, volume / ".keepstep" / "agent")
