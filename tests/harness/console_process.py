"""A real console in a process of its own. Every wait is bounded."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS


class ConsoleProcess:
    """`address` is what it prints, with its last slash."""

    def __init__(self, folder: Path, destination: str, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = ""
        self._output, self._log = folder / "console.out", folder / "console.log"
        self._command = [sys.executable, "-m", "keepstep_agent", "console", destination]
        self._command += ["--address=127.0.0.1:0", "--refresh-every=1s", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._output.open("wb") as output, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=os.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=log
            )
        wait_until(self._listens, HANG_SECONDS, "the console listens")
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(HANG_SECONDS)

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "not started"
        return self._process

    def get(self, address: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Return the status and the body of an address without its first slash."""
        request = urllib.request.Request(self.address + address, headers=dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_ready(self) -> None:
        wait_until(lambda: self.get("readyz")[0] == 200, HANG_SECONDS, "the console has found the runs")

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(HANG_SECONDS)

    def log_text(self) -> str:
        return self._log.read_text()

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log_text()
        first, newline, _ = self._output.read_text().partition("\n")
        self.address = first
        return bool(newline)
