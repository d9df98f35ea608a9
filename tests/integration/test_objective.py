"""The agent asks a program for saves, so that its recovery point stays young also when the store gets slower."""

from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import RunProcess
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

RECOVERY_POINT_SECONDS = 24.0
SAVE_BYTES = 4 * 1024 * 1024
STORE_BYTES_PER_SECOND = 16 * 1024 * 1024
COMMITS = 2
JUST_IN_TIME = 143

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


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
        wait_until(lambda: len(view.markers()) >= COMMITS, 120, "checkpoints are committed")
        fault_proxy.throttle(STORE_BYTES_PER_SECOND // 10)
        wait_until(lambda: len(view.markers()) >= 2 * COMMITS, 180, "more are committed")
        run.process.terminate()
        assert run.wait() == JUST_IN_TIME

    announced, committed = moments(run, "checkpoint.announced"), moments(run, "checkpoint.committed")
    ages = [later - taken for taken, later in zip(announced, committed[1:], strict=False)]
    # A machine that is too busy for it must say so.
    assert max(ages[: 2 * COMMITS - 1]) <= RECOVERY_POINT_SECONDS or run.log("objective.missed")
    requests = moments(run, "save.requested")
    assert len(requests) >= 2 * COMMITS
    for asked, again in pairwise(requests[: 2 * COMMITS]):
        assert any(asked <= moment <= again for moment in committed), "asked while a save is on its way"


def test_an_overhead_that_does_not_allow_it_is_said(tmp_path: Path, rclone_bucket: Bucket) -> None:
    options: dict[str, Any] = {
        "endpoint_url": rclone_bucket.endpoint_url,
        "recovery_point": "2s",
        "max_overhead": "0.0001%",
    }
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, **options) as run:
        wait_until(lambda: bool(run.log("objective.missed")), 120, "it says so")
        run.process.terminate()
        assert run.wait() == JUST_IN_TIME
    (said,) = run.log("objective.missed")
    assert said["reached_seconds"] > 2
    assert "larger share" in said["hint"]
