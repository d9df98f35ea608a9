"""An agent with a real bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess
from tests.integration.bad_input.agent_calls import make_agent
from tests.servers.server import Bucket


@pytest.fixture
def agent(tmp_path: Path, rclone_bucket: Bucket) -> Iterator[AgentProcess]:
    with make_agent(tmp_path / "volume", rclone_bucket) as agent:
        yield agent
