"""A destination in a directory whose mount no longer answers."""

import os
from pathlib import Path

from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS

MIB = 1024 * 1024
GRACE_SECONDS = 4.0


def test_an_agent_whose_destination_hangs_names_what_is_not_durable_and_leaves_in_time(tmp_path: Path) -> None:
    store = tmp_path / "store"
    agent = AgentProcess(
        tmp_path / "volume",
        f"file://{store}",
        watch="off",
        grace_seconds=GRACE_SECONDS,
        part_size_bytes="5MiB",
        bandwidth_bytes_per_second="1MiB",
    )
    with agent:
        agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-7", {"model": 60 * MIB}), 7)
        wait_until(lambda: any(store.glob(".keepstep/uploads/*/data")), HANG_SECONDS, "the upload has begun")
        (data,) = store.glob(".keepstep/uploads/*/data")
        # Whoever opens a pipe to write waits until somebody opens it to read: as in a mount that is dead.
        os.mkfifo(tmp_path / "dead")
        (tmp_path / "dead").rename(data)
        agent.terminate()
        # Without end if it waited for its threads.
        assert agent.wait(HANG_SECONDS) == 75
        (exiting,) = agent.log("agent.exiting")
        assert exiting["not_durable"] == 1
        assert "keepstep: not durable: checkpoint-7" in agent.log_text()
