"""A program of several trainings ends with Keepstep as it does alone, in whichever of them it is killed or stopped.

Each resumes from its own directory, and from no other one's. Real frameworks under `keepstep run --autoload`.
"""

import shutil
import sys
from pathlib import Path

import pytest
from tests.integrations.lives import Lives, learned, resumed
from tests.lanes import nightly

FRAMEWORKS = ["hugging_face", "lightning", "accelerate"]


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "checkpointer", *nightly("deepspeed")])
@pytest.mark.parametrize("ending", ["KILLED_AT", *nightly("STOPPED_AT")])
@pytest.mark.parametrize(
    ("stage", "disk"),
    [
        ("one:0:5", "lost"),
        pytest.param("two:1:5", "kept", marks=pytest.mark.nightly),
        pytest.param("two:1:3", "lost", marks=pytest.mark.nightly),
    ],
)
def test_each_training_of_a_process_goes_on_where_it_was(
    framework: str, ending: str, stage: str, disk: str, tmp_path: Path
) -> None:
    lives = Lives(tmp_path, framework, "inside")
    expected = lives.alone("one", "two")
    first = lives.start(lives.command("one", "two"), **{ending: stage})
    assert first.returncode != 0, first.stderr
    if disk == "lost":
        lives.lose_the_disk()
    second = lives.start(lives.command("one", "two"))
    assert second.returncode == 0, second.stderr
    assert learned(second.stdout) == expected, lives.log
    assert f"/{stage.partition(':')[0]}/" in resumed(second.stderr)[-1 if stage.startswith("two") else 0]


@pytest.mark.parametrize(
    "framework", ["hugging_face", "checkpointer", *nightly("lightning", "accelerate", "deepspeed")]
)
def test_each_process_of_a_run_has_a_training_of_its_own(framework: str, tmp_path: Path) -> None:
    """A sweep of three programs, killed in the second one. Where they save does not exist on the new machine."""
    lives = Lives(tmp_path, framework, "below")
    expected = [line for name in ("a", "b", "c") for line in lives.alone(name)]
    sweep = " && ".join(lives.command(name) for name in ("a", "b", "c"))
    first = lives.start(sweep, KILLED_AT="b:0:5")
    assert learned(first.stdout) == expected[:1], first.stderr
    lives.lose_the_disk()
    second = lives.start(sweep)
    assert second.returncode == 0, second.stderr
    assert learned(second.stdout) == expected, lives.log
    assert [line.split("/")[-3 if framework == "accelerate" else -2] for line in resumed(second.stderr)] == ["a", "b"]


@pytest.mark.parametrize("framework", [*FRAMEWORKS, *nightly("deepspeed")])
@pytest.mark.parametrize("disk", ["lost", *nightly("kept")])
def test_outside_the_volume_each_has_a_place_in_it(framework: str, disk: str, tmp_path: Path) -> None:
    lives = Lives(tmp_path, framework, "outside")
    expected = lives.alone("one", "two")
    lives.start(lives.command("one", "two"), KILLED_AT="two:1:5")
    # Where the program looks by itself there is nothing any more.
    shutil.rmtree(tmp_path / "w" / "o")
    if disk == "lost":
        lives.lose_the_disk()
    second = lives.start(lives.command("one", "two"))
    assert second.returncode == 0, second.stderr
    assert learned(second.stdout) == expected, lives.log
    assert "keepstep: resuming from step 6: " in second.stderr, second.stderr


@pytest.mark.parametrize("framework", ["hugging_face", "lightning"])
@pytest.mark.parametrize("processes", [1, *nightly(2)])
@pytest.mark.parametrize("disk", ["kept", *nightly("lost")])
def test_a_second_training_in_one_directory_ends_as_it_does_alone(
    framework: str, processes: int, disk: str, tmp_path: Path
) -> None:
    """It is not protected, and says so: what the first one has learned stays that one's."""
    lives = Lives(tmp_path, framework, "inside")
    expected = lives.alone("one", "one")
    command = lives.command("one", "one") if processes == 1 else f"{lives.command('one')} && {lives.command('one')} "
    first = lives.start(command, KILLED_AT=f"one:{2 - processes}:5", ENDS_AFTER="1")
    assert first.returncode != 0, first.stderr
    if disk == "lost":
        lives.lose_the_disk()
    second = lives.start(command)
    assert second.returncode == 0, second.stderr
    assert learned(second.stdout) == expected, lives.log


