"""The agent's own pruning, by real processes: what goes, what stays, and that it goes on pruning."""

import os
import time
from pathlib import Path
from typing import Any

from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import step_of

from keepstep_agent.core.stored.object_layout import pin_key
from keepstep_api.v1 import agent_pb2


def _steps(folder: Path) -> list[int]:
    return sorted(step_of(path.name) for path in (folder / ".keepstep/commits").glob("*.json"))


def _names_with_files(folder: Path) -> set[str]:
    """Checkpoints of which a file is stored. Folders may go while we look."""
    return {Path(root).relative_to(folder).parts[0] for root, _, files in os.walk(folder) if "model.bin" in files}


def test_every_commit_prunes_down_to_what_any_policy_keeps(tmp_path: Path) -> None:
    folder = tmp_path / "destination"
    # All commits are of the same ten years, so the last of them is the newest.
    settings: dict[str, Any] = {"keep_last": 2, "keep_every_steps": 40, "keep_every_seconds": 10 * 366 * 86400.0}
    with AgentProcess(tmp_path / "volume", f"file://{folder}", **settings) as agent:
        for step in range(11, 102, 10):
            path = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": 1000})
            kind = agent_pb2.KIND_FINAL if step == 61 else agent_pb2.KIND_PERIODIC
            agent.wait_committed(agent.announce(path, step, kind=kind).save)
        kept = [41, 61, 81, 91, 101]
        wait_until(lambda: _steps(folder) == kept, HANG_SECONDS, "the old ones are pruned")
        # The files of a checkpoint go after its marker.
        wait_until(
            lambda: _names_with_files(folder) == {f"checkpoint-{step}" for step in kept}, HANG_SECONDS, "their files go"
        )
        assert not agent.log("retention.refused")


def test_an_agent_that_keeps_all_checkpoints_removes_the_pins_of_old_attempts(tmp_path: Path) -> None:
    folder = tmp_path / "destination"
    old, newest = [folder / pin_key(attempt, 0) for attempt in ("old", "newest")]
    for age, pin in enumerate((newest, old), start=2):
        pin.parent.mkdir(parents=True, exist_ok=True)
        pin.write_bytes(b"")
        os.utime(pin, (time.time() - age * 86400.0,) * 2)
    with AgentProcess(tmp_path / "volume", f"file://{folder}") as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 1000})
        agent.wait_committed(agent.announce(path, 1).save)
        wait_until(lambda: not old.exists(), HANG_SECONDS, "the old pin is removed")
        assert newest.exists()
