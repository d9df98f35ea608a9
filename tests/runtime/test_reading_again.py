"""What a real agent reads of a checkpoint in memory: twice while there is time, once when its pod ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.harness.memory_folder import folder_in_memory

from keepstep_agent.core.settings.values import MIB

SIZE_BYTES = 64 * MIB
GRACE_SECONDS = 600.0


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def read_bytes(agent: AgentProcess) -> int:
    """Of everything that it has ever read."""
    lines = Path(f"/proc/{agent.process.pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def test_what_was_sent_is_read_again_but_not_once_the_pod_ends(memory: Path, tmp_path: Path) -> None:
    costs = []
    with AgentProcess(memory / "volume", f"file://{tmp_path}/bucket") as agent:
        for step in (1, 2):
            if step == 2:
                agent.notify_termination(grace_seconds=GRACE_SECONDS)
            before = read_bytes(agent)
            source = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": SIZE_BYTES}, seed=step)
            agent.wait_committed(agent.announce(source, step).save)
            costs.append(read_bytes(agent) - before)
    assert costs[0] - costs[1] == pytest.approx(SIZE_BYTES, rel=0.2), costs
