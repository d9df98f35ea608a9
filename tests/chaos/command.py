"""A command of Keepstep's as a process beside the job: restore, prune, verify. Polled, never waited for."""

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.chaos.report import Loss, Report
from tests.harness.warm_python import warm_keepstep

HANG_SECONDS = 600.0
"""Nothing takes so long, on however busy a machine: what has not ended then hangs."""


_UNRETRIEVED = "Task exception was never retrieved"
"""asyncio's note of a task that failed after its caller had been told: aiohttp leaves some, and nothing ends by it."""


def has_traceback(log: str) -> bool:
    """Whether something was raised that nobody handled."""
    return log.count("Traceback (most recent call last)") > log.count(_UNRETRIEVED)


class Command:
    """`arguments` follow `keepstep`; JSON on its standard output."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.arguments = arguments
        self._output = directory / f"{arguments[0]}-{time.monotonic_ns()}"
        self.began = time.monotonic()
        with (
            Path(os.devnull).open("rb") as nothing,
            self._output.open("wb") as out,
            self._output.with_suffix(".err").open("wb") as errors,
        ):
            words = ["-m", "keepstep_agent", *arguments]
            files = [nothing.fileno(), out.fileno(), errors.fileno()]
            self.process = warm_keepstep().start(words, environment=os.environ, files=files)

    def ended(self, report: Report) -> bool:
        """Whether it has; one that hangs is a loss and is killed."""
        code = self.process.poll()
        if code is None and time.monotonic() - self.began > HANG_SECONDS:
            report.lose(Loss.HUNG, f"keepstep {' '.join(self.arguments)}: {self.errors()[-500:]}")
            self.process.kill()
            self.process.wait(HANG_SECONDS)
        if self.process.poll() is None:
            return False
        report.count(f"{self.arguments[0]}: {'done' if code == 0 else 'killed or failed'}")
        if has_traceback(self.errors()):
            report.lose(Loss.TRACEBACK, f"keepstep {' '.join(self.arguments)}: {self.errors()[-2000:]}")
        return True

    def answer(self) -> dict[str, Any] | None:
        """What it printed; None if that is no answer."""
        try:
            value: dict[str, Any] = json.loads(self._output.read_bytes())
        except ValueError:
            return None
        return value

    def words(self) -> str:
        """The end of its answer and of its log."""
        return f"{self._output.read_text(errors='replace')[-2000:]} {self.errors()[-2000:]}"

    def errors(self) -> str:
        return self._output.with_suffix(".err").read_text(errors="replace")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(HANG_SECONDS)
