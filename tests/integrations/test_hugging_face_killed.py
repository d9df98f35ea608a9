"""A Trainer that is killed under Keepstep can be started again without it, by the Trainer's own rules alone.

The moments of a save that is written behind the training are in tests/trainers/test_killed_moments.py.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.killed_trainer import MOMENTS, NOTICE_STEP, SAVE_STEPS, STEPS
from tests.integrations.one_process import OneProcess

pytest.importorskip("transformers")

PROGRAM = Path(__file__).with_name("killed_trainer.py")
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def process(tmp_path: Path) -> OneProcess:
    return OneProcess(program=PROGRAM, volume=tmp_path / "v", libraries=("transformers",))


def alone(process: OneProcess, output: Path) -> Any:
    ended = process.run(output)
    assert ended.code == 0, ended.errors
    return json.loads(ended.lines[-1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    return alone(OneProcess(program=PROGRAM, volume=folder / "v", libraries=("transformers",)), folder / "out")


STARTS_AFTER = {
    "before the first step": 0,
    "before the first save": 0,
    "after a periodic save": 2 * SAVE_STEPS,
    "before the just-in-time save is announced": NOTICE_STEP,
    "at the end of the just-in-time save": NOTICE_STEP,
}
"""Others: after the first periodic save."""


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_killed_at_any_moment_the_trainer_goes_on_by_itself(moment: str, process: OneProcess, undisturbed: Any) -> None:
    output = process.checkpoints / "run"
    killed = process.run(output, moment)
    assert killed.code == -signal.SIGKILL, killed.errors

    again = alone(process, output)
    assert again["after"] == STARTS_AFTER.get(moment, SAVE_STEPS)
    assert len(again["losses"]) == STEPS
    assert again["losses"] == undisturbed["losses"]


def test_what_a_kill_left_of_the_just_in_time_save_is_deleted_at_the_next_start(process: OneProcess) -> None:
    output = process.checkpoints / "run"
    process.run(output, "after the model of the just-in-time save")
    assert list(process.volume.rglob("checkpoint-6/*"))
    process.run(output, "between saves")
    assert not list(process.volume.rglob("checkpoint-6/*"))
