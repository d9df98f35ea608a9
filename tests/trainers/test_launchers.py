"""Launchers other than torchrun, under `keepstep run`: a SIGTERM ends them at once, and their ranks save nevertheless.

Each is the real one, with the real example of its framework.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import RunProcess
from tests.harness.warm_python import TRAINER_ENVIRONMENT
from tests.servers.process import free_port
from tests.servers.server import Bucket
from tests.trainers.job import PACED, START_SECONDS
from tests.trainers.trainers import EXAMPLES

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1800)]
SPAWNED: Final = str(Path(__file__).with_name("spawned_ranks.py"))
BIN: Final = Path(sys.executable).parent
STEPS: Final = ("--steps", "100000", "--save-every", "100000")
JUST_IN_TIME: Final = 143
# A process that was started in the background ignores SIGINT, which torch sends to ranks whose parent has died.
WITH_INTERRUPTS: Final = ("env", "--default-signal=INT")


@contextmanager
def launched(bucket: Bucket, folder: Path, *command: str, **environment: str) -> Iterator[RunProcess]:
    """A run of that command, whose ranks do steps of a fifth of a second; nothing of it is left in the end."""
    (folder / "orders.json").write_text(json.dumps({"hold": "", "at_step": 0, "step_seconds": 0.2}))
    variables = {"PACE_DIRECTORY": str(folder), "PACE_PATIENT": "1", "GLOO_SOCKET_IFNAME": "lo", **TRAINER_ENVIRONMENT}
    try:
        with RunProcess(
            folder / "volume",
            bucket.destination,
            environment=variables | environment,
            command=command,
            prefix=WITH_INTERRUPTS,
            endpoint_url=bucket.endpoint_url,
            grace_seconds=HANG_SECONDS,
        ) as run:
            yield run
        wait_until(lambda: not any(map(runs, pids(folder))), HANG_SECONDS, "the ranks have left")
    finally:
        for pid in pids(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def logs(folder: Path) -> list[list[str]]:
    """What each rank has written down: its pid, then its steps."""
    return [path.read_text().splitlines() for path in folder.glob("rank-*.log")]


def pids(folder: Path) -> list[int]:
    return [int(lines[0].split()[1]) for lines in logs(folder) if lines]


def runs(pid: int) -> bool:
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def last_steps(folder: Path) -> list[int]:
    return [int(lines[-1].split()[0]) if len(lines) > 1 else 0 for lines in logs(folder)]


def terminate(run: RunProcess, folder: Path, ranks: int) -> None:
    """SIGTERM to the runner when every rank trains; it must end as after a just-in-time save."""

    def all_train() -> bool:
        assert run.process.poll() is None, run.output()
        steps = last_steps(folder)
        return len(steps) == ranks and min(steps) >= 2

    wait_until(all_train, START_SECONDS, "all ranks train")
    run.signal(signal.SIGTERM)
    assert run.wait(HANG_SECONDS) == JUST_IN_TIME, run.output()


def committed_steps(bucket: Bucket) -> set[int]:
    return set(BucketView(bucket).steps())


def test_spawned_ranks_whose_parent_dies_of_the_sigterm_save_just_in_time(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    command = (sys.executable, SPAWNED, str(free_port()), str(EXAMPLES / "ddp.py"), *STEPS)
    with launched(rclone_bucket, tmp_path, *command) as run:
        terminate(run, tmp_path, 2)
        assert run.log("run.waits_for_processes")
    assert committed_steps(rclone_bucket) == set(last_steps(tmp_path)), run.output()


@pytest.mark.nightly
def test_with_autoload_the_parent_of_spawned_ranks_waits_for_them_and_exits_as_they_do(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    command = (sys.executable, SPAWNED, str(free_port()), str(EXAMPLES / "ddp.py"), *STEPS)
    with launched(rclone_bucket, tmp_path, *command, PYTHONPATH=autoload_first()) as run:
        terminate(run, tmp_path, 2)
        assert not run.log("ranks.left_behind")
    assert committed_steps(rclone_bucket) == set(last_steps(tmp_path)), run.output()
    assert "Traceback" not in run.output()
    assert "joined" not in run.output()


def autoload_first() -> str:
    from keepstep.autoload import path

    return os.pathsep.join([str(path()), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.nightly
def test_what_accelerate_launch_has_started_saves_just_in_time(rclone_bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    command = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes=1", "--num_machines=1"]
    command += ["--mixed_precision=no", "--dynamo_backend=no", str(PACED), str(EXAMPLES / "accelerate_loop.py"), *STEPS]
    with launched(rclone_bucket, tmp_path, *command) as run:
        terminate(run, tmp_path, 1)
        assert run.log("run.waits_for_processes")
    assert committed_steps(rclone_bucket) == set(last_steps(tmp_path)), run.output()


@pytest.mark.nightly
def test_what_the_deepspeed_launcher_has_started_saves_just_in_time(rclone_bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    command = [str(BIN / "deepspeed"), "--num_gpus=2", "--num_nodes=1", f"--master_port={free_port()}"]
    command += ["--no_local_rank", str(PACED), str(EXAMPLES / "deepspeed_zero3.py"), *STEPS]
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    with launched(rclone_bucket, tmp_path, *command, PATH=path) as run:
        terminate(run, tmp_path, 2)
        assert run.log("run.waits_for_processes")
    assert committed_steps(rclone_bucket) == set(last_steps(tmp_path)), run.output()
