"""One process with Accelerate: which step is saved at a notice, whatever the loop looks like, and what is resumed.

Real runs of the real library; the ranks of `examples/accelerate_loop.py` are stopped in tests/trainers.
"""

import signal
from pathlib import Path

import pytest
from tests.integrations.one_process import OneProcess

from keepstep_api.names import JUST_IN_TIME_EXIT_CODE

pytest.importorskip("accelerate")
PROGRAM = Path(__file__).with_name("accelerate_program.py")
WITH_DEEPSPEED = Path(__file__).with_name("accelerate_deepspeed_program.py")
LIBRARIES = ("torch", "accelerate", "accelerate.utils.deepspeed")


@pytest.fixture
def trainer(tmp_path: Path) -> OneProcess:
    return OneProcess(program=PROGRAM, volume=tmp_path / "volume", libraries=LIBRARIES)


@pytest.mark.nightly
def test_a_notice_in_an_accumulation_is_obeyed_when_all_that_belongs_to_the_step_is_done(trainer: OneProcess) -> None:
    loop = ("--loop", "accumulate", "--accumulation", "2")
    stopped = trainer.run(*loop, "--told-at", '["2", "forward"]')
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert stopped.lines[-1] == "step=3"
    assert trainer.records() == [("checkpoint_0", 2, "periodic"), ("checkpoint_1", 3, "just-in-time")]

    resumed = trainer.run(*loop, "--load")
    assert resumed.code == 0, resumed.errors
    # The scheduler and the program's own count, which it moves after the optimizer's step, are those of step 3.
    begun, *steps, done = resumed.lines
    assert begun.startswith("begin step=3 ")
    assert float(begun.split("lr=")[1]) == pytest.approx(1e-3 * 0.9**3)
    assert steps == ["step=4", "step=5", "step=6"]
    assert done == "done"
    assert trainer.records()[2:] == [("checkpoint_2", 4, "periodic"), ("checkpoint_3", 6, "periodic")]


def test_an_evaluation_ends_before_a_notice_is_obeyed(trainer: OneProcess) -> None:
    stopped = trainer.run("--evaluates", "--told-at", '["1", "evaluation"]')
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert stopped.lines[1:] == ["step=1", "evaluated step=1"]
    assert trainer.records() == [("checkpoint_0", 1, "just-in-time")]


@pytest.mark.nightly
def test_a_loop_that_shows_its_optimizers_alone_is_saved_beside_its_own_checkpoints_by_their_names(
    trainer: OneProcess,
) -> None:
    loop = ("--loop", "bare", "--names", "steps", "--output", trainer.checkpoints / "mine")
    stopped = trainer.run(*loop, "--told-at", '["3", "forward"]')
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert trainer.records() == [("step_2", 2, "periodic"), ("step_3", 3, "just-in-time")]
    assert {one.name for one in (trainer.checkpoints / "mine").iterdir()} == {"step_2", "step_3"}

    chosen = trainer.run(*loop, "--steps", "3", "--load", trainer.checkpoints / "mine" / "step_2")
    assert chosen.lines[0].startswith("begin step=2 "), "a path that the program names wins"
    assert trainer.run(*loop, "--steps", "3", "--load").lines[0].startswith("begin step=3 ")


def test_what_the_program_has_saved_at_that_very_step_is_not_saved_again(trainer: OneProcess) -> None:
    stopped = trainer.run("--told-at", '["2", "save"]')
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert stopped.lines[-1] == "step=2"
    assert [step for _, step, _ in trainer.records()] == [2]


def test_outside_the_volume_checkpoints_are_linked_into_it_and_it_says_so(trainer: OneProcess, tmp_path: Path) -> None:
    stopped = trainer.run("--output", tmp_path / "elsewhere", "--told-at", '["4", "forward"]')
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert len(list((tmp_path / "elsewhere" / "checkpoints").iterdir())) == 2
    assert trainer.records()[-1] == ("checkpoint_2", 5, "just-in-time")
    assert stopped.errors.count("are linked into") == 1


def test_on_another_filesystem_what_is_saved_just_in_time_is_stored(
    trainer: OneProcess, other_filesystem: Path
) -> None:
    stopped = trainer.run("--output", other_filesystem / "out", "--told-at", '["4", "forward"]')
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert trainer.records() == [("checkpoint_2", 5, "just-in-time")]
    assert stopped.errors.count("only what is saved just in time is stored") == 1


@pytest.mark.parametrize(
    ("names", "output", "folder"),
    [("automatic", "volume", "volume/checkpoints"), ("steps", "volume/checkpoints", "volume/checkpoints")],
)
def test_a_just_in_time_save_that_is_cut_off_leaves_nothing_among_the_programs_own(
    names: str, output: str, folder: str, trainer: OneProcess, tmp_path: Path
) -> None:
    loop = ("--names", names, "--output", tmp_path / output)
    killed = trainer.run(*loop, "--told-at", '["4", "forward"]', "--killed-in-save", "5")
    assert killed.code == -signal.SIGKILL, killed.errors
    assert list(trainer.volume.rglob("first.bin")), "it was killed in the middle of the save"
    # Accelerate sorts all names in its folder, and programs take the newest of theirs, whatever its name.
    found = {one.name for one in (tmp_path / folder).iterdir()}
    assert found == ({"checkpoint_0", "checkpoint_1"} if names == "automatic" else {"step_2", "step_4"})


def test_under_a_trainer_that_owns_the_run_nothing_is_announced_or_asked(trainer: OneProcess) -> None:
    ended = trainer.run("--trainer-owns", "--told-at", '["2", "forward"]')
    assert ended.code == -15, "SIGTERM is the trainer's"
    assert trainer.records() == []


def test_after_the_training_sigterm_ends_the_program_as_without_keepstep(trainer: OneProcess) -> None:
    ended = trainer.run("--told-at", '["6", "end"]')
    assert ended.code == -15, ended.errors


@pytest.mark.nightly
def test_with_deepspeed_inside_it_an_evaluation_ends_before_a_notice_is_obeyed_and_the_engine_goes_on_there(
    tmp_path: Path,
) -> None:
    pytest.importorskip("deepspeed")
    trainer = OneProcess(program=WITH_DEEPSPEED, volume=tmp_path / "volume", libraries=(*LIBRARIES, "deepspeed"))
    stopped = trainer.run("--evaluate-at", "2")
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert stopped.lines == ["begin step=0", "step=1", "step=2", "evaluated"]
    assert trainer.records() == [("checkpoint_0", 2, "just-in-time")]
    resumed = trainer.run("--load")
    assert resumed.code == 0, resumed.errors
    assert resumed.lines == ["begin step=2", "step=3", "step=4", "done"]
    assert trainer.records()[1:] == [("checkpoint_1", 4, "periodic")]
