"""What a live client is about to announce, the directory watch leaves to it; what a dead one was about to, it takes."""

from pathlib import Path

import pytest
from tests.client.ranks.job import job
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint

# They bound a hang: two ranks import torch, and the watch looks every few seconds.
pytestmark = pytest.mark.timeout(400)
FOUND_SECONDS = 120.0


def announced(agent: AgentProcess, name: str) -> list[tuple[int, int]]:
    """Rank and world size of every announcement of that name."""
    lines = agent.log("checkpoint.announced")
    return sorted((line["rank"], line["world_size"]) for line in lines if line["name"] == name)


def wait_until_all_there_is_was_looked_at(agent: AgentProcess) -> None:
    """The watch takes what has long been quiet before what comes now."""
    later = write_checkpoint(agent.checkpoints / ".later-2", {"__0_0.distcp": 100, ".metadata": 100})
    later.rename(agent.checkpoints / "later-2")
    wait_until(lambda: bool(announced(agent, "later-2")), FOUND_SECONDS, "the watch found what came later")


def test_a_frameworks_checkpoint_is_announced_once_however_long_its_ranks_take_to_agree(tmp_path: Path) -> None:
    volume = tmp_path / "v"
    with (
        AgentProcess(volume, f"file://{tmp_path}/store") as agent,
        job("framework_with_a_slow_rank", tmp_path, [volume], local_world_size=2) as ranks,
    ):
        ranks[0].wait_for("written")
        wait_until_all_there_is_was_looked_at(agent)
        assert announced(agent, "checkpoint-1") == []
        # Who comes to life meanwhile knows it, too.
        agent.kill()
        agent.start()
        ranks[1].go()
        for rank in ranks:
            rank.wait_for("announced True")
        committed = agent.wait_committed(agent.log("checkpoint.announced")[-1]["save"])
        assert (committed.name, committed.world_size) == ("checkpoint-1", 2)
        assert announced(agent, "checkpoint-1") == [(0, 2), (1, 2)]
    assert len(list((tmp_path / "store/checkpoint-1").iterdir())) == 1


def test_the_watch_takes_what_a_client_was_about_to_announce_when_it_was_killed(tmp_path: Path) -> None:
    volume = tmp_path / "v"
    with (
        AgentProcess(volume, f"file://{tmp_path}/store") as agent,
        job("framework_with_a_slow_rank", tmp_path, [volume], local_world_size=2) as ranks,
    ):
        ranks[0].wait_for("written")
        wait_until_all_there_is_was_looked_at(agent)
        assert announced(agent, "checkpoint-1") == []
        ranks[0].process.kill()
        wait_until(lambda: announced(agent, "checkpoint-1") == [(0, 1)], FOUND_SECONDS, "the watch has taken it")


def test_a_pods_part_is_announced_once_however_long_another_pod_takes_for_its_own(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with (
        AgentProcess(first, f"file://{tmp_path}/store") as agent,
        job("checkpointer_with_a_slow_pod", tmp_path, [first, second], local_world_size=1) as ranks,
    ):
        wait_until((agent.checkpoints / "checkpoint-1").exists, FOUND_SECONDS, "the first pod has its part")
        wait_until_all_there_is_was_looked_at(agent)
        assert announced(agent, "checkpoint-1") == []
        ranks[1].go()
        ranks[0].wait_for("done")
        assert announced(agent, "checkpoint-1") == [(0, 2)]


def test_a_pods_part_is_never_taken_for_a_checkpoint_though_all_ranks_were_killed_before_they_could_announce_it(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with (
        AgentProcess(first, f"file://{tmp_path}/store") as agent,
        job("checkpointer_with_a_slow_pod", tmp_path, [first, second], local_world_size=1) as ranks,
    ):
        wait_until((agent.checkpoints / "checkpoint-1").exists, FOUND_SECONDS, "the first pod has its part")
        for rank in ranks:
            rank.process.kill()
        wait_until(lambda: bool(agent.log("checkpoint_not_complete")), FOUND_SECONDS, "the watch has looked at it")
        assert announced(agent, "checkpoint-1") == []
        assert "__1_0.distcp" in agent.log("checkpoint_not_complete")[0]["why"]