@pytest.mark.parametrize("framework", ["hugging_face", "lightning", *nightly("accelerate", "deepspeed")])
@pytest.mark.parametrize(
    ("ending", "disk", "place"),
    [
        ("STOPPED_AT", "lost", "inside"),
        pytest.param("KILLED_AT", "kept", "inside", marks=pytest.mark.nightly),
        pytest.param("STOPPED_AT", "lost", "outside", marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_go_on_in_each_of_their_trainings(
    framework: str, ending: str, disk: str, place: str, tmp_path: Path
) -> None:
    lives = Lives(tmp_path, framework, place, ranks=2)
    expected = lives.alone("one", "two")
    # Both ranks stop after a step that they agree on, which may be the next.
    first = lives.start(lives.command("one", "two"), **{ending: "two:1:3"})
    assert first.returncode != 0, first.stderr
    if disk == "lost":
        lives.lose_the_disk()
    second = lives.start(lives.command("one", "two"))
    assert second.returncode == 0, second.stderr
    assert learned(second.stdout) == expected, lives.log
    assert "resuming from step 6: " in second.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("framework", "wish"), [("hugging_face", "last"), ("hugging_face", "weights"), ("lightning", "last")]
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("disk", ["kept", "lost"])
def test_what_a_program_asks_for_by_itself_is_the_newest(
    framework: str, wish: str, ranks: int, disk: str, tmp_path: Path
) -> None:
    lives = Lives(tmp_path, framework, "inside", ranks=ranks)
    expected = lives.alone("one")
    first = lives.start(lives.command("one"), STOPPED_AT="one:0:5", WISH=wish)
    assert first.returncode != 0, first.stderr
    if disk == "lost":
        lives.lose_the_disk()
    second = lives.start(lives.command("one"), WISH=wish)
    assert second.returncode == 0, second.stderr
    assert learned(second.stdout) == expected, lives.log
    assert "resuming from step 4: " not in second.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_training_that_names_no_directory_is_refused(processes: int, tmp_path: Path) -> None:
    """Its `load_state()` would take the first one's checkpoint, whatever it trains."""
    lives = Lives(tmp_path, "accelerate", "below")
    (expected,) = lives.alone("one")
    one, two = lives.command("one"), lives.command("two")
    ended = lives.start(lives.command("one", "two") if processes == 1 else f"{one} && {two}", WISH="nameless")
    assert ended.returncode == 1, ended.stderr
    assert learned(ended.stdout) == [expected]
    assert "another training of this run names no output directory either" in ended.stderr
    assert "hint: give each training a directory of its own" in ended.stderr


TRIES_AGAIN = """
import torch
from accelerate import Accelerator

def train(batch_size):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    try:
        accelerator.load_state()
    except ValueError:
        print("nothing to load")
    if batch_size > 1:
        raise MemoryError
    print("trained")

try:
    train(2)
except MemoryError:
    train(1)
"""


def test_a_training_that_is_tried_again_in_its_process_is_refused_nothing(tmp_path: Path) -> None:
    """As `find_executable_batch_size` does, before anything is saved."""
    program = tmp_path / "tries_again.py"
    program.write_text(TRIES_AGAIN)
    ended = Lives(tmp_path, "accelerate", "below").start(f"{sys.executable} {program}")
    assert ended.stdout.splitlines()[-3:] == ["nothing to load", "nothing to load", "trained"], ended.stderr


@pytest.mark.parametrize("launches", ["in a start", "in two"])
def test_a_training_that_names_no_directory_goes_on_when_it_is_started_again(launches: str, tmp_path: Path) -> None:
    lives = Lives(tmp_path, "accelerate", "below")
    expected = lives.alone("one")
    one = lives.command("one")
    ended = lives.start(f"{one} || {one}" if launches == "in a start" else one, WISH="nameless", KILLED_AT="one:0:5")
    if launches == "in two":
        ended = lives.start(one, WISH="nameless")
    assert learned(ended.stdout) == expected, lives.log
    assert "keepstep: resuming from step 4: " in ended.stderr


def test_two_stages_that_give_the_same_relative_directory_are_two(tmp_path: Path) -> None:
    """Each in a working directory of its own: they have one place in the volume, and the second one is refused it."""
    lives = Lives(tmp_path, "hugging_face", "outside")
    expected = lives.alone("one")
    stages = " && ".join(f"(mkdir -p {folder} && cd {folder} && {lives.command('one')})" for folder in ("a", "b"))
    ended = lives.start(stages)
    assert ended.returncode == 0, ended.stderr
    assert learned(ended.stdout) == [*expected, *expected]
    assert resumed(ended.stderr) == []
    assert "keepstep: this training is not protected: another one saves in its output directory" in ended.stderr
