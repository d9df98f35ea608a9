"""A real agent in a process of its own, for tests: start, talk, kill, read its log.

Every wait is bounded; the process is ended by its pid when the context closes, whatever the test did.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import grpc
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import WarmProcess, starts_alike, warm_keepstep

from keepstep_api.names import socket_address
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

_POLL_SECONDS = 0.01


def wait_until(holds: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Poll a condition; AssertionError naming `what` when it does not come true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {what}"
        time.sleep(_POLL_SECONDS)


class AgentProcess:
    """`settings` by the names of docs/settings.md, as text or numbers; `environment` on top of ours (credentials)."""

    def __init__(
        self,
        volume: Path,
        destination: str,
        *,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
        module: str = "keepstep_agent",
        warm: bool = True,
        **settings: object,
    ) -> None:
        """`module`: what python runs, the command line or a test's variant of it.

        `warm`: forked from a process that has imported it; without, its memory and its control group are its own.
        """
        self.volume = volume
        self.destination = destination
        self.checkpoints = volume / "checkpoints"
        self.socket = volume / ".keepstep" / "agent.sock"
        # How full the disk under the tests is decides nothing, unless a test sets it.
        roomy = {"KEEPSTEP_EVICTION_THRESHOLD_PERCENT": "0"}
        self._environment = {**os.environ, **roomy, **(environment or {})}
        self._arguments = [_flag(name.replace("_", "-"), value) for name, value in settings.items()]
        self._fresh = fresh
        self._module = module
        self._log_path = volume.parent / f"{volume.name}.agent.log"
        self._warm = warm and module == "keepstep_agent" and starts_alike(self._environment)
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def start(self, *, wait: bool = True, stderr: int | None = None) -> None:
        """Start, or start again after an end; with `wait` return once it answers. `stderr`: instead of the log."""
        assert self._process is None or self._process.poll() is not None, "it is running"
        with suppress(OSError):
            # A test may have something else there.
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        words = ["-m", self._module, "agent", f"--volume={self.volume}", f"--destination={self.destination}"]
        words += [*self._arguments, *(["--fresh"] if self._fresh else [])]
        with self._log_path.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            out, errors = log.fileno(), stderr or log.fileno()
            if self._warm:
                self._process = warm_keepstep().start(
                    words, environment=self._environment, files=[nothing.fileno(), out, errors]
                )
            else:
                command = [sys.executable, *words]
                self._process = subprocess.Popen(command, env=self._environment, stdout=out, stderr=errors)
        if wait:
            self.wait_serving()

    def start_refused(self) -> int:
        """Start what cannot run; its exit code once it has ended by itself."""
        self.start(wait=False)
        try:
            return self.wait(HANG_SECONDS)
        finally:
            self.process.kill()

    def wait_serving(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, f"the agent ended with {self.process.returncode}:\n{self.log_text()}"
            try:
                self.status()
            except grpc.RpcError:
                return False
            return True

        wait_until(answers, HANG_SECONDS, "the agent serves")

    @property
    def process(self) -> "subprocess.Popen[bytes] | WarmProcess":
        assert self._process is not None, "not started"
        return self._process

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(HANG_SECONDS)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_seconds: float) -> int:
        """Its exit code."""
        return self.process.wait(timeout_seconds)

    @contextmanager
    def stub(self) -> Iterator[Any]:
        with grpc.insecure_channel(socket_address(self.socket)) as channel:
            yield agent_pb2_grpc.AgentStub(channel)

    def status(self) -> agent_pb2.Status:
        with self.stub() as stub:
            status: agent_pb2.Status = stub.GetStatus(agent_pb2.GetStatusRequest(), timeout=HANG_SECONDS)
        return status

    def announce(self, path: Path | str, step: int, **fields: Any) -> agent_pb2.AnnounceCheckpointResponse:
        """Raises grpc.RpcError when refused."""
        request = agent_pb2.AnnounceCheckpointRequest(path=str(path), step=step, **fields)
        with self.stub() as stub:
            response: agent_pb2.AnnounceCheckpointResponse = stub.AnnounceCheckpoint(request, timeout=HANG_SECONDS)
        return response

    def register(self, *, local_rank: int, rank: int, world_size: int) -> None:
        with self.stub() as stub:
            request = agent_pb2.RegisterRequest(local_rank=local_rank, rank=rank, world_size=world_size)
            stub.Register(request, timeout=HANG_SECONDS)

    def wait_committed(self, save: str, timeout_seconds: float = HANG_SECONDS) -> agent_pb2.Checkpoint:
        with self.stub() as stub:
            request = agent_pb2.WaitCommittedRequest(save=save)
            response: agent_pb2.WaitCommittedResponse = stub.WaitCommitted(request, timeout=timeout_seconds)
        return response.checkpoint

    def notify_termination(self, *, grace_seconds: float = 0.0, source: str = "test") -> None:
        request = agent_pb2.NotifyTerminationRequest(grace_seconds=grace_seconds, source=source)
        with self.stub() as stub:
            stub.NotifyTermination(request, timeout=HANG_SECONDS)

    def log_text(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def log(self, event: str) -> list[dict[str, Any]]:
        """The log lines of one event, in order."""
        return [line for line in json_lines(self.log_text()) if line["event"] == event]

    def memory_bytes(self, field: str) -> int:
        """`VmRSS`, `RssAnon`, `VmHWM` … of /proc/<pid>/status."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024


def json_lines(text: str) -> list[dict[str, Any]]:
    """The log lines in a file that may still be written: a reader can see a write half done, so only whole lines."""
    lines = text.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def write_checkpoint(directory: Path, sizes: Mapping[str, int], *, seed: int = 0) -> Path:
    """Files of given sizes with content that depends on seed and name; fast even for large ones."""
    directory.mkdir(parents=True)
    for name, size_bytes in sizes.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        block = os.urandom(min(size_bytes, 1 << 20)) if size_bytes else b""
        with path.open("wb") as file:
            written = 0
            while written < size_bytes:
                # A counter in every block, so that swapped blocks are seen.
                head = f"{seed}/{name}/{written};".encode()
                piece = (head + block)[: min(len(block), size_bytes - written)]
                file.write(piece)
                written += len(piece)
    return directory


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory with a digest of its content: equal trees are byte-identical."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(directory).as_posix()] = hashlib.file_digest(file, "sha256").digest()
    return found
