"""Two `keepstep run`s on two volumes, with one destination: the second is refused while the first one is alive."""

import os
import signal
import socket
from pathlib import Path

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import JUST_IN_TIME, RunProcess
from tests.servers.server import Bucket

LEASE = ".keepstep/lease/run.json"


@pytest.mark.parametrize("restore", ["whole", "lazy", "off"])
def test_the_second_is_refused_until_the_first_has_ended(restore: str, tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/store"
    with RunProcess(tmp_path / "one", destination, trainer={"EVERY": 50}) as first:
        first.wait_steps(60)
        with RunProcess(tmp_path / "two", destination, restore=restore) as second:
            assert second.wait() == 1, second.output()
        holder = f"process {first.process.pid} on {socket.gethostname()}"
        assert f"error: another run is alive at this destination: {holder}\n" in second.output()
        assert second.steps() == []
        # The first one has not noticed anything.
        first.wait_steps(2)
        assert not first.log("run.another_run"), first.output()
        first.signal(signal.SIGTERM)
        assert first.wait() == JUST_IN_TIME, first.output()
    with RunProcess(tmp_path / "two", destination, restore=restore, trainer={"STEPS": 1}) as second:
        assert second.wait() == 0, second.output()
        # That of its first start.
        assert len(second.log("run.waits_for_lease")) == 1, second.output()
    assert not (tmp_path / "store" / LEASE).exists()


def test_a_volume_of_a_run_that_was_refused_is_bound_to_nothing(tmp_path: Path) -> None:
    with RunProcess(tmp_path / "one", f"file://{tmp_path}/store") as first:
        first.wait_steps(2)
        with RunProcess(tmp_path / "two", f"file://{tmp_path}/store") as second:
            assert second.wait() == 1, second.output()
        with RunProcess(tmp_path / "two", f"file://{tmp_path}/another", trainer={"STEPS": 1}) as second:
            assert second.wait() == 0, second.output()
        first.signal(signal.SIGTERM)
        first.wait()


def test_the_second_is_refused_where_the_programs_know_nothing_of_us(tmp_path: Path, moto_bucket: Bucket) -> None:
    bucket = BucketView(moto_bucket)
    command = ("sleep", "1000")

    def run(name: str) -> RunProcess:
        endpoint, output = moto_bucket.endpoint_url, tmp_path / name / "out"
        return RunProcess(
            tmp_path / name, moto_bucket.destination, command=command, endpoint_url=endpoint, watch=output
        )

    with run("one") as first:
        wait_until(lambda: bucket.keys(LEASE) == [LEASE], HANG_SECONDS, "the lease")
        with run("two") as second:
            assert second.wait() == 1, second.output()
        assert "another run is alive at this destination" in second.output()
        first.signal(signal.SIGTERM)
        first.wait()
    assert bucket.keys(LEASE) == []


def test_a_person_lets_the_second_take_over_and_the_first_says_so(tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/store"
    with RunProcess(tmp_path / "one", destination) as first:
        first.wait_steps(2)
        with RunProcess(tmp_path / "two", destination, take_over=True) as second:
            wait_until(lambda: bool(first.log("run.another_run")), HANG_SECONDS, "the first one hears of it")
            first.signal(signal.SIGTERM)
            assert first.wait() == JUST_IN_TIME, first.output()
            assert (tmp_path / "store" / LEASE).exists(), "the second one's lease stays"
            second.signal(signal.SIGTERM)
            assert second.wait() == JUST_IN_TIME, second.output()
        assert second.log("run.takes_over")


def test_a_killed_run_goes_on_at_once_on_its_volume_and_soon_on_another(tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/store"
    with RunProcess(tmp_path / "one", destination, trainer={"EVERY": 10}) as first:
        first.wait_steps(20)
        for pid in [first.process.pid, *first.children()]:
            os.kill(pid, signal.SIGKILL)
        first.wait()
    assert (tmp_path / "store" / LEASE).exists()
    with RunProcess(tmp_path / "one", destination) as again:
        again.wait_steps(1)
        assert not again.log("run.waits_for_lease"), again.output()
        for pid in [again.process.pid, *again.children()]:
            os.kill(pid, signal.SIGKILL)
        again.wait()
    with RunProcess(tmp_path / "two", destination, trainer={"STEPS": 1}) as other:
        assert other.wait() == 0, other.output()
        (waited,) = other.log("run.waits_for_lease")
        assert waited["at_most_seconds"] <= 45


def test_a_run_that_reads_nothing_begins_without_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = f"file://{tmp_path}/file/store"
    with RunProcess(tmp_path / "one", bad, restore="off") as run:
        run.wait_steps(2)
        assert run.log("run.lease_not_taken"), run.output()
    with RunProcess(tmp_path / "two", f"file://{tmp_path}/new", restore="off", trainer={"STEPS": 1}) as run:
        assert run.wait() == 0, run.output()
        assert not run.log("run.lease_not_taken"), run.output()


def test_nodes_of_one_attempt_share_a_destination(tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/store"
    with (
        RunProcess(tmp_path / "0", destination, trainer={"STEPS": 20}, attempt="job", place="0", node_rank=0) as first,
        RunProcess(tmp_path / "1", destination, trainer={"STEPS": 20}, attempt="job", place="1", node_rank=1) as second,
    ):
        assert first.wait() == 0, first.output()
        assert second.wait() == 0, second.output()
