"""Two ranks of Hugging Face's Trainer without gradient accumulation, stopped at a step that is evaluated and saved.

The matrix in tests/trainers stops them with it, at every other moment and in every other way. And one of two ranks is
killed in a save.
"""

import re
import signal
from pathlib import Path

import pytest
from tests.trainers.job import SLOW_SECONDS, Job
from tests.trainers.tensors import digests

from keepstep.checkpoints.records import Kind, read_records
from keepstep_api import names

pytest.importorskip("transformers")
pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).parents[2] / "examples" / "hugging_face.py"
STEPS, SAVED, STOPPED = 13, 5, 10


def test_an_evaluation_that_a_stop_came_before_is_made_up_for_on_all_ranks(tmp_path: Path) -> None:
    arguments = ["--steps", str(STEPS), "--save-every", str(SAVED), "--accumulation", "1"]
    undisturbed = Job(PROGRAM, arguments, volume=tmp_path / "undisturbed", folder=tmp_path / "undisturbed-pod")
    with undisturbed as job:
        assert job.wait() == 0, job.output()

    volume = tmp_path / "volume"
    with Job(PROGRAM, arguments, volume=volume, folder=tmp_path / "stopped-pod") as stopped:
        stopped.order(hold="step", at_step=STOPPED)
        stopped.wait_held("step")
        stopped.signal(1, signal.SIGTERM)
        # Until its thread has told the other rank: what counts is that both stop at one step.
        stopped.order(step_seconds=SLOW_SECONDS)
        assert stopped.wait() != 0
    records = read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)
    assert records[0].kind is Kind.JUST_IN_TIME, stopped.output()
    assert stopped.last_steps() == [records[0].step] * 2
    assert STOPPED <= records[0].step <= STOPPED + 2

    with Job(PROGRAM, arguments, volume=volume, folder=tmp_path / "resumed-pod", begin=records[0].step) as resumed:
        assert resumed.wait() == 0, resumed.output()
    assert stopped.losses() | resumed.losses() == undisturbed.losses()
    assert list(resumed.losses()) == list(range(records[0].step + 1, STEPS + 1))
    last = Path("checkpoints", f"checkpoint-{STEPS}")
    assert digests(volume / last) == digests(tmp_path / "undisturbed" / last)


def test_a_rank_that_is_killed_in_a_save_is_not_waited_for(tmp_path: Path) -> None:
    arguments = ["--steps", str(STEPS), "--save-every", str(SAVED)]
    with Job(PROGRAM, arguments, volume=tmp_path / "volume", folder=tmp_path / "pod") as job:
        job.order(hold="save", at_step=SAVED)
        job.wait_held("save", ranks=1)
        job.signal(1, signal.SIGKILL)
        job.order()
        assert job.wait() != 0
        output = job.output()
    assert "a rank is gone and not waited for" in output, output
    assert "ended=rank 1" in output, output
    # torchrun names the ranks in any order.
    codes = re.findall(r"rank +: (\d) .*\n +exitcode +: (-?\d+)", output)
    assert dict(codes)["0"] != "-9", output
