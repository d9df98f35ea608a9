"""A server as a child process: started on a free port, waited for, stopped by its own pid, gone when we are."""

import ctypes
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS

_PR_SET_PDEATHSIG = 1
# Looked up here: in a child that was forked while a thread loaded a library, the lookup would wait for that thread.
_prctl = ctypes.CDLL(None).prctl
# Below Linux's ephemeral ports: no outgoing connection takes one between our choice and the server's bind.
_PORTS = range(20_000, 32_000)
_claims: list[socket.socket] = []


def free_port() -> int:
    """A port of loopback that no other test process on this machine gets while this one lives."""
    for port in random.sample(_PORTS, 100):
        # An abstract unix socket: its name belongs to one process at a time, and goes with it.
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                claim.bind(f"\0keepstep-test-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
        _claims.append(claim)
        return port
    raise RuntimeError("no free port on loopback")


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float = HANG_SECONDS) -> None:
    """Return as soon as `condition` holds; TimeoutError names `what` did not come."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_seconds:g} s")
        time.sleep(0.02)


class Daemon:
    """One child process; its output goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def wait_for_port(self, port: int, timeout_seconds: float = HANG_SECONDS) -> None:
        """RuntimeError with the log if the process ends before it listens."""

        def settled() -> bool:
            return not self.running() or accepts(port)

        wait_until(settled, f"{self.log.name} listens on {port}", timeout_seconds)
        if not self.running():
            raise RuntimeError(f"{self.log.name} ended: {self.log.read_text(errors='replace')[-2000:]}")

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        if self.running():
            self._process.send_signal(signal_number)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait(HANG_SECONDS)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
