"""A checkpoint whose records alone take more memory than the agent may use: the kernel kills, and the others go on."""

from pathlib import Path

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.control_group import NoControlGroup, memory_control_group
from tests.integration.test_many_files import MIB, announce

from keepstep_agent.core.stored.manifest import needed_bytes

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

_MEMORY_BYTES = needed_bytes(files=1) + 4 * MIB
"""For a few files, and not for so many with such names."""
_FILES = 60_000
_NAME_CHARACTERS = 240
_MOST_STARTS = 15


def _write_long_names(checkpoint: Path) -> Path:
    for number in range(_FILES):
        folder = checkpoint / f"{number // 1000:03d}"
        if number % 1000 == 0:
            folder.mkdir(parents=True)
        (folder / f"{number:0{_NAME_CHARACTERS}d}").write_bytes(b"x")
    return checkpoint


def test_a_checkpoint_that_the_kernel_kills_every_start_for_keeps_no_other_from_being_stored(tmp_path: Path) -> None:
    agent = AgentProcess(
        tmp_path / "volume", f"file://{tmp_path}/destination", warm=False, watch="off", bandwidth_bytes_per_second=MIB
    )
    many = _write_long_names(agent.checkpoints / "checkpoint-1")
    few = write_checkpoint(agent.checkpoints / "checkpoint-2", {"model": 100_000})
    with agent:
        fatal = announce(agent, many)
    try:
        with memory_control_group(_MEMORY_BYTES) as memory:
            for _ in range(_MOST_STARTS):
                with memory.inside():
                    agent.start(wait=False)
                try:
                    agent.wait_serving()
                    agent.wait_committed(agent.announce(few, 2, save="few").save)
                    break
                except (AssertionError, grpc.RpcError):
                    assert agent.wait(HANG_SECONDS) == -9, agent.log_text()[-2000:]
            else:
                pytest.fail(f"nothing was stored in {_MOST_STARTS} starts")
            agent.kill()
            assert memory.out_of_memory_kills() >= 2
    except NoControlGroup as reason:
        pytest.skip(str(reason))
    aside = agent.log("work.set_aside")[0]
    assert (aside["work"], aside["deaths"]) == (fatal, 2)
    assert "keepstep.dev/memory" in aside["hint"]
