"""The ledger of real lives: what real agents, restores and programs leave is what a report makes of it.

No figure here depends on the machine's speed: what was lost is known in steps, and the causes sum up to the wall time.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess
from tests.harness.warm_python import keepstep
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.catalog.ledger import read_ledger
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.ledger import AgentEnded, Saved

# Trains once `GO` exists. Saves every fifth step; stands still after `STOP_AT` until it is killed, or told to end.
PROGRAM = """
import os, sys, time
import keepstep
from keepstep.agent_client import channel
# An agent that answers late on a busy machine is not away.
channel.Channel._call.__kwdefaults__["deadline_seconds"] = channel.ANNOUNCE_SECONDS = 300.0
checkpointer = keepstep.Checkpointer()
path = checkpointer.resume()
step = int((path / "step").read_text()) if path else 0
print("begin", step, flush=True)
while not checkpointer.stopping:
    if step < int(os.environ["STOP_AT"]) and os.path.exists(os.environ.get("GO", "/")):
        step += 1
        print("at", step, flush=True)
    if checkpointer.should_save(step, every=5):
        with checkpointer.save(step, units={"samples": 8 * step}) as directory:
            (directory / "step").write_text(str(step))
        print("saved", step, flush=True)
    time.sleep(0.01)
checkpointer.finish()
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return (sys.executable, str(path))


def killed(run: RunProcess) -> None:
    """End all of it as a node that is lost: no process has a last word."""
    run.process.send_signal(signal.SIGSTOP)
    for pid in run.children():
        os.kill(pid, signal.SIGKILL)
    run.process.kill()
    run.process.wait(HANG_SECONDS)


def said(run: RunProcess, line: str) -> None:
    def has_said() -> bool:
        assert run.process.poll() is None, run.output()
        return f"{line}\n" in run.output()

    wait_until(has_said, HANG_SECONDS, line)


def committed(run: RunProcess, step: int) -> None:
    def is_committed() -> bool:
        return any(line["step"] == step for line in run.log("checkpoint.committed"))

    wait_until(is_committed, HANG_SECONDS, f"step {step} is committed")


def noted_steps(bucket: Bucket) -> set[int]:
    """The steps of the saves that the ledger has."""

    async def read() -> set[int]:
        settings = StoreSettings(destination=bucket.destination, endpoint_url=bucket.endpoint_url)
        async with open_store(settings) as store:
            lives = (await read_ledger(store)).lives
        return {entry.step for life in lives for entry in life.entries if isinstance(entry, Saved)}

    return asyncio.run(read())


def reported(destination: str, *options: str) -> dict[str, Any]:
    completed = keepstep("report", destination, *options, "--json")
    assert completed.returncode == 0, completed.stderr
    (run,) = json.loads(completed.stdout)["runs"]
    assert run["productive_seconds"] + sum(run["lost_seconds"].values()) == pytest.approx(run["wall_seconds"], rel=0.02)
    return dict(run)


