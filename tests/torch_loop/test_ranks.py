"""Several ranks: the examples, stopped and started again, and what another number of ranks takes over."""

import re
from pathlib import Path

import pytest
from tests.torch_loop.torchrun import ROOT, run, torchrun

from keepstep.checkpoints.records import Kind, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STOPPED = Path(__file__).with_name("stopped_at.py")
RESHARD = Path(__file__).with_name("reshard.py")
FAILING = Path(__file__).with_name("failing_rank.py")
STUCK = Path(__file__).with_name("stuck_rank.py")
STEPS = 20
STOP_AFTER = 13
"""In the second epoch of `ddp`, and between two saves."""


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_an_example_that_is_stopped_and_started_again_ends_bit_identical(name: str, tmp_path: Path) -> None:
    """Without an agent, and without DataLoader workers; the matrix in tests/trainers does so with them."""
    program = ROOT / "examples" / f"{name}.py"
    arguments = ("--steps", str(STEPS), "--save-every", "5")
    whole = torchrun(program, *arguments, directory=tmp_path / "whole")
    assert whole.code == 0, whole.output
    assert len(whole.lines("step=")) == STEPS
    more = (*arguments, "--workers", "0")
    stopped = torchrun(STOPPED, str(STOP_AFTER), "1", str(program), *more, directory=tmp_path / "stopped")
    assert stopped.code == 1, stopped.output
    newest = read_records(tmp_path / "stopped" / ".keepstep" / "records")[0]
    assert newest.kind is Kind.JUST_IN_TIME, stopped.output
    assert STOP_AFTER < newest.step <= STOP_AFTER + 2
    # torchrun sends the second a SIGTERM as soon as the first has left.
    assert re.findall(r"exitcode +: (-?\d+)", stopped.output) == ["143", "143"], stopped.output
    rest = torchrun(program, *more, directory=tmp_path / "stopped")
    assert rest.code == 0, rest.output
    assert sorted(stopped.lines("step=") + rest.lines("step=")) == whole.lines("step=")
    assert rest.lines("done") == whole.lines("done")


def test_another_number_of_ranks_takes_over_weights_optimizer_and_place_in_the_data(tmp_path: Path) -> None:
    by_two, by_one = str(tmp_path / "by-two"), str(tmp_path / "by-one")
    two = torchrun(RESHARD, "-", "3", by_two, directory=tmp_path)
    assert two.code == 0, two.output
    one = run([str(RESHARD), by_two, "4", by_one], directory=tmp_path)
    assert one.code == 0, one.output
    again = torchrun(RESHARD, by_one, "100", "-", directory=tmp_path)
    assert again.code == 0, again.output
    for kind in ("ddp", "fsdp2"):
        assert one.lines(f"{kind} begins with") == two.lines(f"{kind} ends with") != []
        assert again.lines(f"{kind} begins with") == one.lines(f"{kind} ends with") != []
        # Every sample of the epoch was trained, and none twice.
        batches = [line for job in (two, one, again) for line in job.lines(f"{kind} batch")]
        assert sorted(int(sample) for batch in batches for sample in batch.split()) == list(range(64))
        # Each of the two draws its own numbers, though rank 1 has none to go on with.
        assert len(set(again.lines(f"{kind} draws"))) == 2


def test_a_run_goes_on_with_another_number_of_ranks_from_the_step_that_the_last_one_saved(tmp_path: Path) -> None:
    program = ROOT / "examples" / "fsdp2.py"
    for ranks, begin, end in ((2, 0, 5), (1, 5, 8), (2, 8, 11)):
        ended = torchrun(program, "--steps", str(end), "--workers", "0", directory=tmp_path, ranks=ranks)
        assert ended.code == 0, ended.output
        steps = [int(line.split()[0]) for line in ended.lines("step=")]
        assert sorted(steps) == list(range(begin + 1, end + 1)), ended.output
        newest = read_records(tmp_path / ".keepstep" / "records")[0]
        assert (newest.step, newest.world_size) == (end, ranks)


def test_a_rank_that_cannot_save_costs_that_checkpoint_and_holds_nobody_up(tmp_path: Path) -> None:
    ended = torchrun(FAILING, directory=tmp_path)
    assert ended.code == 0, ended.output
    assert ended.lines("done") == ["0 8", "1 8"]
    assert [record.step for record in read_records(tmp_path / ".keepstep" / "records")] == [8]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == ["checkpoint-8"]
    (lost,) = ended.lines("checkpoint lost: path=")
    assert lost.endswith("checkpoint-6 error=ValueError: nobody thought of this")
    for step, reason in ((2, "volume of that rank is full"), (4, "no room for a copy")):
        said = ended.lines(f"checkpoint given up, training goes on: step={step}")
        assert len(said) == 2
        assert all(reason in line and "rank 1" in line for line in said), said


def test_a_rank_whose_volume_hangs_costs_the_others_a_bounded_wait(tmp_path: Path) -> None:
    ended = torchrun(STUCK, directory=tmp_path)
    assert ended.code == 0, ended.output
    assert ended.lines("done") == ["0 4", "1 4"]
    assert "the last checkpoint is still being written" in ended.output
    assert not read_records(tmp_path / ".keepstep" / "records")
