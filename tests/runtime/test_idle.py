"""What an agent costs that has nothing to do: what it has loaded, and how often it wakes."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.servers.process import free_port

CALL_SECONDS = 30.0
RUN_SECONDS = 100.0
WAKES_PER_SECOND = 2
"""Looks are due seldom; a thread asks for the ranks' locks each second, and wakes nobody while they stay the same."""
AT_THE_FIRST_UPLOAD = {"awscrt"}
AT_THE_FIRST_SCRAPE = {"prometheus_client"}
FOR_OTHERS = {"aiohttp", "botocore", "kubernetes", "cryptography", "psutil", "rich.console"}
"""S3, the webhook, settings that nobody made, and what prints tables."""


def loaded(agent: AgentProcess) -> set[str]:
    """The modules that this agent has imported, by the interpreter's own account."""
    return set(re.findall(r"^import time:.*\| +([\w.]+)", agent.log_text(), re.MULTILINE))


def test_an_agent_loads_what_an_upload_or_a_scrape_needs_at_the_first_one(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"

    def get(path: str) -> None:
        urllib.request.urlopen(f"http://{address}{path}", timeout=CALL_SECONDS).close()

    with AgentProcess(
        tmp_path / "volume",
        f"file://{tmp_path}/bucket",
        environment={"PYTHONPROFILEIMPORTTIME": "1"},
        http_address=address,
    ) as agent:
        get("/readyz")
        before = loaded(agent)
        assert {"grpc", "structlog", "uvloop", "h11"} <= before
        assert not before & (AT_THE_FIRST_UPLOAD | AT_THE_FIRST_SCRAPE | FOR_OTHERS)

        get("/metrics")
        source = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 100})
        agent.wait_committed(agent.announce(source, 1).save)
        after = loaded(agent)
        assert after >= AT_THE_FIRST_UPLOAD | AT_THE_FIRST_SCRAPE
        assert not after & FOR_OTHERS


def test_an_idle_agent_wakes_no_more_often_than_its_looks_are_due(tmp_path: Path) -> None:
    """In a hurried hour's minute: what is counted is how often it wakes, in the time that it believes has passed."""
    volume = tmp_path / "volume"
    (volume / "checkpoints").mkdir(parents=True)
    command = [sys.executable, "-m", "tests.harness.hurried_agent", "agent", f"--volume={volume}"]
    command.append(f"--destination=file://{tmp_path}/bucket")
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["seconds"] >= 60
    assert 0 < counted["wakes"] <= WAKES_PER_SECOND * counted["seconds"]
