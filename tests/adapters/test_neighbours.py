"""Whose processes are in the pod, by what /proc says of their mounts."""

from pathlib import Path

import pytest

from mooring_agent.adapters import neighbours
from mooring_agent.adapters.neighbours import Neighbourhood, Neighbours
from mooring_agent.core.errors import ErrorKind, VolumeError

ROOT = "40 1 0:50 / / rw - overlay overlay rw"
OUR_VOLUME = "41 40 254:1 /pods/v /mooring rw - ext4 /dev/a rw"
OURS = [ROOT, OUR_VOLUME]
TRAINERS = ["60 1 0:60 / / rw - overlay overlay rw", "61 60 254:1 /pods/v /data rw - ext4 /dev/a rw"]
SOMEBODYS = ["70 1 0:70 / / rw - overlay overlay rw", "71 70 254:1 /pods/other /mooring rw - ext4 /dev/a rw"]
NOBODY = Neighbours(trainer=False, anybody=False)


class Proc:
    """A folder like /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.add("self", OURS)

    def add(self, process: int | str, mounts: list[str]) -> None:
        place = self.folder / str(process)
        place.mkdir(parents=True, exist_ok=True)
        (place / "mountinfo").write_text("\n".join(mounts) + "\n")

    def remove(self, process: int) -> None:
        (self.folder / str(process) / "mountinfo").unlink()
        (self.folder / str(process)).rmdir()

    def look(self, volume: str = "/mooring") -> Neighbours:
        return Neighbourhood(Path(volume), proc=self.folder).look()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def test_a_process_with_our_volume_in_other_mounts_is_the_trainers_wherever_it_has_it(proc: Proc) -> None:
    proc.add(30, TRAINERS)
    assert proc.look() == Neighbours(trainer=True, anybody=True)


def test_other_containers_without_the_volume_are_somebody_and_no_trainer(proc: Proc) -> None:
    proc.add(30, SOMEBODYS)
    assert proc.look() == Neighbours(trainer=False, anybody=True)


def test_what_else_runs_in_our_own_container_is_nobody(proc: Proc) -> None:
    proc.add(30, OURS)
    assert proc.look() == NOBODY


def test_the_sandboxs_own_process_is_nobody(proc: Proc) -> None:
    proc.add(1, SOMEBODYS)
    assert proc.look() == NOBODY


def test_where_the_trainer_itself_is_process_1_it_is_seen(proc: Proc) -> None:
    proc.add(1, TRAINERS)
    assert proc.look().trainer


def test_a_process_that_is_gone_or_dead_is_nobody(proc: Proc) -> None:
    (proc.folder / "30").mkdir()
    proc.add(31, [])
    assert proc.look() == NOBODY


def test_who_cannot_be_looked_at_may_be_the_trainer(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.add(30, SOMEBODYS)
    hood = Neighbourhood(Path("/mooring"), proc=proc.folder)

    def refuse(_: Path) -> list[list[str]]:
        raise PermissionError

    monkeypatch.setattr(neighbours, "_mounts", refuse)
    assert hood.look() == Neighbours(trainer=True, anybody=True)


def test_the_trainers_end_is_seen_and_so_is_its_next_start(proc: Proc) -> None:
    hood = Neighbourhood(Path("/mooring"), proc=proc.folder)
    proc.add(30, TRAINERS)
    assert hood.look().trainer
    proc.remove(30)
    assert not hood.look().trainer
    # The number of a dead process may be anybody's later.
    proc.add(30, SOMEBODYS)
    assert not hood.look().trainer
    proc.add(31, TRAINERS)
    assert hood.look().trainer


def test_a_volume_below_a_mount_and_one_with_a_blank_in_its_name_are_found(proc: Proc) -> None:
    proc.add("self", [ROOT, "41 40 254:1 /pods/v /my\\040data rw - ext4 /dev/a rw"])
    proc.add(30, TRAINERS)
    assert proc.look("/my data/run").trainer


def test_of_two_mounts_on_one_place_the_later_is_the_volume(proc: Proc) -> None:
    proc.add("self", [ROOT, "41 40 254:9 /hidden /mooring rw - ext4 /dev/b rw", OUR_VOLUME])
    proc.add(30, TRAINERS)
    assert proc.look().trainer


def test_without_a_readable_proc_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(VolumeError) as caught:
        Neighbourhood(Path("/mooring"), proc=tmp_path / "none")
    assert caught.value.kind is ErrorKind.VOLUME_UNUSABLE
    assert caught.value.hint
