"""What snapshots leave out because it is announced, or looks like a part of what is announced."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from keepstep_agent.adapters.output.announced_paths import AnnouncedPaths
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.volume.shared_folders import make_shared_folders, make_state_directory
from keepstep_api.names import RANKS_DIRECTORY, STATE_DIRECTORY


class Volume:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        make_shared_folders(folder, folder / "checkpoints")
        make_state_directory(folder, folder / STATE_DIRECTORY)
        output = OutputDirectories(folder, [str(folder / "checkpoints")])
        self.paths = AnnouncedPaths(folder, folder / "checkpoints", folder / STATE_DIRECTORY, output)

    def write(self, *paths: str) -> None:
        for path in paths:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(path)

    def look_alikes(self, announced: Iterable[str], stored: Iterable[str] = ()) -> set[str]:
        absolute = [str(self.folder / path) for path in announced]
        return set(self.paths.look_alikes(absolute, self.paths.find(absolute), stored))


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path / "volume")
    volume.write("checkpoints/checkpoint-205/rank0", "checkpoints/checkpoint-271/rank0", "checkpoints/config.json")
    volume.write("checkpoints/checkpoint-271-best/rank0", "checkpoints/runs/checkpoint-3/rank0")
    return volume


def test_what_is_called_like_an_announced_checkpoint_and_lies_beside_it_is_a_part(volume: Volume) -> None:
    assert volume.look_alikes(["checkpoints/checkpoint-271"]) == {"checkpoints/checkpoint-205"}


def test_a_file_of_an_announced_kind_is_a_part_too(volume: Volume) -> None:
    volume.write("checkpoints/step-1.bin", "checkpoints/step-2.bin", "checkpoints/step-2.txt")
    assert volume.look_alikes(["checkpoints/step-1.bin"]) == {"checkpoints/step-2.bin"}


def test_what_was_stored_before_anything_like_it_was_announced_is_none(volume: Volume) -> None:
    stored = ["checkpoints/checkpoint-205/rank0"]
    assert volume.look_alikes(["checkpoints/checkpoint-271"], stored) == set()


def test_what_holds_an_announced_checkpoint_is_none(volume: Volume) -> None:
    announced = ["checkpoints/checkpoint-205/rank0", "checkpoints/checkpoint-271"]
    assert volume.look_alikes(announced) == set()


def test_where_nothing_is_announced_or_our_client_runs_there_is_none(volume: Volume) -> None:
    assert volume.look_alikes([]) == set()
    volume.write(f"{STATE_DIRECTORY}/{RANKS_DIRECTORY}/0")
    assert volume.look_alikes(["checkpoints/checkpoint-271"]) == set()
