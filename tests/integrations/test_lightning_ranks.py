"""Two ranks of Lightning's Trainer; one alone is told to end while it tries its validation before the first step.

The matrix in tests/trainers stops them at every other moment and in every other way, one process does so in
test_lightning.py.
"""

import signal
from pathlib import Path

import pytest
from tests.trainers.job import SLOW_SECONDS, Job
from tests.trainers.tensors import digests

from mooring.records import Kind, read_records
from mooring_api import names

pytest.importorskip("lightning")
pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parents[2] / "examples" / "lightning_trainer.py"
ARGUMENTS = ("--steps", "6", "--save-every", "3", "--accumulation", "1")


def test_a_notice_in_the_sanity_check_is_remembered_until_the_first_step(tmp_path: Path) -> None:
    undisturbed = Job(PROGRAM, ARGUMENTS, volume=tmp_path / "undisturbed", folder=tmp_path / "undisturbed-pod")
    with undisturbed as job:
        assert job.wait() == 0, job.output()

    volume = tmp_path / "volume"
    with Job(PROGRAM, ARGUMENTS, volume=volume, folder=tmp_path / "stopped-pod") as stopped:
        stopped.order(hold="evaluation")
        stopped.wait_held("evaluation")
        stopped.signal(1, signal.SIGTERM)
        # Time for its thread to tell the other rank.
        stopped.order(step_seconds=SLOW_SECONDS)
        assert stopped.wait() != 0
    (record,) = read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)
    assert record.kind is Kind.JUST_IN_TIME, stopped.output()
    assert stopped.last_steps() == [record.step] * 2
    assert 1 <= record.step <= 2

    with Job(PROGRAM, ARGUMENTS, volume=volume, folder=tmp_path / "resumed-pod", begin=record.step) as resumed:
        assert resumed.wait() == 0, resumed.output()
    assert stopped.losses() | resumed.losses() == undisturbed.losses()
    last = Path("checkpoints", "epoch=0-step=6.ckpt")
    assert digests(volume / last) == digests(tmp_path / "undisturbed" / last)
