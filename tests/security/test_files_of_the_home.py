"""Files that libraries find by themselves, in the home directory or the working directory, where somebody else may
write: they name no program, no endpoint and no key for an agent that runs as in a pod, and an agent of `keepstep run`
imports nothing from where its program lies.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.server import ENVIRONMENT, Bucket

from keepstep_agent.core.injection.containers import AGENT_FILES

KEYS = {"AWS_ACCESS_KEY_ID": "the-agents", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "token-of-the-agent"}


class Recorder:
    """Notes the first line of each request that it gets, and refuses it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        lines = self.lines

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                lines.append(self.rfile.readline(4096).decode("latin-1").strip())
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Recorder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(HANG_SECONDS)
        self._server.server_close()


@pytest.fixture
def trainers_server() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder


@pytest.fixture
def proxy() -> Iterator[Recorder]:
    """Everything that goes to another host comes here."""
    with Recorder() as recorder:
        yield recorder


@pytest.fixture
def home(tmp_path: Path, trainers_server: Recorder) -> Path:
    """A home directory in which the trainer has written whatever a library reads there."""
    home = tmp_path / "home"
    for folder in (home / ".aws/models/s3", home / "data"):
        folder.mkdir(parents=True)
    runs = f"credential_process = /usr/bin/touch {home}/process-ran"
    leads = f"endpoint_url = {trainers_server.url}\ndata_path = {home}/data\nregion = us-east-1"
    (home / ".aws/config").write_text(f"[default]\n{runs}\n{leads}\n")
    (home / ".aws/credentials").write_text("[default]\naws_access_key_id=the-trainers\naws_secret_access_key=x\n")
    (home / ".boto").write_text("[Credentials]\naws_access_key_id=the-trainers\naws_secret_access_key=x\n")
    (home / ".netrc").write_text("default login the-trainers password x\n")
    return home


def agent_as_in_a_pod(tmp_path: Path, home: Path, environment: dict[str, str]) -> AgentProcess:
    nobody_else = {"HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}
    return AgentProcess(
        tmp_path / "volume",
        "s3://bucket/runs/one",
        environment={**nobody_else, **AGENT_FILES, **environment},
        warm=False,
        watch="off",
    )


@pytest.fixture(autouse=True)
def _only_what_a_test_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def test_a_home_that_the_trainer_writes_names_no_endpoint_and_gets_no_signed_request(
    tmp_path: Path, home: Path, trainers_server: Recorder, proxy: Recorder
) -> None:
    models = {"version": 3, "partitions": [_partition(trainers_server.url)]}
    (home / ".aws/models/endpoints.json").write_text(json.dumps(models))
    environment = {**KEYS, "HTTPS_PROXY": proxy.url, "NO_PROXY": "127.0.0.1"}
    with agent_as_in_a_pod(tmp_path, home, environment) as agent:
        agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 5000}), 1)
        wait_until(lambda: bool(proxy.lines or trainers_server.lines), HANG_SECONDS, "the agent asks a store")
    assert trainers_server.lines == []
    assert {line.rpartition(" HTTP")[0] for line in proxy.lines} <= {
        "CONNECT bucket.s3.amazonaws.com:443",
        "CONNECT s3.amazonaws.com:443",
    }


def _partition(url: str) -> dict[str, object]:
    host = url.removeprefix("http://")
    return {
        "partition": "aws",
        "partitionName": "the trainer's",
        "regionRegex": ".*",
        "regions": {"us-east-1": {"description": "any"}},
        "dnsSuffix": host,
        "defaults": {"hostname": host, "protocols": ["http"], "signatureVersions": ["v4"]},
        "services": {"s3": {"defaults": {"hostname": host, "protocols": ["http"]}, "endpoints": {"us-east-1": {}}}},
    }


def test_a_home_that_the_trainer_writes_starts_no_program_and_gives_no_keys(
    tmp_path: Path, home: Path, trainers_server: Recorder, proxy: Recorder
) -> None:
    (home / ".aws/credentials").unlink()
    (home / ".aws/config").write_text(f"[default]\ncredential_process = /usr/bin/touch {home}/process-ran\n")
    with agent_as_in_a_pod(tmp_path, home, {"HTTPS_PROXY": proxy.url, "NO_PROXY": "127.0.0.1"}) as agent:
        agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 5000}), 1)
        wait_until(lambda: agent.status().storage_error != "", HANG_SECONDS, "the status says what is wrong")
        assert "credentials" in agent.status().storage_error
    assert not (home / "process-ran").exists()
    assert trainers_server.lines == proxy.lines == []


def test_a_user_outside_kubernetes_has_their_own_profiles(rclone_bucket: Bucket, tmp_path: Path) -> None:
    aws = tmp_path / "home/.aws"
    aws.mkdir(parents=True)
    (aws / "config").write_text(f"[profile mine]\nendpoint_url = {rclone_bucket.endpoint_url}\nregion = us-east-1\n")
    keys = (ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"])
    (aws / "credentials").write_text("[mine]\naws_access_key_id = {}\naws_secret_access_key = {}\n".format(*keys))
    environment = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"HOME": str(aws.parent), "AWS_PROFILE": "mine", "AWS_EC2_METADATA_DISABLED": "true"}
    line = [sys.executable, "-m", "keepstep_agent", "doctor", rclone_bucket.destination]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_that_a_variable_names_are_read_in_a_pod_too(rclone_bucket: Bucket, tmp_path: Path) -> None:
    keys = (ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"])
    (tmp_path / "mounted").write_text("[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n".format(*keys))
    environment = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    environment |= {**AGENT_FILES, "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "mounted")}
    environment |= {"KEEPSTEP_S3_ENDPOINT_URL": rclone_bucket.endpoint_url, "AWS_EC2_METADATA_DISABLED": "true"}
    line = [sys.executable, "-m", "keepstep_agent", "doctor", rclone_bucket.destination]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_restore_and_agent_of_a_run_import_nothing_from_where_the_program_runs(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for module in ("queue", "click", "uvloop", "aiobotocore", "keepstep_agent"):
        (work / f"{module}.py").write_text(f"import pathlib\npathlib.Path('{tmp_path}/{module}-ran').touch()\n")
    # As the command does that pip installs: its own first folder is not the working directory.
    start = "import sys; sys.path[:] = [place for place in sys.path if place]; import keepstep_agent.__main__ as it"
    line = [sys.executable, "-P", "-c", f"{start}; it.main()", "run", f"--destination=file://{tmp_path}/bucket"]
    line.append(f"--socket={tmp_path}/socket")
    done = subprocess.run(
        [*line, "--", "true"], cwd=work, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert "agent.serving" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("*-ran")) == []
