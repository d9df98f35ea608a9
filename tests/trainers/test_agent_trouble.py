"""Whatever becomes of the agent or the disk, training goes on to its end: a bounded delay and a word about it, no more.

One process each: what ranks agree on is a matter of the ranks, and the trouble is each one's own.
"""

import contextlib
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess
from tests.harness.bounds import HANG_SECONDS
from tests.harness.small_volume import mounted
from tests.servers.server import Bucket
from tests.trainers.job import Job
from tests.trainers.trainers import EXAMPLES, Moment

from keepstep_api import names

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1000)]
STEPS = 12
ARGUMENTS = ("--steps", str(STEPS), "--save-every", "4")

PROGRAMS = pytest.mark.parametrize("program", ["ddp", "hugging_face"])


def job(program: str, volume: Path, folder: Path, *, patient: bool = False) -> Job:
    return Job(EXAMPLES / f"{program}.py", ARGUMENTS, volume=volume, folder=folder / "job", ranks=1, patient=patient)


def assert_trained_to_the_end(job: Job) -> None:
    assert job.wait() == 0, job.output()
    assert list(job.losses()) == list(range(1, STEPS + 1))
    assert job.longest_step_seconds() < HANG_SECONDS


@PROGRAMS
def test_an_agent_that_never_was_there_costs_one_warning(program: str, tmp_path: Path) -> None:
    with job(program, tmp_path / "volume", tmp_path) as training:
        assert_trained_to_the_end(training)
    assert len(training.warnings("agent unreachable")) == 1, training.output()


@PROGRAMS
def test_an_agent_that_accepts_and_never_answers_costs_one_warning(
    program: str, tmp_path: Path, short_directory: Path
) -> None:
    state = short_directory / "volume" / names.STATE_DIRECTORY
    state.mkdir(parents=True)
    with _deaf(state / names.SOCKET), job(program, short_directory / "volume", tmp_path) as training:
        assert_trained_to_the_end(training)
    assert len(training.warnings("agent unreachable")) == 1, training.output()


@PROGRAMS
def test_an_agent_that_dies_in_mid_training_costs_one_warning(
    program: str, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    agent = AgentProcess(volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url)
    # Before it dies it answers, and is not away because it is slow.
    with agent, job(program, volume, tmp_path, patient=True) as training:
        training.order(hold=Moment.STEP, at_step=6)
        training.wait_held(Moment.STEP)
        agent.kill()
        training.order()
        assert_trained_to_the_end(training)
    assert len(training.warnings("agent unreachable")) == 1, training.output()


@pytest.mark.root
def test_a_full_disk_costs_the_checkpoints_and_not_the_training(tmp_path: Path) -> None:
    """A Checkpointer's training, which says at its end that its last step is lost.

    Hugging Face's own saves end it on a full disk, with Keepstep or without.
    """
    with mounted(tmp_path / "volume", 2_000_000) as volume, job("ddp", volume, tmp_path) as training:
        training.order(hold=Moment.STEP, at_step=6)
        training.wait_held(Moment.STEP)
        # The file system may need some of what it says is free.
        with (volume / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            free = shutil.disk_usage(volume).free
            while free and filler.write(b"x" * min(free, 4096)):
                free = shutil.disk_usage(volume).free
        training.order()
        assert training.wait() != 0, training.output()
        assert list(training.losses()) == list(range(1, STEPS + 1))
        assert f"the final checkpoint of step {STEPS} was lost" in training.output()
        assert not list((volume / names.CHECKPOINT_DIRECTORY).glob(f"checkpoint-{STEPS}")), training.output()
        lost = [line.split("step=")[1].split()[0] for line in training.warnings("checkpoint given up")]
        # One for each save, of which the last step's is tried once more at the end.
        assert lost == ["8", "12", "12"], training.output()


@contextlib.contextmanager
def _deaf(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        accepted: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    accepted.append(listener.accept()[0])
            except OSError:
                return  # shut down below

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(HANG_SECONDS)
            for connection in accepted:
                connection.close()
