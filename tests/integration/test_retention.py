"""The agent's own pruning, by real processes: what goes, what stays, and that it goes on pruning."""

from pathlib import Path
from typing import Any

from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.split(".")[0]) for path in (folder / ".mooring/commits").glob("*.json"))


def test_every_commit_prunes_down_to_keep_last_and_keep_every(tmp_path: Path) -> None:
    folder = tmp_path / "destination"
    settings: dict[str, Any] = {"keep_last": 2, "keep_every_steps": 40}
    with AgentProcess(tmp_path / "volume", f"file://{folder}", **settings) as agent:
        for step in range(10, 101, 10):
            path = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": 1000})
            agent.wait_committed(agent.announce(path, step).save)
        wait_until(lambda: _steps(folder) == [40, 80, 90, 100], 10.0, "the old ones are pruned")
        assert not agent.log("retention.refused")
        kept = {path.name for path in folder.glob("checkpoint-*") if any(path.rglob("model.bin"))}
        assert kept == {"checkpoint-40", "checkpoint-80", "checkpoint-90", "checkpoint-100"}
