"""The store is away, slow to take, cuts connections or loses its answers: everything commits, once and whole."""

import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import RunProcess
from tests.lanes import nightly
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Request, Rule
from tests.servers.server import Bucket

from keepstep_agent.core.stored.object_layout import PROBE_PREFIX

MIB = 1024 * 1024
PART_BYTES = 5 * MIB
SIZES = {"model.bin": 17 * MIB, "optimizer.bin": 11 * MIB, "small.bin": 3 * MIB, "config.json": 300}
PARTS = 4 + 3
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
OUTAGE_SECONDS = 60.0
JUST_IN_TIME = 143


@pytest.fixture(params=["rclone", *nightly("seaweed")])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """On a store that ignores conditions, and on one that honours them."""
    found: Bucket = request.getfixturevalue(f"{request.param}_bucket")
    return found


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[FaultProxy]:
    proxy = FaultProxy(int(bucket.endpoint_url.rpartition(":")[2]), seed=7)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


def start_agent(volume: Path, bucket: Bucket, proxy: FaultProxy) -> AgentProcess:
    return AgentProcess(
        volume, bucket.destination, endpoint_url=proxy.endpoint_url, part_size_bytes=PART_BYTES, max_concurrency=4
    )


def commit_three(agent: AgentProcess) -> dict[int, dict[str, bytes]]:
    """Announce three checkpoints and wait for all; what they hold, by step."""
    originals, saves = {}, []
    for step in (1, 2, 3):
        path = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", SIZES, seed=step)
        originals[step] = tree(path)
        saves.append(agent.announce(path, step).save)
    for save in saves:
        agent.wait_committed(save)
    return originals


def check_whole(bucket: Bucket, originals: dict[int, dict[str, bytes]], other_volume: Path) -> None:
    """One marker per save, every byte as it was, nothing left over."""
    view = BucketView(bucket)
    assert view.steps() == sorted(originals)
    assert [row["problems"] for row in view.verify()] == [[]] * len(originals)
    assert tree(view.restore(other_volume)) == originals[max(originals)]
    assert view.uploads() == []


def marker_writes(proxy: FaultProxy) -> list[Request]:
    return [one for one in proxy.log if one.method == "PUT" and "/.keepstep/commits/" in one.path]


def part_writes(proxy: FaultProxy) -> list[Request]:
    parts = [one for one in proxy.log if one.method == "PUT" and "partNumber=" in one.query]
    return [one for one in parts if PROBE_PREFIX not in one.path]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_does_not_notice_a_minute_without_the_store(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    view = BucketView(rclone_bucket)
    every = 100
    trainer = {"EVERY": every, "SAVE_BYTES": 2 * MIB}
    options: dict[str, Any] = {"endpoint_url": fault_proxy.endpoint_url, "grace_seconds": 600}
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, trainer=trainer, **options) as run:
        wait_until(lambda: bool(view.markers()), HANG_SECONDS, "a checkpoint is committed")
        fault_proxy.outage(True)
        ends_at = time.monotonic() + OUTAGE_SECONDS
        steps_before = run.steps()
        # It lasts until there are two saves and more steps, for which nobody can have waited for its end.
        run.wait_steps(3 * every)
        wait_until(lambda: time.monotonic() >= ends_at, HANG_SECONDS, "the outage is over")
        steps_in_outage = run.steps()[len(steps_before) :]
        fault_proxy.outage(False)
        newest = steps_in_outage[-1][0] // every * every
        wait_until(lambda: newest in view.steps(), HANG_SECONDS, "the newest is committed")
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME, run.output()[-2000:]
        steps = run.steps()
    last_step = steps[-1][0]
    beside = steps[: len(steps_before)] + steps[len(steps_before) + len(steps_in_outage) :]
    seconds, usual = (statistics.median(taken for _, taken in some) for some in (steps_in_outage, beside))
    assert seconds < 5 * usual
    # All that was saved meanwhile is there, oldest included, and each once.
    assert view.steps() == [
        *range(every, last_step, every),
        last_step,
    ]
    assert [row["problems"] for row in view.verify()] == [[]] * len(view.markers())


