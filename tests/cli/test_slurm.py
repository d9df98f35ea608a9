"""What `keepstep run` takes from Slurm's variables, and that it does so as defaults only."""

import pytest

from keepstep_agent.cli.slurm import launcher_problem, slurm_defaults, slurm_facts

BATCH = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8"}
STEP = {**BATCH, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_NODEID": "2"}


def test_outside_of_slurm_nothing_is_taken() -> None:
    others = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "PATH": "/bin"}
    assert slurm_defaults(others) == {}
    assert slurm_facts(others) == {}


@pytest.mark.parametrize("variables", [BATCH, {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}])
def test_a_batch_script_or_a_lone_task_needs_no_agreement(variables: dict[str, str]) -> None:
    assert slurm_defaults(variables) == {"volume": "keepstep"}


def test_the_tasks_of_a_step_are_one_attempt_and_each_has_a_place_and_a_volume() -> None:
    expected = {"volume": "keepstep-task-5", "attempt": "slurm-12-1-0", "place": "5", "node_rank": "5"}
    assert slurm_defaults(STEP) == expected


def test_each_start_of_a_job_and_each_of_its_steps_is_an_attempt_of_its_own() -> None:
    starts = [STEP, {**STEP, "SLURM_RESTART_COUNT": "1"}, {**STEP, "SLURM_STEP_ID": "2"}]
    assert len({str(slurm_defaults(start)["attempt"]) for start in starts}) == 3


def test_tasks_of_an_array_have_volumes_of_their_own() -> None:
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "11"}
    assert slurm_defaults(BATCH | array) == {"volume": "keepstep-array-3"}
    assert slurm_defaults(STEP | array)["volume"] == "keepstep-array-3-task-5"


def test_a_variable_that_is_no_number_is_not_taken() -> None:
    assert slurm_defaults({**BATCH, "SLURM_ARRAY_TASK_ID": "../x"}) == {"volume": "keepstep"}
    assert slurm_defaults({**STEP, "SLURM_PROCID": "\N{SUPERSCRIPT TWO}"}) == {"volume": "keepstep"}


def test_the_log_line_has_what_is_known() -> None:
    assert slurm_facts(BATCH | {"SLURM_RESTART_COUNT": "2"}) == {"job": "12", "restarts": "2", "task": "0"}


@pytest.mark.parametrize(
    ("command", "is_wrong"),
    [(["srun", "python", "train.py"], True), (["/usr/bin/srun", "x"], True), (["python", "srun"], False)],
)
def test_a_program_that_is_srun_is_warned_of(command: list[str], is_wrong: bool) -> None:
    assert bool(launcher_problem(command)) is is_wrong
