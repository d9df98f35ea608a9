"""One process with DeepSpeed: which step is saved at a notice, what its `client_state` is, and what is resumed.

Real runs of the real library; the ranks of `examples/deepspeed_zero3.py` are stopped in tests/trainers.
"""

import shutil
import sys
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess
from tests.harness.warm_python import TRAINER_ENVIRONMENT
from tests.integrations.one_process import OneProcess
from tests.servers.process import free_port

from keepstep.integrations.deepspeed import other_ranks_error
from keepstep_api.names import JUST_IN_TIME_EXIT_CODE

pytest.importorskip("deepspeed")
PROGRAM = Path(__file__).with_name("deepspeed_program.py")
UNIVERSAL = Path(__file__).with_name("deepspeed_universal.py")


@pytest.fixture
def trainer(tmp_path: Path) -> OneProcess:
    return OneProcess(program=PROGRAM, volume=tmp_path / "volume", libraries=("torch", "deepspeed"))


@pytest.mark.nightly
def test_a_notice_in_an_accumulation_is_obeyed_at_its_end_with_the_client_state_as_it_is_then(
    trainer: OneProcess, tmp_path: Path
) -> None:
    mine = trainer.checkpoints / "mine"
    stopped = trainer.run("--output", mine, "--told-at", "5")
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert stopped.lines[-1] == "step=3"
    assert trainer.records() == [("at-2", 2, "periodic"), ("at-3", 3, "just-in-time")]
    assert (mine / "at-3").is_dir(), "beside the program's own, by its names"

    (mine / "latest").write_text("at-2")
    resumed = trainer.run("--output", mine, "--load", mine, "--told-at", "0", "--save-every", "100")
    # Told before its first step, and it is saved already.
    assert resumed.lines == ["loaded=at-3", "begin step=3 mine=3"]
    assert resumed.code == JUST_IN_TIME_EXIT_CODE, resumed.errors

    chosen = trainer.run("--output", mine, "--load", mine, "--tag", "at-2", "--steps", "2")
    assert chosen.lines[:2] == ["loaded=at-2", "begin step=2 mine=2"], "a tag that the program names wins"


def test_an_evaluation_ends_before_a_notice_is_obeyed(trainer: OneProcess) -> None:
    stopped = trainer.run("--evaluate-at", "1")
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert stopped.lines == ["begin step=0 mine=0", "step=1", "evaluated"]
    assert trainer.records() == [("global_step1", 1, "just-in-time")]


def test_training_in_the_mode_of_evaluation_is_training(trainer: OneProcess) -> None:
    stopped = trainer.run("--eval-mode", "--told-at", "2")
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert trainer.records() == [("global_step1", 1, "just-in-time")]


@pytest.mark.nightly
def test_before_the_programs_own_first_save_its_client_state_is_the_one_it_loaded(
    trainer: OneProcess, tmp_path: Path
) -> None:
    assert trainer.run("--steps", "2").code == 0
    stopped = trainer.run("--load", trainer.checkpoints, "--told-at", "1", "--save-every", "100")
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    assert "saved client_state is of an earlier step" in stopped.errors
    assert trainer.records()[-1] == ("at-3", 3, "just-in-time")

    resumed = trainer.run("--load", trainer.checkpoints, "--steps", "4")
    assert resumed.code == 0, resumed.errors
    assert resumed.lines[:2] == ["loaded=at-3", "begin step=3 mine=2"]

    begun = trainer.run("--load", tmp_path, "--weights-only", "--steps", "0")
    assert "loaded=None" in begun.lines, "weights alone begin a training, with what the program says"


@pytest.mark.nightly
def test_a_zero_checkpoint_of_another_number_of_ranks_is_refused_with_what_to_do(
    trainer: OneProcess, tmp_path: Path
) -> None:
    mine = trainer.checkpoints / "mine"
    stopped = trainer.run("--output", mine, "--told-at", "3")
    assert stopped.code == JUST_IN_TIME_EXIT_CODE, stopped.errors
    newest = mine / trainer.records()[-1][0]
    shares = sorted(newest.glob("*zero_pp_rank_*_optim_states.pt"))
    if not shares:
        pytest.fail(f"the program writes no ZeRO states: {sorted(path.name for path in newest.iterdir())}")
    assert other_ranks_error("mine", names(newest), 1) is None
    # As another rank would have left it.
    shares[0].with_name(shares[0].name.replace("pp_rank_0", "pp_rank_1")).write_bytes(shares[0].read_bytes())
    error = other_ranks_error("mine", names(newest), 1)
    assert error is not None
    assert "mine was saved by 2 ranks with ZeRO, and this job has 1" in str(error)
    assert "ds_to_universal" in error.hint
    assert other_ranks_error("mine", names(newest), 2) is None
    begun = trainer.run("--output", mine, "--load", mine)
    assert begun.code == 1
    assert "was saved by 2 ranks with ZeRO" in begun.errors


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_universal_checkpoint_comes_back_with_the_file_that_names_it(tmp_path: Path) -> None:
    output = tmp_path / "out"
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}

    def lines(store: str, until: int) -> list[str]:
        """What it prints under `keepstep run`; its disk is lost then."""
        run = RunProcess(
            tmp_path / f"{store}-{until}",
            f"file://{tmp_path / store}",
            command=(sys.executable, str(UNIVERSAL), str(output), str(until)),
            environment={**TRAINER_ENVIRONMENT, **ranks, "MASTER_PORT": str(free_port())},
            watch=output,
        )
        with run:
            assert run.wait(HANG_SECONDS) == 0, run.output()
        shutil.rmtree(output)
        return [line for line in run.output().splitlines() if line.startswith(("begin ", "end "))]

    assert lines("store", 3)[0] == "begin step=0"
    begin, end = lines("store", 5)
    assert begin == "begin step=3"
    assert end == lines("other", 5)[1], "as uninterrupted"