def test_a_run_that_was_killed_lost_the_steps_that_its_next_start_did_again(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy, program: tuple[str, ...]
) -> None:
    began_at = time.time()
    # A node that is lost takes its volume along, and a person knows that its run is no longer alive.
    volumes = [tmp_path / f"volume-{number}" for number in range(3)]
    options: dict[str, Any] = {"command": program, "endpoint_url": fault_proxy.endpoint_url, "take_over": True}
    with RunProcess(volumes[0], rclone_bucket.destination, environment={"STOP_AT": "10"}, **options) as run:
        committed(run, 10)
        killed(run)
    # Steps 15 and 20 are announced here, and never stored: only the ledger passes.
    fault_proxy.add(Rule(name="away", fault=Fault.STATUS, method="PUT", target="/checkpoint-", times=-1, status=503))
    with RunProcess(volumes[1], rclone_bucket.destination, environment={"STOP_AT": "20"}, **options) as run:
        said(run, "begin 10")
        said(run, "saved 20")
        wait_until(lambda: len(run.log("checkpoint.announced")) == 2, HANG_SECONDS, "steps 15 and 20 are announced")
        # A notice has what is known written at once.
        noticed = keepstep("terminating", "--socket", volumes[1] / ".keepstep" / "agent.sock")
        assert noticed.returncode == 0, noticed.stderr
        wait_until(lambda: 20 in noted_steps(rclone_bucket), HANG_SECONDS, "step 20 is in the ledger")
        killed(run)
    fault_proxy.clear()
    with RunProcess(volumes[2], rclone_bucket.destination, environment={"STOP_AT": "30"}, **options) as run:
        said(run, "begin 10")
        committed(run, 30)
        run.signal(signal.SIGTERM)
        assert run.wait() == 143, run.output()
    ended_at = time.time()

    found = reported(rclone_bucket.destination, "--endpoint-url", rclone_bucket.endpoint_url)
    assert [start["resumed_step"] for start in found["starts"]] == [0, 10, 10]
    assert [start["lost_steps"] for start in found["starts"]] == [0, 0, 10]
    assert [start["ended"] for start in found["starts"]] == [False, False, True]
    assert found["steps_lost_known"] == 10
    assert found["units"] == {"samples": 240}
    first, second, third = found["starts"]
    assert began_at - 1 <= first["began_at"] < third["ended_at"] <= ended_at + 1
    assert found["wall_seconds"] == pytest.approx(third["ended_at"] - first["began_at"], rel=0.02)
    lost = found["lost_seconds"]
    between = second["began_at"] - first["ended_at"] + third["began_at"] - second["ended_at"]
    assert lost["waiting"] == pytest.approx(between, rel=0.02)
    assert all(lost[cause] > 0 for cause in ("restore", "start", "redone"))


def test_a_just_in_time_save_kept_its_steps_although_the_agent_had_died_before(
    tmp_path: Path, program: tuple[str, ...]
) -> None:
    destination, go = f"file://{tmp_path}/bucket", tmp_path / "go"
    with RunProcess(
        tmp_path / "volume", destination, command=program, environment={"STOP_AT": "13", "GO": str(go)}
    ) as run:
        said(run, "begin 0")
        wait_until(lambda: bool(run.log("ranks.alive")), HANG_SECONDS, "the agent sees the program")
        run.kill_agent()
        wait_until(lambda: len(run.log("ranks.alive")) > 1, HANG_SECONDS, "the next agent sees the program")
        go.touch()
        committed(run, 10)
        said(run, "at 13")
        run.signal(signal.SIGTERM)
        assert run.wait() == 143, run.output()
    found = reported(destination)
    assert [(start["resumed_step"], start["ended"]) for start in found["starts"]] == [(0, True)]
    assert (found["kept_steps"], found["steps_lost"], found["committed"]) == (3, 0, 3)
    assert 0 < found["kept_seconds"] <= found["productive_seconds"]
    assert (found["lost_seconds"]["redone"], found["lost_seconds"]["waiting"]) == (0, 0)


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_fails_is_told_from_one_that_ends_well(tmp_path: Path, code: int) -> None:
    destination = f"file://{tmp_path}/bucket"
    program = "import keepstep, sys\nwith keepstep.Checkpointer().save(1) as d: (d / 'state').write_text('1')\n"
    with RunProcess(
        tmp_path / "volume", destination, command=(sys.executable, "-c", f"{program}sys.exit({code})")
    ) as run:
        assert run.process.wait(HANG_SECONDS) == code

    async def ends() -> list[AgentEnded]:
        async with open_store(StoreSettings(destination=destination)) as store:
            lives = (await read_ledger(store)).lives
        return [entry for life in lives for entry in life.entries if isinstance(entry, AgentEnded)]

    (end,) = asyncio.run(ends())
    assert (end.code, end.program_failed) == (0, code != 0)
