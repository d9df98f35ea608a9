"""A Job of the demo's trainer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket
from tests.simulated_pods.demo_job import DemoJob


@pytest.fixture
def job(short_directory: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy) -> Iterator[DemoJob]:
    made = DemoJob(short_directory / "n", rclone_bucket, fault_proxy)
    with made.node:
        yield made
