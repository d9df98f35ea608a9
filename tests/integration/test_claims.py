"""Snapshots leave out what a client is about to announce, and what it was about to when it died."""

from pathlib import Path

from tests.client.ranks.job import job
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS


def announced(agent: AgentProcess, name: str) -> list[tuple[int, int]]:
    """Rank and world size of every announcement of that name."""
    lines = agent.log("checkpoint.announced")
    return sorted((line["rank"], line["world_size"]) for line in lines if line["name"] == name)


def wait_until_a_snapshot_leaves_out(agent: AgentProcess, name: str, store: Path) -> None:
    """Wait for a snapshot of what comes now, and check that it has nothing of that checkpoint."""
    later = agent.checkpoints / f"later-{len(agent.log('snapshot.taken'))}"
    later.write_text("later")

    def stored() -> bool:
        return any(path.name == later.name for path in (store / "node-0").rglob("later-*"))

    wait_until(stored, HANG_SECONDS, "a snapshot of what came later is stored")
    assert not [path for path in (store / "node-0").rglob("*") if path.name == name]


def test_a_frameworks_checkpoint_is_announced_once_however_long_its_ranks_take_to_agree(tmp_path: Path) -> None:
    volume = tmp_path / "v"
    with (
        AgentProcess(volume, f"file://{tmp_path}/store") as agent,
        job("framework_with_a_slow_rank", tmp_path, [volume], local_world_size=2) as ranks,
    ):
        ranks[0].wait_for("written")
        wait_until_a_snapshot_leaves_out(agent, "checkpoint-1", tmp_path / "store")
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


def test_what_a_killed_client_was_about_to_announce_is_in_no_snapshot(tmp_path: Path) -> None:
    volume = tmp_path / "v"
    with (
        AgentProcess(volume, f"file://{tmp_path}/store") as agent,
        job("framework_with_a_slow_rank", tmp_path, [volume], local_world_size=2) as ranks,
    ):
        ranks[0].wait_for("written")
        wait_until_a_snapshot_leaves_out(agent, "checkpoint-1", tmp_path / "store")
        assert announced(agent, "checkpoint-1") == []
        ranks[0].process.kill()
        wait_until_a_snapshot_leaves_out(agent, "checkpoint-1", tmp_path / "store")
        agent.kill()
        agent.start()
        wait_until_a_snapshot_leaves_out(agent, "checkpoint-1", tmp_path / "store")
        assert announced(agent, "checkpoint-1") == []


def test_a_pods_part_is_announced_once_however_long_another_pod_takes_for_its_own(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with (
        AgentProcess(first, f"file://{tmp_path}/store") as agent,
        job("checkpointer_with_a_slow_pod", tmp_path, [first, second], local_world_size=1) as ranks,
    ):
        wait_until((agent.checkpoints / "checkpoint-1").exists, HANG_SECONDS, "the first pod has its part")
        wait_until_a_snapshot_leaves_out(agent, "checkpoint-1", tmp_path / "store")
        assert announced(agent, "checkpoint-1") == []
        ranks[1].go()
        ranks[0].wait_for("done")
        assert announced(agent, "checkpoint-1") == [(0, 2)]


def test_a_pods_part_is_in_no_snapshot_though_all_ranks_were_killed(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with (
        AgentProcess(first, f"file://{tmp_path}/store") as agent,
        job("checkpointer_with_a_slow_pod", tmp_path, [first, second], local_world_size=1) as ranks,
    ):
        wait_until((agent.checkpoints / "checkpoint-1").exists, HANG_SECONDS, "the first pod has its part")
        for rank in ranks:
            rank.process.kill()
        wait_until_a_snapshot_leaves_out(agent, "checkpoint-1", tmp_path / "store")
        # By its record, if that was written by then: all ranks had made their parts durable.
        assert announced(agent, "checkpoint-1") in ([], [(0, 2)])
