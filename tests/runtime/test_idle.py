"""What an agent costs that has nothing to do: what it has loaded, how much memory, and how often it wakes."""

import json
import os
import re
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.fault_proxy import FaultProxy
from tests.servers.process import free_port
from tests.servers.server import Bucket

from keepstep_agent.core.settings.values import MIB

WAKES_PER_SECOND = 2
"""Looks are due seldom; a thread asks for the ranks' locks each second, and wakes nobody while they stay the same."""
MOST_MEMORY_BYTES = 100 * MIB
FOR_UPLOADS = {"awscrt"}
FOR_S3 = {"aiobotocore", "botocore"}
FOR_PAGES = {"aiohttp"}
"""S3 needs it too."""
AT_THE_FIRST_SCRAPE = {"prometheus_client"}
FOR_OTHERS = {"kubernetes", "cryptography", "psutil"}
"""The webhook, and settings that nobody made."""


def loaded(agent: AgentProcess) -> set[str]:
    """The modules that this agent has imported, by the interpreter's own account."""
    return set(re.findall(r"^import time:.*\| +([\w.]+)", agent.log_text(), re.MULTILINE))


def wait_ready(agent: AgentProcess) -> None:
    wait_until(lambda: "store.probed" in agent.log_text(), HANG_SECONDS, "the store is probed")


def s3_agent(tmp_path: Path, bucket: Bucket, *, endpoint_url: str = "", **environment: str) -> AgentProcess:
    return AgentProcess(
        tmp_path / "volume",
        bucket.destination,
        environment=environment,
        endpoint_url=endpoint_url or bucket.endpoint_url,
        ca_bundle=bucket.ca_bundle or "",
    )


def upload(agent: AgentProcess, step: int = 1, size_bytes: int = 100, count: int = 1) -> None:
    files = {f"model-{number}.bin": size_bytes for number in range(count)}
    source = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", files)
    agent.wait_committed(agent.announce(source, step).save)


def test_an_agent_loads_what_its_destination_needs_and_nothing_for_others(tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/bucket"
    with AgentProcess(tmp_path / "volume", destination, environment={"PYTHONPROFILEIMPORTTIME": "1"}) as agent:
        wait_ready(agent)
        assert {"grpc", "structlog", "uvloop"} | FOR_UPLOADS <= loaded(agent)
        upload(agent)
        assert not loaded(agent) & (FOR_S3 | FOR_PAGES | AT_THE_FIRST_SCRAPE | FOR_OTHERS)


def test_an_agent_with_pages_loads_what_they_need_when_they_are_asked_for(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with AgentProcess(
        tmp_path / "volume",
        f"file://{tmp_path}/bucket",
        environment={"PYTHONPROFILEIMPORTTIME": "1"},
        http_address=address,
    ) as agent:
        wait_ready(agent)
        wait_until(lambda: bool(agent.log("http.serving")), HANG_SECONDS, "the pages are served")
        before = loaded(agent)
        assert before >= FOR_PAGES
        assert not before & (FOR_S3 | AT_THE_FIRST_SCRAPE | FOR_OTHERS)
        urllib.request.urlopen(f"http://{address}/metrics", timeout=HANG_SECONDS).close()
        assert loaded(agent) >= AT_THE_FIRST_SCRAPE


def test_the_first_upload_finds_everything_loaded_and_its_store_probed(tmp_path: Path, rclone_bucket: Bucket) -> None:
    with s3_agent(tmp_path, rclone_bucket, PYTHONPROFILEIMPORTTIME="1") as agent:
        wait_ready(agent)
        before = loaded(agent)
        assert before >= FOR_S3 | FOR_PAGES | FOR_UPLOADS
        upload(agent)
        assert loaded(agent) == before
        assert agent.log_text().count("store.probed") == 1


@contextmanager
def slow_import(directory: Path) -> Iterator[dict[str, str]]:
    """The environment of a process in which `import aiobotocore` lasts until this context ends."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        textwrap.dedent(f"""\
            import pathlib, sys, time
            class Gate:
                def find_spec(self, name, path=None, target=None):
                    if name == "aiobotocore":
                        here = pathlib.Path({str(directory)!r})
                        (here / "reached").touch()
                        while not (here / "open").exists():
                            time.sleep(0.01)
            sys.meta_path.insert(0, Gate())
            """)
    )
    try:
        yield {"PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])}
    finally:
        (directory / "open").touch()


def test_an_agent_serves_while_the_s3_library_is_being_loaded(tmp_path: Path, rclone_bucket: Bucket) -> None:
    gate = tmp_path / "gate"
    with slow_import(gate) as environment, s3_agent(tmp_path, rclone_bucket, **environment) as agent:
        wait_until((gate / "reached").exists, HANG_SECONDS, "the library is loaded before anything is announced")
        source = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 100})
        save = agent.announce(source, 1).save
        assert agent.status().checkpoints
        assert "store.probed" not in agent.log_text()
        (gate / "open").touch()
        agent.wait_committed(save)


def test_an_agent_that_is_told_to_end_does_not_wait_for_a_library(tmp_path: Path, rclone_bucket: Bucket) -> None:
    gate = tmp_path / "gate"
    with slow_import(gate) as environment, s3_agent(tmp_path, rclone_bucket, **environment) as agent:
        wait_until((gate / "reached").exists, HANG_SECONDS, "the library is being loaded")
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0


def test_a_store_that_is_down_at_the_start_is_said_and_asked_again_when_needed(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    fault_proxy.outage(True)
    with s3_agent(tmp_path, rclone_bucket, endpoint_url=fault_proxy.endpoint_url) as agent:
        wait_until(lambda: "store.not_ready" in agent.log_text(), HANG_SECONDS, "the outage is said")
        assert "unreachable" in agent.log_text()
        fault_proxy.outage(False)
        upload(agent)
        wait_ready(agent)


@pytest.mark.nightly
def test_an_agent_stays_below_100_mib_while_as_much_is_on_the_wire_as_may_be(
    tmp_path: Path, rclone_tls_bucket: Bucket
) -> None:
    with s3_agent(tmp_path, rclone_tls_bucket) as agent:
        wait_ready(agent)
        for step in (1, 2, 3):
            upload(agent, step, size_bytes=40 * MIB, count=5)
        assert agent.memory_bytes("VmHWM") <= MOST_MEMORY_BYTES


def test_an_idle_agent_wakes_no_more_often_than_its_looks_are_due(tmp_path: Path) -> None:
    """In a hurried hour's minute: what is counted is how often it wakes, in the time that it believes has passed."""
    volume = tmp_path / "volume"
    (volume / "checkpoints").mkdir(parents=True)
    command = [sys.executable, "-m", "tests.harness.hurried_agent", "agent", f"--volume={volume}"]
    command += [f"--destination=file://{tmp_path}/bucket", f"--http-address=127.0.0.1:{free_port()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["seconds"] >= 60
    assert 0 < counted["wakes"] <= WAKES_PER_SECOND * counted["seconds"]
