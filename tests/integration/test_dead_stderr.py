"""Whoever reads the agent's log may go away; the agent goes on."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.harness.bounds import HANG_SECONDS


@pytest.mark.parametrize("open_ends", [os.pipe, os.openpty])
def test_an_agent_whose_log_nobody_reads_any_more_commits_and_drains(
    tmp_path: Path, open_ends: Callable[[], tuple[int, int]]
) -> None:
    reader, writer = open_ends()
    agent = AgentProcess(tmp_path / "volume", f"file://{tmp_path}/store", watch="off")
    try:
        agent.start(stderr=writer)
        os.close(writer)
        os.close(reader)
        agent.wait_committed(agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-7", {"a": 1000}), 7).save)
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
    finally:
        agent.process.kill()


def test_the_last_words_about_what_is_not_durable_cost_nobody_the_exit_code(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    settings: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:9", "grace_seconds": 3, "watch": "off"}
    agent = AgentProcess(tmp_path / "volume", "s3://bucket/run", **settings)
    try:
        agent.start(stderr=writer)
        os.close(writer)
        os.close(reader)
        agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-7", {"a": 1000}), 7)
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 75
    finally:
        agent.process.kill()
