"""On a cloud's termination notice, a real trainer's save is committed before the deadline."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.metadata_servers import AwsServer, AzureServer, GcpServer, MetadataServer
from tests.servers.server import Bucket

TRAINER = Path(__file__).parent / "trainer.py"
SERVERS: dict[str, Callable[[], MetadataServer]] = {"aws": AwsServer, "gcp": GcpServer, "azure": AzureServer}
# As early as the agent heeds a notice of these, so that a busy machine has the time too.
SPOT_SECONDS = {"aws": 120.0, "azure": 170.0}
# GCP says no time: it is so long from when the agent hears of it.
GCP_SECONDS = 30.0


class Trainer:
    """The client's own checkpoint loop in a process, endless but for a notice."""

    def __init__(self, agent: AgentProcess) -> None:
        self.steps = agent.volume.parent / "steps.log"
        environment = {
            **os.environ,
            "KEEPSTEP_VOLUME": str(agent.volume),
            "KEEPSTEP_SOCKET": str(agent.socket),
            "STEPS": "1000000",
            "EVERY": "1000000",
            "SAVE_BYTES": str(1024 * 1024),
            "STEP_SECONDS": "0.02",
            "STEP_LOG": str(self.steps),
        }
        self._process = subprocess.Popen([sys.executable, str(TRAINER)], env=environment)

    def step(self) -> int:
        lines = self.steps.read_text().splitlines() if self.steps.exists() else []
        return int(lines[-1].split()[0]) if lines else 0

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(HANG_SECONDS)


@contextmanager
def training(agent: AgentProcess) -> Iterator[Trainer]:
    trainer = Trainer(agent)
    try:
        wait_until(lambda: trainer.step() > 3 and agent.status().live_ranks == 1, HANG_SECONDS, "it trains")
        yield trainer
    finally:
        trainer.kill()


def agent_for(tmp_path: Path, bucket: Bucket, **settings: Any) -> AgentProcess:
    return AgentProcess(
        tmp_path / "volume", bucket.destination, endpoint_url=bucket.endpoint_url, watch="off", **settings
    )


@pytest.mark.parametrize("named", [True, False], ids=["named", "auto"])
@pytest.mark.parametrize("cloud", SERVERS)
def test_a_spot_notice_leads_to_a_committed_save_before_the_deadline(
    tmp_path: Path, rclone_bucket: Bucket, cloud: str, named: bool
) -> None:
    with (
        SERVERS[cloud]() as server,
        agent_for(
            tmp_path, rclone_bucket, preemption_source=cloud if named else "auto", preemption_endpoint=server.url
        ) as agent,
        training(agent) as trainer,
    ):
        wait_until(lambda: bool(agent.log("preemption.watching")), HANG_SECONDS, "it listens")
        assert not agent.status().terminating
        deadline = server.announce(SPOT_SECONDS.get(cloud, GCP_SECONDS), time.time())
        wait_until(lambda: bool(agent.log("checkpoint.committed")), HANG_SECONDS, "a save is committed")
        (noticed,) = agent.log("termination.noticed")
        if cloud == "gcp":
            deadline = datetime.fromisoformat(noticed["timestamp"]).timestamp() + GCP_SECONDS
        else:
            assert time.time() < deadline
        status = agent.status()
        assert status.terminating
        assert status.deadline == pytest.approx(deadline, abs=10)
        (announced,) = agent.log("checkpoint.announced")
        assert announced["kind"] == "just-in-time"
        wait_until(trainer.ended, HANG_SECONDS, "the trainer leaves")
        assert announced["step"] >= trainer.step() - 1
    assert BucketView(rclone_bucket).steps() == [announced["step"]]
    assert noticed["source"].startswith(cloud)


def test_a_maintenance_next_week_does_not_stop_training_today(tmp_path: Path, rclone_bucket: Bucket) -> None:
    with (
        AwsServer() as server,
        agent_for(tmp_path, rclone_bucket, preemption_source="aws", preemption_endpoint=server.url) as agent,
        training(agent) as trainer,
    ):
        server.maintain(7 * 24 * 3600, time.time())
        wait_until(lambda: bool(agent.log("preemption.notice_held_back")), HANG_SECONDS, "it knows of the maintenance")
        seen = trainer.step()
        wait_until(lambda: trainer.step() > seen + 3, HANG_SECONDS, "it trains on")
        assert not agent.status().terminating


def test_the_clouds_own_variable_says_where_its_service_is(tmp_path: Path, rclone_bucket: Bucket) -> None:
    with GcpServer() as server:
        agent = AgentProcess(
            tmp_path / "volume",
            rclone_bucket.destination,
            environment={"GCE_METADATA_HOST": server.url.removeprefix("http://")},
            endpoint_url=rclone_bucket.endpoint_url,
            preemption_source="auto",
        )
        with agent:
            wait_until(lambda: bool(agent.log("preemption.watching")), HANG_SECONDS, "it listens")
            assert agent.log("preemption.watching")[0]["cloud"] == "gcp"
