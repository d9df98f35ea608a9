"""The power goes while a trainer saves that never calls fsync: what was acknowledged is there, and nothing is torn."""

import queue
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.chaos.oracle import Oracle, Truth
from tests.chaos.report import Report
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.power.cut_volume import CutVolume, cut_volume
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

CUTS = 20
RUN = "power"
MIB = 1024 * 1024
# Slow enough that something acknowledged is still to be sent whenever the power goes.
BYTES_PER_SECOND = 4 * MIB
LONGEST_MOMENT_SECONDS = 0.5


class Trainer:
    """The program in a process of its own; what it says goes into the oracle's truth."""

    def __init__(self, volume: Path, life: int, truth: Truth) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.power.trainer", str(volume), RUN, str(life)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._life = str(life)
        self._truth = truth
        self._begun: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def wait_begun(self, count: int) -> None:
        """Until so many checkpoints were begun."""
        for _ in range(count):
            self._begun.get(timeout=HANG_SECONDS)

    def kill(self) -> None:
        """SIGKILL; afterwards all it ever said is known."""
        self._process.kill()
        self._process.wait(HANG_SECONDS)
        self._listener.join(HANG_SECONDS)

    def _listen(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                match line.split() if line.endswith("\n") else ():
                    case ["begun", step, save]:
                        self._truth.begun[save] = (self._life, int(step))
                        self._begun.put(save)
                    case ["acknowledged", _, save]:
                        self._truth.acknowledged[save] = {0}


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(1800)
def test_a_power_cut_tears_no_checkpoint_and_loses_none_that_was_acknowledged(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, short_directory: Path
) -> None:
    generator = random.Random(13)
    truth, report = Truth(run=RUN, world_size=1), Report()
    oracle = Oracle(rclone_bucket, truth, report, keep_last=1)
    with cut_volume(short_directory) as volume:
        agent = AgentProcess(volume.root, rclone_bucket.destination, endpoint_url=fault_proxy.endpoint_url, watch="off")
        with agent:
            fault_proxy.throttle(BYTES_PER_SECOND)
            for life in range(1, CUTS + 1):
                live_and_lose_power(agent, volume, life, truth, generator)
            fault_proxy.throttle(0)
            owed = truth.owed()
            wait_until(lambda: seen(oracle) >= owed, HANG_SECONDS, "all that was acknowledged is committed")
            oracle.look(again=True)
    assert report.losses == []
    assert len(owed) >= CUTS, "little was acknowledged between the cuts"


def live_and_lose_power(
    agent: AgentProcess, volume: CutVolume, life: int, truth: Truth, generator: random.Random
) -> None:
    """Save on, cut at a random moment, and start the agent anew on what the disk has."""
    trainer = Trainer(volume.root, life, truth)
    trainer.wait_begun(generator.randint(2, 5))
    # Somewhere in the making of the next: writing, announcing, staging.
    threading.Event().wait(generator.uniform(0, LONGEST_MOMENT_SECONDS))
    volume.cut()
    agent.kill()
    trainer.kill()
    volume.restore_power()
    agent.start()


def seen(oracle: Oracle) -> set[str]:
    oracle.look()
    return oracle.ever
