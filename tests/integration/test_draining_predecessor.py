"""The next pod starts while the old one still saves: a real agent that drains over a slow line, and a real restore."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import AgentProcess, json_lines, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.trainer_process import TrainerProcess
from tests.harness.warm_python import warm_keepstep
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_api.v1 import agent_pb2

MIB = 1024 * 1024
DRAINING = ".keepstep/draining/"
GRACE_SECONDS = 3600


class NextPod:
    """`keepstep restore` on a volume of its own, with a line of its own to the store."""

    def __init__(self, volume: Path, bucket: Bucket) -> None:
        self.volume = volume
        self._log = volume.parent / f"{volume.name}.log"
        output = volume.parent / f"{volume.name}.json"
        volume.mkdir()
        words = ["-m", "keepstep_agent", "restore", bucket.destination, f"--endpoint-url={bucket.endpoint_url}"]
        words += [f"--volume={volume}", "--log-format=json", "--json"]
        with Path(os.devnull).open("rb") as nothing, output.open("wb") as out, self._log.open("wb") as errors:
            files = [nothing.fileno(), out.fileno(), errors.fileno()]
            self.process = warm_keepstep().start(words, environment=os.environ, files=files)
        self._output = output

    def waits(self) -> list[dict[str, Any]]:
        """What its log says of whom it waits for."""
        lines = json_lines(self._log.read_text(errors="replace"))
        return [line for line in lines if line["event"] == "restore.waits_for_predecessor"]

    def restored(self) -> dict[str, Any] | None:
        """The checkpoint that it has put in its place; None if the run starts from nothing."""
        assert self.process.wait(HANG_SECONDS) == 0, self._log.read_text()
        found: list[dict[str, Any]] = json.loads(self._output.read_text())["restored"]
        return found[0] if found else None


@contextmanager
def next_pod(volume: Path, bucket: Bucket) -> Iterator[NextPod]:
    pod = NextPod(volume, bucket)
    try:
        yield pod
    finally:
        if pod.process.poll() is None:
            pod.process.kill()
            pod.process.wait(HANG_SECONDS)


@pytest.fixture
def old(tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy) -> AgentProcess:
    return AgentProcess(
        tmp_path / "old",
        rclone_bucket.destination,
        endpoint_url=fault_proxy.endpoint_url,
        watch="off",
        part_size_bytes="5MiB",
        grace_seconds=GRACE_SECONDS,
        pod_name="llama-0-old",
    )


def announce(agent: AgentProcess, step: int, kind: agent_pb2.Kind) -> tuple[Path, str]:
    source = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.safetensors": 6 * MIB}, seed=step)
    return source, agent.announce(source, step, kind=kind).save


def test_a_pod_that_starts_while_the_old_one_drains_resumes_from_its_last_save(
    old: AgentProcess, tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    view = BucketView(rclone_bucket)
    with old, TrainerProcess(old.volume) as trainer:
        old.wait_committed(announce(old, 60, agent_pb2.KIND_PERIODIC)[1])
        old.notify_termination(source="preStop")
        wait_until(lambda: bool(view.keys(DRAINING)), HANG_SECONDS, "the old pod's notice")
        fault_proxy.add(Rule(name="slow", fault=Fault.BLACKHOLE, method="PUT", target="/checkpoint-115/", times=-1))
        source, _ = announce(old, 115, agent_pb2.KIND_JUST_IN_TIME)
        original = tree(source)
        old.terminate()
        with next_pod(tmp_path / "new", rclone_bucket) as new:
            wait_until(lambda: bool(new.waits()), HANG_SECONDS, "the next pod waits")
            (said,) = new.waits()
            assert said["predecessor"] == "llama-0-old"
            assert GRACE_SECONDS / 2 < said["at_most_seconds"] <= GRACE_SECONDS + 30
            assert view.steps() == [60]
            trainer.die()
            # The line is cut, and the next one works.
            fault_proxy.clear()
            fault_proxy.outage(True)
            fault_proxy.outage(False)
            restored = new.restored()
            assert restored is not None
            assert restored["step"] == 115
            assert tree(Path(restored["path"])) == original
        assert old.wait(HANG_SECONDS) == 0, old.log_text()
    assert view.keys(DRAINING) == []


def test_containers_that_are_restarted_in_place_hold_up_nobody(
    old: AgentProcess, tmp_path: Path, rclone_bucket: Bucket
) -> None:
    """As with RestartAllContainers: every pod of the job has a notice, and its agent was killed."""
    view = BucketView(rclone_bucket)
    with old:
        old.wait_committed(announce(old, 60, agent_pb2.KIND_PERIODIC)[1])
        old.notify_termination(source="SIGTERM")
        wait_until(lambda: bool(view.keys(DRAINING)), HANG_SECONDS, "the notice")
        old.kill()
    words = ["-m", "keepstep_agent", "restore", rclone_bucket.destination, f"--volume={old.volume}"]
    words += [f"--endpoint-url={rclone_bucket.endpoint_url}"]
    done = warm_keepstep().run(words, environment=os.environ, timeout_seconds=HANG_SECONDS, directory=None)
    assert done.returncode == 0, done.stderr
    assert "checkpoint-60" in done.stdout
    assert "restore.waits_for_predecessor" not in done.stderr
    with next_pod(tmp_path / "another", rclone_bucket) as another:
        restored = another.restored()
        assert restored is not None
        assert restored["step"] == 60
        assert another.waits() == []


def test_an_agent_leaves_no_notice_behind_when_it_had_nothing_to_save(old: AgentProcess, rclone_bucket: Bucket) -> None:
    view = BucketView(rclone_bucket)
    with old:
        old.wait_committed(announce(old, 60, agent_pb2.KIND_PERIODIC)[1])
        assert view.keys(DRAINING) == []
        old.terminate()
        assert old.wait(HANG_SECONDS) == 0
    assert view.keys(DRAINING) == []
