"""A slow store gets smaller parts from the next checkpoint on, and what they make up is what was saved."""

from pathlib import Path

from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

MIB = 1024 * 1024


def test_parts_that_a_slow_store_made_smaller_survive_a_kill_and_restore_to_what_was_saved(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    # A window of eight parts of 32 MiB would take 16 seconds of it.
    fault_proxy.throttle(16 * MIB)
    agent = AgentProcess(tmp_path / "volume", rclone_bucket.destination, endpoint_url=fault_proxy.endpoint_url)

    def parts_of(save: str) -> dict[str, int]:
        """Sizes of the parts that the store has taken, by number."""
        sent = [one for one in fault_proxy.log if f"/{save}/" in one.path and "partNumber=" in one.query]
        return {one.query.split("partNumber=")[1].split("&")[0]: one.body_bytes for one in sent if one.status == 200}

    with agent:
        first = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 40 * MIB}), 1)
        agent.wait_committed(first.save)
        assert sorted(parts_of(first.save).values()) == [8 * MIB, 32 * MIB]
        path = write_checkpoint(agent.checkpoints / "checkpoint-2", {"model.bin": 60 * MIB})
        second = agent.announce(path, 2)
        wait_until(lambda: bool(parts_of(second.save)), HANG_SECONDS, "a part of it is stored")
        agent.kill()
        fault_proxy.throttle(0)
        # The next agent has measured nothing, and its store is fast.
        agent.start()
        agent.wait_committed(second.save)
    assert sorted(parts_of(second.save).values()) == [4 * MIB, *[8 * MIB] * 7]
    view = BucketView(rclone_bucket)
    assert [row["problems"] for row in view.verify()] == [[], []]
    assert tree(view.restore(tmp_path / "other")) == tree(path)
