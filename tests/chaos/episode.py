"""One episode: one store, one run of two nodes, some minutes of faults; then calm, and all must be accounted for."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.command import HANG_SECONDS, has_traceback
from tests.chaos.faults import Faults
from tests.chaos.job import KEEP_LAST, Job
from tests.chaos.oracle import Oracle, Truth, UnansweredError, markers_read
from tests.chaos.report import Loss, Report
from tests.chaos.store import Store
from tests.chaos.visitors import Visitors

_TICK_SECONDS = 0.05
_WORLD_SIZE = 2
_LEAST_COMMITS = 3
_REPORTED = ("checkpoint.shed", "checkpoint.failed")


def run_episode(store_name: str, seconds: float, seed: int) -> Report:
    """Its directory stays when something was lost."""
    report = Report()
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    store = Store(store_name, seed)
    try:
        _Episode(directory, store, report, seed).run(seconds)
        report.count("lives of stores", store.lives)
        report.count("HTTP requests", len(store.proxy.log))
        for request in store.proxy.log:
            if request.rule:
                report.count(f"HTTP: {request.rule}")
    finally:
        store.close()
        if report.losses:
            print(f"kept: {directory} ({store_name}, seed {seed})", flush=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return report


class _Episode:
    def __init__(self, directory: Path, store: Store, report: Report, seed: int) -> None:
        self._directory = directory
        self._report = report
        self._truth = Truth(run=f"run-{seed}", world_size=_WORLD_SIZE)
        self._proxy = store.proxy
        self._oracle = Oracle(store.bucket, self._truth, report, keep_last=KEEP_LAST)
        self._job = Job(
            directory,
            store.bucket,
            store.proxy.endpoint_url,
            truth=self._truth,
            oracle=self._oracle,
            report=report,
            seed=seed,
        )
        self._faults = Faults(self._job, store, report, seed)
        self._visitors = Visitors(directory, self._job, self._oracle, store, report, seed)

    def run(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        self._oracle.watch()
        try:
            # Where a machine is so busy that little was saved, it takes longer.
            while time.monotonic() < ends_at or (
                len(self._oracle.ever) < _LEAST_COMMITS and time.monotonic() < ends_at + HANG_SECONDS
            ):
                self._job.tick()
                self._faults.tick()
                self._visitors.tick()
                time.sleep(_TICK_SECONDS)
            self._faults.end()
            self._settle()
        finally:
            self._oracle.close()
            self._visitors.end()
            self._job.end()
        self._report.count("attempts of the job", self._job.attempt)

    def _settle(self) -> None:
        """Without faults: agents alone, on the volumes as they are, until every acknowledged save is accounted for."""
        self._wait(lambda: not self._visitors.busy, "the last visitor ends", self._visitors.tick)
        self._job.stop_training()
        for node in self._job.nodes:
            self._job.start_last_agent(node)
        self._oracle.close()
        owed = self._truth.owed()
        self._wait(lambda: self._look() and not self._open(owed), "", lambda: None)
        for save in self._open(owed):
            self._report.lose(Loss.FORGOTTEN, f"save {save} of {self._truth.begun[save]}, see {self._directory}")
        self._report.count("saves acknowledged by all ranks", len(owed))
        self._report.count("of these reported instead of committed", len(owed - self._oracle.ever))
        for what in ("verify", "restore"):
            self._visitors.start(what, direct=True)
            self._wait(lambda: not self._visitors.busy, f"{what} ends", self._visitors.tick)
            if self._visitors.last_code:
                evidence = f"{what} ended with {self._visitors.last_code}: {self._visitors.last_words}"
                self._report.lose(Loss.FAILED, f"{evidence}, see {self._directory}")
        self._look(again=True)
        for node in self._job.nodes:
            if has_traceback(self._log(node.rank)):
                self._report.lose(Loss.TRACEBACK, f"agent of node {node.rank}, see {self._directory}")

    def _look(self, *, again: bool = False) -> bool:
        try:
            self._oracle.look(again=again)
        except UnansweredError:
            return False
        return True

    def _open(self, owed: set[str]) -> set[str]:
        return owed - self._oracle.ever - markers_read(self._proxy.log) - self._reported()

    def _reported(self) -> set[str]:
        """Saves of which an agent has said in its log that they will never be committed."""
        found = set()
        for node in self._job.nodes:
            for line in self._log(node.rank).splitlines():
                if any(event in line for event in _REPORTED) and line.startswith("{") and line.endswith("}"):
                    found.add(json.loads(line)["save"])
        return found

    def _log(self, rank: int) -> str:
        agent = self._job.nodes[rank].agent
        return agent.log_text() if agent else ""

    def _wait(self, holds: Callable[[], bool], what: str, meanwhile: Callable[[], None]) -> None:
        """Bounded; what does not come in time is a loss, where it has a name."""
        ends_at = time.monotonic() + HANG_SECONDS
        while not holds():
            if time.monotonic() > ends_at:
                if what:
                    self._report.lose(Loss.HUNG, f"not within {HANG_SECONDS:g} s: {what}")
                return
            meanwhile()
            time.sleep(10 * _TICK_SECONDS)
