"""A Job of the demo's trainer, with each kind of sidecar."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.podsim.namespaces import missing_namespaces
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket
from tests.simulated_pods.demo_job import DemoJob

from mooring_agent.core.injection.spec import Sidecar


@pytest.fixture(params=list(Sidecar), ids=str)
def job(
    request: pytest.FixtureRequest, short_directory: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> Iterator[DemoJob]:
    if request.param is Sidecar.REGULAR and missing_namespaces():
        pytest.skip(f"a regular sidecar knows its trainer by the mounts of its container: {missing_namespaces()}")
    made = DemoJob(short_directory / "n", rclone_bucket, fault_proxy, request.param)
    with made.node:
        yield made
