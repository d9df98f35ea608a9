"""A trainer that makes no steps is said to be stuck, by the real agent, and `keepstep run` ends it if it is told to."""

import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess
from tests.servers.process import free_port

from keepstep_agent.cli.agent_call import agent_stub
from keepstep_api.v1 import agent_pb2

STUCK_EXIT_CODE = 77
# It makes ten steps, saves, and waits for ever: SIGTERM does not wake it. `STUCK_CHILD` lets a child do that, as a
# launcher's rank.
PROGRAM = textwrap.dedent(
    """\
    import os, subprocess, sys, time
    if os.environ.pop("STUCK_CHILD", ""):
        os.environ["IS_RANK"] = "1"
        sys.exit(subprocess.run([sys.executable, __file__]).returncode)
    import keepstep
    from keepstep.agent_client import channel
    # An agent that answers late on a busy machine is not away.
    channel.Channel._call.__kwdefaults__["deadline_seconds"] = channel.ANNOUNCE_SECONDS = 300.0
    checkpointer = keepstep.Checkpointer()
    checkpointer.resume()
    for step in range(1, 11):
        if checkpointer.should_save(step, every=10):
            with checkpointer.save(step) as directory:
                (directory / "step").write_text(str(step))
    while True:
        time.sleep(3600)
    """
)


def stuck_run(tmp_path: Path, *, environment: dict[str, str] | None = None, **settings: Any) -> RunProcess:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return RunProcess(
        tmp_path / "volume",
        f"file://{tmp_path}/bucket",
        command=(sys.executable, str(program)),
        environment=environment,
        grace_seconds=3,
        step_timeout="10s",
        **settings,
    )


def status(run: RunProcess) -> agent_pb2.Status:
    with agent_stub(str(run.volume / ".keepstep" / "agent.sock")) as stub:
        found: agent_pb2.Status = stub.GetStatus(agent_pb2.GetStatusRequest(), timeout=HANG_SECONDS)
    return found


def test_a_stuck_trainer_is_said_in_log_status_metrics_and_to_probes(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with stuck_run(tmp_path, http_address=address) as run:
        wait_until(lambda: bool(run.log("trainer.stuck")), HANG_SECONDS, "it says so")
        (said,) = run.log("trainer.stuck")
        # Of ten steps in less than a second it was told one.
        step = said["step"]
        assert 1 <= step <= 10
        found = status(run).progress
        assert (found.step, found.stuck) == (step, True)
        assert found.age_seconds >= 10
        shown = subprocess.run(
            [sys.executable, "-m", "keepstep_agent", "status", "--volume", str(run.volume)],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert f"trainer: stuck at step {step} for " in shown.stdout
        metrics = urllib.request.urlopen(f"http://{address}/metrics", timeout=HANG_SECONDS).read().decode()
        assert f"keepstep_trainer_step {step}.0" in metrics
        assert "keepstep_trainer_stuck 1.0" in metrics
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{address}/progressz", timeout=HANG_SECONDS)
        # Nobody asked for more than that.
        assert run.process.poll() is None


@pytest.mark.parametrize("has_launcher", [False, True])
def test_a_run_ends_a_stuck_program_and_its_ranks_with_the_code_that_it_was_told(
    tmp_path: Path, has_launcher: bool
) -> None:
    environment = {"STUCK_CHILD": "1"} if has_launcher else {}
    with stuck_run(tmp_path, environment=environment, stuck_exit_code=STUCK_EXIT_CODE) as run:
        assert run.wait() == STUCK_EXIT_CODE
    assert len(run.log("run.stuck")) == 1
    assert bool(run.log("run.rank_killed")) == has_launcher
    # What was saved before is stored all the same.
    assert [line["step"] for line in run.log("checkpoint.committed")] == [10]