def test_a_store_that_answers_slow_down_to_a_third_of_all_requests_gets_everything(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    fault_proxy.add(Rule(name="slow down", fault=Fault.STATUS, status=503, body=SLOW_DOWN, times=-1, probability=0.3))
    with start_agent(tmp_path / "volume", rclone_bucket, fault_proxy) as agent:
        originals = commit_three(agent)
    assert fault_proxy.hits("slow down") > 10
    fault_proxy.clear()
    check_whole(rclone_bucket, originals, tmp_path / "other")


def test_a_gateway_that_answers_404_now_and_then_fails_no_checkpoint(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    page = b"<html><head><title>404 Not Found</title></head><body><center>nginx</center></body></html>"
    kinds = {
        "create": ("POST", "?uploads"),
        "part": ("PUT", "partNumber="),
        "complete": ("POST", "?uploadId="),
        "whole": ("PUT", "small.bin"),
        "manifest": ("PUT", "manifest-00000-00001.json"),
        "marker": ("PUT", "/.keepstep/commits/"),
    }
    with start_agent(tmp_path / "volume", rclone_bucket, fault_proxy) as agent:
        for name, (method, target) in kinds.items():
            fault_proxy.add(
                Rule(name=name, fault=Fault.STATUS, method=method, target=target, status=404, body=page, times=2)
            )
        originals = commit_three(agent)
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
    assert {name: fault_proxy.hits(name) for name in kinds} == dict.fromkeys(kinds, 2)
    check_whole(rclone_bucket, originals, tmp_path / "other")


def test_connections_cut_in_the_middle_of_parts_cost_only_those_parts(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    cuts = 6
    for name, fault, after_bytes in (
        ("request cut", Fault.RESET_REQUEST, 2 * MIB),
        ("answer cut", Fault.RESET_RESPONSE, 0),
    ):
        fault_proxy.add(
            Rule(name=name, fault=fault, method="PUT", target="partNumber=", times=cuts, after_bytes=after_bytes)
        )
    with start_agent(tmp_path / "volume", rclone_bucket, fault_proxy) as agent:
        originals = commit_three(agent)
    assert fault_proxy.hits("request cut") == cuts
    assert len(part_writes(fault_proxy)) <= 3 * PARTS + fault_proxy.hits("request cut") + fault_proxy.hits("answer cut")
    check_whole(rclone_bucket, originals, tmp_path / "other")


def test_lost_answers_are_settled_by_reading_back_and_nothing_is_sent_or_committed_twice(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    for name, method, target in (
        ("create", "POST", ".bin?uploads"),
        ("complete", "POST", ".bin?uploadId="),
        ("marker", "PUT", "/.keepstep/commits/"),
    ):
        proxy.add(Rule(name=name, fault=Fault.LOSE_ANSWER, method=method, target=target, times=2))
    with start_agent(tmp_path / "volume", bucket, proxy) as agent:
        originals = commit_three(agent)
    assert [proxy.hits(name) for name in ("create", "complete", "marker")] == [2, 2, 2]
    assert len(marker_writes(proxy)) == len(originals)
    assert len(part_writes(proxy)) == PARTS * len(originals)
    check_whole(bucket, originals, tmp_path / "other")


def test_requests_that_arrive_twice_commit_once(bucket: Bucket, proxy: FaultProxy, tmp_path: Path) -> None:
    for name, method, target in (("complete", "POST", ".bin?uploadId="), ("marker", "PUT", "/.keepstep/commits/")):
        proxy.add(Rule(name=name, fault=Fault.DUPLICATE, method=method, target=target, times=3))
    with start_agent(tmp_path / "volume", bucket, proxy) as agent:
        originals = commit_three(agent)
    assert [proxy.hits(name) for name in ("complete", "marker")] == [3, 3]
    check_whole(bucket, originals, tmp_path / "other")


@pytest.mark.nightly
def test_an_outage_with_hundreds_of_files_is_no_storm_and_ends_soon(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    fault_proxy.add(Rule(name="down", fault=Fault.STATUS, status=500, body=b"", times=-1))
    with start_agent(tmp_path / "volume", rclone_bucket, fault_proxy) as agent:
        # Names that no archive's header can hold: each is a request of its own.
        files = {f"{n}-{'n' * 100}": 100 for n in range(300)}
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", files, seed=1)
        save = agent.announce(path, 1).save
        wait_until(lambda: fault_proxy.hits("down") > 8, HANG_SECONDS, "the store was asked and failed")
        requests_before, ends_at = fault_proxy.hits("down"), time.monotonic() + 10
        wait_until(lambda: time.monotonic() >= ends_at, HANG_SECONDS, "ten seconds of outage")
        requests = fault_proxy.hits("down") - requests_before
        fault_proxy.clear()
        agent.wait_committed(save)
        lines = agent.log("work.failed")
    assert requests < 60
    assert len(lines) < 20
