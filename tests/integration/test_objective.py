"""The agent asks a program for saves, so that its recovery point stays young also when the store gets slower."""

from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import RunProcess
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

RECOVERY_POINT_SECONDS = 30.0
SAVE_BYTES = 4 * 1024 * 1024
STORE_BYTES_PER_SECOND = 16 * 1024 * 1024
COMMITS = 2
JUST_IN_TIME = 143

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]


def moments(run: RunProcess, event: str) -> list[float]:
    return [datetime.fromisoformat(line["timestamp"]).timestamp() for line in run.log(event)]


def test_a_program_without_a_schedule_is_asked_in_time_when_the_store_slows_down_to_a_tenth(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    view = BucketView(rclone_bucket)
    fault_proxy.throttle(STORE_BYTES_PER_SECOND)
    options: dict[str, Any] = {
        "endpoint_url": fault_proxy.endpoint_url,
        "recovery_point": f"{RECOVERY_POINT_SECONDS}s",
        "max_overhead": "50%",
    }
    with RunProcess(
        tmp_path / "volume", rclone_bucket.destination, trainer={"SAVE_BYTES": SAVE_BYTES}, **options
    ) as run:
        wait_until(lambda: len(view.markers()) >= COMMITS, HANG_SECONDS, "checkpoints are committed")
        fault_proxy.throttle(STORE_BYTES_PER_SECOND // 10)
        wait_until(lambda: len(view.markers()) >= 2 * COMMITS, HANG_SECONDS, "more are committed")
        run.process.terminate()
        assert run.wait() == JUST_IN_TIME

    announced, committed = moments(run, "checkpoint.announced"), moments(run, "checkpoint.committed")
    requests = moments(run, "save.requested")
    assert len(requests) >= 2 * COMMITS
    # How long the next save takes is up to the machine; that one like the last would be in time is up to the agent,
    # which leaves a tenth for a machine that wakes it late.
    for taken, stored, asked in zip(announced, committed, requests[1 : 2 * COMMITS], strict=False):
        assert asked - taken + stored - taken <= RECOVERY_POINT_SECONDS or run.log("objective.missed")
    for asked, again in pairwise(requests[: 2 * COMMITS]):
        assert any(asked <= moment <= again for moment in committed), "asked while a save is on its way"


def test_an_overhead_that_does_not_allow_it_is_said(tmp_path: Path, rclone_bucket: Bucket) -> None:
    options: dict[str, Any] = {
        "endpoint_url": rclone_bucket.endpoint_url,
        "recovery_point": "2s",
        "max_overhead": "0.0001%",
    }
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, **options) as run:
        wait_until(lambda: bool(run.log("objective.missed")), HANG_SECONDS, "it says so")
        run.process.terminate()
        assert run.wait() == JUST_IN_TIME
    (said,) = run.log("objective.missed")
    assert said["reached_seconds"] > 2
    assert "larger share" in said["hint"]
