"""A checkpoint of many files in a limited address space.

Every user may limit it, so this shows where no control group can be made what `test_many_files.py` shows in one.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess
from tests.harness.bounds import HANG_SECONDS
from tests.integration.test_many_files import MIB, announce, write_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_FILES = 30_000
_SPACE_BYTES = 160 * MIB
"""An agent with nothing to do takes half of it."""


@pytest.fixture
def small_stacks() -> Iterator[None]:
    """Threads of what we start reserve a MiB instead of eight, which they never use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (MIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


@pytest.mark.usefixtures("small_stacks")
def test_thirty_thousand_files_are_stored_and_taken_up_again(tmp_path: Path) -> None:
    agent = AgentProcess(
        tmp_path / "volume",
        f"file://{tmp_path}/destination",
        warm=False,
        watch="off",
        bandwidth_bytes_per_second=8 * MIB,
    )
    checkpoint = write_files(agent.checkpoints / "checkpoint-1", _FILES)
    with agent:
        resource.prlimit(agent.process.pid, resource.RLIMIT_AS, (_SPACE_BYTES, _SPACE_BYTES))
        save = announce(agent, checkpoint)
        agent.kill()
        agent.start()
        resource.prlimit(agent.process.pid, resource.RLIMIT_AS, (_SPACE_BYTES, _SPACE_BYTES))
        agent.wait_committed(save, 4 * HANG_SECONDS)
        assert agent.memory_bytes("VmPeak") <= _SPACE_BYTES
