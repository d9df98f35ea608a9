"""The bandwidth cap of a real agent: it holds while training goes on, and a termination notice lifts it."""

import time
from pathlib import Path

from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint

# So small that no disk is slower than half of what the cap would take.
_CAP_BYTES_PER_SECOND = 1_000_000
_CAPPED_BYTES = 6_000_000
_LIFTED_BYTES = 60_000_000


def test_the_cap_holds_and_is_lifted_by_a_termination_notice(tmp_path: Path) -> None:
    destination = f"file://{tmp_path / 'destination'}"
    with AgentProcess(
        tmp_path / "volume", destination, bandwidth_bytes_per_second=_CAP_BYTES_PER_SECOND, part_size_bytes="5MiB"
    ) as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": _CAPPED_BYTES})
        begin = time.monotonic()
        capped = agent.announce(path, 1)
        agent.wait_committed(capped.save)
        # A bucket may begin full, so the first second's worth can be free.
        assert time.monotonic() - begin >= _CAPPED_BYTES / _CAP_BYTES_PER_SECOND - 1.5

        path = write_checkpoint(agent.checkpoints / "checkpoint-2", {"model.bin": _LIFTED_BYTES})
        lifted = agent.announce(path, 2)
        wait_until(lambda: bool(agent.status().backlog_bytes), 30.0, "the second upload is under way")
        begin = time.monotonic()
        agent.notify_termination(grace_seconds=60)
        agent.wait_committed(lifted.save)
        assert time.monotonic() - begin < _LIFTED_BYTES / _CAP_BYTES_PER_SECOND / 2
