"""A program of several trainings ends with Keepstep as it does alone, in whichever of them it is killed or stopped.

Each resumes from its own directory, and from no other one's. Real frameworks under `keepstep run --autoload`.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.lanes import nightly

PROGRAM = Path(__file__).with_name("several_trainings.py")
KEEPSTEP = (sys.executable, "-m", "keepstep_agent")


class Lives:
    """Starts a program under `keepstep run` until it has ended by itself; `output` is where it saves."""

    def __init__(self, folder: Path, framework: str, place: str, ranks: int = 1, program: Path = PROGRAM) -> None:
        self._folder = folder
        self._volume = folder / "v"
        # Short names: a socket lies below them.
        self.output = {"inside": self._volume / "checkpoints", "below": self._volume / "o", "outside": Path("o")}[place]
        launcher: Sequence[str] = (sys.executable,)
        if ranks > 1 or framework == "deepspeed":
            launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        self._words = (*launcher, str(program), framework)
        self.log = ""

    def alone(self, *trainings: str, seen: tuple[str, ...] = ("learned ",)) -> Sequence[str]:
        output = self._folder / "alone"
        ended = self._run((*self._words, str(output), *trainings), {})
        assert ended.returncode == 0, ended.stderr
        return [line for line in ended.stdout.splitlines() if line.startswith(seen)]

    def command(self, *trainings: str) -> str:
        return " ".join((*self._words, str(self.output), *trainings))

    def start(self, command: str, **ends: str) -> "subprocess.CompletedProcess[str]":
        destination = f"file://{self._folder / 'store'}"
        words = (*KEEPSTEP, "run", "--autoload", "--to", destination, "--volume", str(self._volume), "--", "sh", "-c")
        ended = self._run((*words, command), {**ends, "ENDS": str(self._folder)})
        self.log += ended.stdout + ended.stderr
        return ended

    def lose_the_disk(self) -> None:
        shutil.rmtree(self._volume)
        shutil.rmtree(self._folder / "w" / "o", ignore_errors=True)

    def _run(self, words: Sequence[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
        here = self._folder / "w"
        here.mkdir(exist_ok=True)
        return subprocess.run(
            words, env=environment, cwd=here, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )


def resumed(output: str) -> Sequence[str]:
    lines = (line.partition("; passed over")[0] for line in output.splitlines())
    return [line for line in lines if line.startswith("keepstep: resuming from step ")]


def learned(output: str) -> Sequence[str]:
    return [line for line in output.splitlines() if line.startswith("learned ")]


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
