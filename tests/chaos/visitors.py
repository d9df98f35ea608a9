"""Beside the job: an operator prunes, verifies and restores, through the broken network or directly."""

import random
import shutil
import time
from pathlib import Path

from tests.chaos.command import Command
from tests.chaos.job import KEEP_LAST, Job
from tests.chaos.oracle import Oracle, UnansweredError
from tests.chaos.report import Loss, Report
from tests.chaos.store import Store

_MEAN_SECONDS = 8.0


class Visitors:
    """One at a time. `tick` starts and judges them."""

    def __init__(self, directory: Path, job: Job, oracle: Oracle, store: Store, report: Report, seed: int) -> None:
        self._directory = directory
        self._job = job
        self._oracle = oracle
        self._store = store
        self._report = report
        self._random = random.Random(f"visitors/{seed}")
        self._next_at = time.monotonic() + self._random.expovariate(1 / _MEAN_SECONDS)
        self._command: Command | None = None
        self._newest_before = -1
        self._direct = False
        self.last_code: int | None = None
        """Of the command that ended last."""
        self.last_words = ""
        """What it printed, its end."""

    def tick(self) -> None:
        if self._command is not None:
            if self._command.ended(self._report):
                self.last_code = self._command.process.returncode
                self.last_words = self._command.words()
                self._judge(self._command)
                self._command = None
                self._next_at = time.monotonic() + self._random.expovariate(1 / _MEAN_SECONDS)
        elif time.monotonic() >= self._next_at:
            self._direct = self._random.random() < 0.5
            self.start(self._random.choice(["prune", "verify", "restore"]), direct=self._direct)

    @property
    def busy(self) -> bool:
        return self._command is not None

    def start(self, what: str, *, direct: bool) -> None:
        assert self._command is None, "one at a time"
        self._direct = direct
        self._newest_before = self._oracle.newest_step()
        arguments = {
            "prune": ("--yes", f"--keep-last={KEEP_LAST}"),
            "verify": ("--all",),
            "restore": (f"--volume={self._volume}",),
        }[what]
        bucket, proxy = self._store.bucket, self._store.proxy
        endpoint_url = bucket.endpoint_url if direct else proxy.endpoint_url
        self._command = Command(
            self._directory, what, bucket.destination, f"--endpoint-url={endpoint_url}", *arguments, "--json"
        )

    def end(self) -> None:
        if self._command is not None:
            self._command.kill()
            self._command = None

    @property
    def _volume(self) -> Path:
        return self._directory / "elsewhere"

    def _judge(self, command: Command) -> None:
        match command.arguments[0]:
            case "restore":
                self._job.judge_restore(command, self._newest_before)
                shutil.rmtree(self._volume, ignore_errors=True)
            case "verify" if self._direct:
                self._judge_verify(command)

    def _judge_verify(self, command: Command) -> None:
        answer = command.answer()
        damaged = [row for row in answer["checkpoints"] if row["problems"]] if answer else []
        if not damaged:
            return
        try:
            there = self._oracle.committed()
        except UnansweredError:
            return
        for row in damaged:
            # What prune takes away meanwhile looks damaged, with reason; its marker goes first.
            if row["save"] in there:
                self._report.lose(Loss.FALSE_ALARM, str(row))
