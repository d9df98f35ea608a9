"""`keepstep run` with the trainer of `tests/integration` as a process, for tests: signal it, kill its agent, read."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.harness.agent_process import json_lines, wait_until
from tests.harness.bounds import HANG_SECONDS

TRAINER = Path(__file__).parents[1] / "integration" / "trainer.py"
JUST_IN_TIME, NOT_DURABLE = 143, 75
"""Exit codes of a run."""


class RunProcess:
    """Logs of runner and agent are JSON lines on one stream.

    `trainer` is the environment that the trainer reads; `prefix` is a command that runs the runner, such as nohup.
    """

    def __init__(
        self,
        volume: Path,
        destination: str,
        *,
        environment: Mapping[str, str] | None = None,
        trainer: Mapping[str, object] | None = None,
        command: tuple[str, ...] = (sys.executable, str(TRAINER)),
        restore: str = "whole",
        prefix: tuple[str, ...] = (),
        autoload: bool = False,
        take_over: bool = False,
        **settings: object,
    ) -> None:
        self.volume = volume
        self._output = volume.parent / f"{volume.name}.run.log"
        self._step_log = volume.parent / f"{volume.name}.steps.log"
        defaults: dict[str, object] = {"STEPS": 100_000, "EVERY": 0, "SAVE_BYTES": 100_000, "STEP_SECONDS": 0.02}
        variables = {name: str(value) for name, value in (defaults | dict(trainer or {})).items()}
        self._environment = {**os.environ, **(environment or {}), **variables, "STEP_LOG": str(self._step_log)}
        self._command = [*prefix, sys.executable, "-m", "keepstep_agent", "run"]
        self._command += ["--to", destination, "--volume", str(volume)]
        self._command += ["--log-format=json", *(f"--{name.replace('_', '-')}={settings[name]}" for name in settings)]
        flags = {"--autoload": autoload, "--take-over": take_over}
        self._command += [f"--restore={restore}", *(flag for flag, given in flags.items() if given), "--", *command]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            # Nobody else would end the program; a test that got here has failed already.
            for pid in self.children():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait(HANG_SECONDS)

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "not started"
        return self._process

    def children(self) -> dict[int, str]:
        """pid -> command line of the processes that the runner started and that still run."""
        found = {}
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in map(int, listing.read_text().split() if listing.exists() else ()):
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def agent_pid(self) -> int | None:
        """None while there is none."""
        return next((pid for pid, line in self.children().items() if " keepstep_agent agent " in line), None)

    def kill_agent(self) -> None:
        """SIGKILL, and wait for the next one."""
        killed = self.agent_pid()
        assert killed is not None, "there is no agent"
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: self.agent_pid() not in (None, killed), HANG_SECONDS, "another agent")

    def steps(self) -> list[tuple[int, float]]:
        """(step, seconds it took) of every step so far."""
        lines = self._step_log.read_text().splitlines(keepends=True) if self._step_log.exists() else []
        pairs = [line.split() for line in lines if line.endswith("\n")]
        return [(int(step), float(seconds)) for step, seconds in pairs]

    def wait_steps(self, count: int) -> None:
        """Until so many further steps are done."""
        goal = len(self.steps()) + count

        def done() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.output()}"
            return len(self.steps()) >= goal

        wait_until(done, HANG_SECONDS, f"{count} steps")

    def wait_program_ended(self) -> None:
        """Until the trainer is done and gone, so that only an agent is left."""
        wait_until(lambda: "\ndone " in self.output(), HANG_SECONDS, "the trainer is done")
        wait_until(lambda: list(self.children()) == [self.agent_pid()], HANG_SECONDS, "the trainer is gone")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_seconds: float = HANG_SECONDS) -> int:
        """Its exit code."""
        return self.process.wait(timeout_seconds)

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def log(self, event: str) -> list[dict[str, Any]]:
        """The log lines of one event, of runner and agent, in order."""
        return [line for line in json_lines(self.output()) if line["event"] == event]


def ends_of(run: RunProcess) -> list[dict[str, object]]:
    """Of its agents, those that it did not expect."""
    return run.log("run.agent_died")
