"""The newest checkpoint is the first to be safe, whatever is already on its way."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Request
from tests.servers.server import Bucket

from keepstep_api.v1 import agent_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1024 * 1024
BYTES_PER_SECOND = 8 * MIB
PART_BYTES = 5 * MIB
CONCURRENCY = 4
OLD_BYTES = 128 * MIB
NEW_BYTES = 96 * MIB


@pytest.fixture
def agent(rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path) -> Iterator[AgentProcess]:
    """Its store takes exactly so many bytes per second, whoever they belong to: what one save gets, the other lacks."""
    fault_proxy.throttle(BYTES_PER_SECOND)
    agent = AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        endpoint_url=fault_proxy.endpoint_url,
        part_size_bytes=PART_BYTES,
        watch="off",
        max_concurrency=CONCURRENCY,
        grace_seconds=3600,
    )
    with agent:
        yield agent


def announce_old(agent: AgentProcess) -> str:
    """An older save of which 30 % are stored."""
    path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": OLD_BYTES}, seed=1)
    save = agent.announce(path, 1).save
    wait_until(lambda: durable_bytes(agent, save) >= 0.3 * OLD_BYTES, HANG_SECONDS, "30 % of the older one are stored")
    return save


def durable_bytes(agent: AgentProcess, save: str) -> int:
    (size_bytes,) = [one.durable_bytes for one in agent.status().checkpoints if one.save == save]
    return size_bytes


def parts_sent(proxy: FaultProxy, save: str) -> list[Request]:
    return [one for one in proxy.log if one.method == "PUT" and f"/{save}/model.bin" in one.path]


def begun_meanwhile(proxy: FaultProxy, new: str, old: str, *, since: int | None = None) -> list[Request]:
    """Requests for the older one that came between the first part of the newer one, or `since`, and its completion."""
    of_the_new = [one for one in proxy.log if f"/{new}/model.bin" in one.path and one.method in ("PUT", "POST")]
    begin = proxy.log.index(parts_sent(proxy, new)[0]) if since is None else since
    assert of_the_new[-1].method == "POST"
    return [one for one in proxy.log[begin : proxy.log.index(of_the_new[-1])] if f"/{old}/" in one.path]


def test_a_newer_checkpoint_is_committed_first_and_in_its_own_time(
    agent: AgentProcess, fault_proxy: FaultProxy, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    new_path = write_checkpoint(agent.checkpoints / "checkpoint-2", {"model.bin": NEW_BYTES}, seed=2)
    old = announce_old(agent)
    # So slow that the older one is not through before the newer one is announced.
    fault_proxy.throttle(MIB // 4)
    new = agent.announce(new_path, 2).save
    announced = len(fault_proxy.log)
    fault_proxy.throttle(BYTES_PER_SECOND)
    agent.wait_committed(new)
    view = BucketView(rclone_bucket)
    assert [Path(marker).name.split(".")[1] for marker in view.markers()] == [new]
    # All that shares the wire with it is what had its place there already; side by side, it would be all the rest.
    assert len(begun_meanwhile(fault_proxy, new, old, since=announced)) <= CONCURRENCY
    assert not begun_meanwhile(fault_proxy, new, old)
    fault_proxy.throttle(0)
    agent.wait_committed(old)
    assert [row["problems"] for row in view.verify()] == [[], []]
    assert tree(view.restore(tmp_path / "other")) == tree(new_path)


def test_of_several_small_checkpoints_at_most_one_is_committed_before_the_newest(
    agent: AgentProcess, fault_proxy: FaultProxy
) -> None:
    fault_proxy.throttle(0)
    earlier = write_checkpoint(agent.checkpoints / "checkpoint-0", {"model.bin": 10 * PART_BYTES})
    agent.wait_committed(agent.announce(earlier, 0).save)
    begin = len(fault_proxy.log)
    # So slow that all of them are announced before the first is stored.
    fault_proxy.throttle(MIB // 16)
    paths = [write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": 4 * MIB}) for step in (1, 2, 3)]
    saves = [agent.announce(path, step).save for step, path in enumerate(paths, start=1)]
    fault_proxy.throttle(2 * MIB)
    for save in saves:
        agent.wait_committed(save)
    markers = [one.path for one in fault_proxy.log[begin:] if one.method == "PUT" and "/.keepstep/commits/" in one.path]
    committed = [next(save for save in saves if save in marker) for marker in markers]
    assert sorted(committed) == sorted(saves)
    assert committed.index(saves[-1]) <= 1


def test_a_just_in_time_checkpoint_takes_the_older_ones_parts_off_the_wire(
    agent: AgentProcess, fault_proxy: FaultProxy, rclone_bucket: Bucket
) -> None:
    new_path = write_checkpoint(agent.checkpoints / "checkpoint-2", {"model.bin": NEW_BYTES}, seed=2)
    old = announce_old(agent)
    # So slow that no part gets to its end by itself meanwhile.
    fault_proxy.throttle(MIB // 8)
    agent.notify_termination()
    new = agent.announce(new_path, 2, kind=agent_pb2.KIND_JUST_IN_TIME).save
    wait_until(lambda: bool(parts_sent(fault_proxy, new)), HANG_SECONDS, "its first part is on the wire")
    # The last bytes of one that is nearly through may be in the proxy's buffers.
    on_the_wire = [part for part in parts_sent(fault_proxy, old) if not part.status]
    taken_off = [part for part in on_the_wire if part.body_bytes < PART_BYTES - MIB]
    fault_proxy.throttle(BYTES_PER_SECOND)
    agent.wait_committed(new)
    assert taken_off
    assert {part.status for part in taken_off} == {0}, "an older part was let through"
    assert not begun_meanwhile(fault_proxy, new, old)
    fault_proxy.throttle(0)
    # There is time left, so the older one follows: its parts are sent again.
    agent.wait_committed(old)
    assert [row["problems"] for row in BucketView(rclone_bucket).verify()] == [[], []]
