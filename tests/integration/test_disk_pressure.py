"""A volume that runs short of room: older checkpoints are given up, and the last save is always safe."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from tests.harness.agent_process import AgentProcess, json_lines, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.small_volume import mounted
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from keepstep_api import names
from keepstep_api.v1 import agent_pb2

MIB = 1024 * 1024
VOLUME_BYTES = 512 * MIB
CHECKPOINT_BYTES = 100 * MIB
# A busy machine too writes more than that.
STORE_BYTES_PER_SECOND = 8 * MIB
GRACE_SECONDS = 600.0
BACKLOG = 600
SIZE_LIMIT_BYTES = 64 * MIB

TRAINER = """
import json, logging, sys, time
import keepstep
from keepstep.agent_client import channel
# What an agent asks is obeyed here however busy the machine is; that a silent one is not waited for is another test's.
channel.ANNOUNCE_SECONDS = 300.0
channel.Channel._call.__kwdefaults__["deadline_seconds"] = 300.0
logging.basicConfig(level=logging.INFO, format="%(message)s")
size_bytes = int(sys.argv[1])
piece = bytes(range(256)) * 4096

def say(**what):
    print(json.dumps(what), flush=True)

checkpointer = keepstep.Checkpointer()
checkpointer.resume()
step = 0
while not checkpointer.stopping:
    step += 1
    begun = time.monotonic()
    if checkpointer.should_save(step, every=1):
        try:
            with checkpointer.save(step) as directory, (directory / "model.bin").open("wb") as file:
                for number in range(size_bytes // len(piece)):
                    if number == 50:
                        say(event="half", step=step)
                    file.write(piece)
            say(event="saved", step=step, stopping=checkpointer.stopping)
        except OSError as error:
            say(event="failed", step=step, error=str(error))
    else:
        say(event="skipped", step=step)
    while time.monotonic() - begun < 1.0 and not checkpointer.stopping:
        time.sleep(0.02)
        if checkpointer.should_save(step, every=0):
            break
checkpointer.finish()
"""


class Trainer:
    """A real training process with the real client; `events` is what it has said so far."""

    def __init__(self, agent: AgentProcess) -> None:
        self.events: list[dict[str, Any]] = []
        self.log: list[str] = []
        environment = {
            **os.environ,
            names.ENV_VOLUME: str(agent.volume),
            names.ENV_CHECKPOINT_DIRECTORY: str(agent.checkpoints),
            names.ENV_SOCKET: str(agent.socket),
        }
        command = [sys.executable, "-c", TRAINER, str(CHECKPOINT_BYTES)]
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._readers = [threading.Thread(target=read) for read in (self._read_events, self._read_log)]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(HANG_SECONDS)
        for reader in self._readers:
            reader.join(HANG_SECONDS)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_seconds: float) -> int:
        code = self._process.wait(timeout_seconds)
        for reader in self._readers:
            reader.join(timeout_seconds)
        return code

    def steps(self, event: str) -> list[int]:
        return [line["step"] for line in list(self.events) if line["event"] == event]

    def _read_events(self) -> None:
        for line in self._process.stdout or ():
            self.events.append(json.loads(line))

    def _read_log(self) -> None:
        self.log.extend(self._process.stderr or ())


@pytest.fixture
def agent(tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy) -> Iterator[AgentProcess]:
    fault_proxy.throttle(STORE_BYTES_PER_SECOND)
    with (
        mounted(tmp_path / "volume", VOLUME_BYTES) as volume,
        AgentProcess(
            volume,
            rclone_bucket.destination,
            endpoint_url=fault_proxy.endpoint_url,
            part_size_bytes="8MiB",
            grace_seconds=GRACE_SECONDS,
        ) as agent,
    ):
        yield agent


def shed_although_newest(agent: AgentProcess) -> list[int]:
    """Steps that were given up while nothing newer was there."""
    step_of = {line["save"]: line["step"] for line in agent.log("checkpoint.announced")}
    newest, wrong = -1, []
    for line in json_lines(agent.log_text()):
        if line["event"] == "checkpoint.staged":
            newest = max(newest, step_of[line["save"]])
        if line["event"] == "checkpoint.shed" and line["step"] >= newest:
            wrong.append(line["step"])
    return wrong


def last_save(trainer: Trainer) -> int:
    (step,) = [line["step"] for line in trainer.events if line["event"] == "saved" and line["stopping"]]
    return int(step)


def train(agent: AgentProcess, *, until: Callable[[Trainer], bool], end_when: str) -> Trainer:
    """Train, then let the pod end at the next event `end_when`; the trainer is gone, all is drained."""
    with Trainer(agent) as trainer:
        wait_until(lambda: until(trainer), HANG_SECONDS, "it has trained")
        seen = len(trainer.steps(end_when))
        wait_until(lambda: len(trainer.steps(end_when)) > seen, HANG_SECONDS, "the moment to end it")
        trainer.terminate()
        assert trainer.wait(HANG_SECONDS) == names.JUST_IN_TIME_EXIT_CODE, trainer.log
    agent.terminate()
    assert agent.wait(HANG_SECONDS) == 0, agent.log_text()
    return trainer


def check_that_nothing_was_lost(agent: AgentProcess, trainer: Trainer, bucket: Bucket) -> None:
    """The last save is whole in the bucket; the volume was never full; no newest checkpoint was given up."""
    assert trainer.steps("failed") == [], "the volume was full"
    step = last_save(trainer)
    assert step == max(trainer.steps("saved"))
    (announced,) = [line for line in agent.log("checkpoint.announced") if line["step"] == step]
    assert announced["kind"] == "just-in-time"
    assert shed_although_newest(agent) == []
    rows = BucketView(bucket).verify()
    assert rows[0]["step"] == step
    assert all(row["problems"] == [] for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", ["saved", "half"], ids=["between two saves", "in the middle of a save"])
@pytest.mark.root
def test_the_last_save_always_has_room_and_superseded_ones_make_it(
    agent: AgentProcess, rclone_bucket: Bucket, moment: str
) -> None:
    def has_trained(trainer: Trainer) -> bool:
        # The volume was short of room, again and again, and recovery points came all the while.
        return len(agent.log("checkpoint.shed")) >= 5 and len(agent.log("checkpoint.committed")) >= 2

    trainer = train(agent, until=has_trained, end_when=moment)
    check_that_nothing_was_lost(agent, trainer, rclone_bucket)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.root
def test_a_save_that_would_not_fit_is_skipped_and_the_log_says_why(agent: AgentProcess, rclone_bucket: Bucket) -> None:
    with (agent.volume / "somebody-elses").open("wb") as file:
        file.write(bytes(130 * MIB))
    # It saves again whenever there is room.
    trainer = train(agent, until=lambda trainer: len(trainer.steps("saved")) >= 3, end_when="skipped")
    check_that_nothing_was_lost(agent, trainer, rclone_bucket)
    for step in trainer.steps("skipped"):
        (line,) = [line for line in trainer.log if line.startswith(f"save not admitted: step={step} ")]
        assert "bytes may still be written to the volume" in line
    assert trainer.steps("saved")[0] == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_last_save_is_safe_though_hundreds_are_given_up_at_that_moment(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    fault_proxy.outage(True)
    with AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        endpoint_url=fault_proxy.endpoint_url,
        size_limit_bytes=SIZE_LIMIT_BYTES,
        watch="off",
    ) as agent:
        for step in range(1, BACKLOG + 1):
            agent.announce(write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"a": 1}), step)
        assert len(agent.status().checkpoints) == BACKLOG
        last = write_checkpoint(agent.checkpoints / "checkpoint-last", {"a": MIB})
        with (agent.volume / "somebody-elses").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE_LIMIT_BYTES)
        agent.notify_termination(grace_seconds=600)
        wait_until(lambda: bool(agent.log("checkpoint.shed")), HANG_SECONDS, "the agent sees that nothing is left")
        # Each call has a bound of its own: an agent that is busy with its decisions answers none of these.
        agent.status()
        save = agent.announce(last, BACKLOG + 1, kind=agent_pb2.KIND_JUST_IN_TIME).save
        agent.status()
        fault_proxy.outage(False)
        assert agent.wait_committed(save).kind == agent_pb2.KIND_JUST_IN_TIME
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
        shed = [line["save"] for line in agent.log("checkpoint.shed")]
    # One event each; all but the newest, and what was on its way already.
    assert len(shed) == len(set(shed)) >= BACKLOG - 10
    rows = BucketView(rclone_bucket).verify()
    assert rows[0]["step"] == BACKLOG + 1
    assert all(row["problems"] == [] for row in rows)
