"""What goes wrong, when, and to whom: chosen from a seed, one fault every second or two.

Processes get SIGKILL, SIGSTOP or SIGTERM, the store too; the proxy in front of it loses answers, cuts connections, says
503 and flips bytes; now and then a node goes with its disk. What is stopped goes on some seconds later.
"""

import heapq
import itertools
import random
import signal
import time
from collections.abc import Callable

from tests.chaos.job import AnyProcess, Job, State
from tests.chaos.report import Report
from tests.chaos.store import Store
from tests.servers.faults import Fault, Rule

_MEAN_SECONDS = 1.2
_FAULTS_PER_RESTORE = 8
"""A busy machine that takes long over everything gets fewer faults, as it gets less done between two."""
_LONGEST_STOP_SECONDS = 6.0
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Faults:
    """`tick` does what is due; `end` takes back all that can be."""

    def __init__(self, job: Job, store: Store, report: Report, seed: int) -> None:
        self._job = job
        self._store = store
        self._report = report
        self._random = random.Random(f"faults/{seed}")
        self._next_at = time.monotonic()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._saves_to_live = 1
        self._attempt = 0
        self._kinds: list[tuple[Callable[[], object], int]] = [
            (self._break_http, 40),
            (self._outage, 4),
            (self._hit_agent, 30),
            (self._end_trainer, 10),
            (self._stop_trainer, 4),
            (self._kill_restore, 4),
            (self._hit_store, 8),
            (self._lose_node, 1),
        ]

    def tick(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if now >= self._next_at:
            mean_seconds = max(_MEAN_SECONDS, self._job.restore_seconds / _FAULTS_PER_RESTORE)
            self._next_at = now + mean_seconds * self._random.expovariate(1)
            kinds, weights = zip(*self._kinds, strict=True)
            self._random.choices(kinds, weights)[0]()

    def end(self) -> None:
        """No more faults: what is stopped goes on, the store runs, the proxy is honest."""
        while self._later:
            heapq.heappop(self._later)[2]()
        self._store.start_again().result()
        self._store.proxy.outage(False)
        self._store.proxy.clear()

    def _in(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), action))

    def _moment(self) -> float:
        return self._random.uniform(0.2, _LONGEST_STOP_SECONDS)

    def _break_http(self) -> None:
        faults = [
            Fault.LOSE_ANSWER,
            Fault.RESET_REQUEST,
            Fault.RESET_RESPONSE,
            Fault.END_RESPONSE,
            Fault.DUPLICATE,
            Fault.BLACKHOLE,
            Fault.DELAY,
            Fault.STATUS,
            Fault.FLIP_RESPONSE,
        ]
        if self._store.kind.verifies:
            faults.append(Fault.FLIP_REQUEST)
        fault = self._random.choice(faults)
        target = self._random.choice(["", "", "", "/.keepstep/commits/", "/.keepstep/manifest-", "uploadId="])
        method = self._random.choice(["", "PUT", "GET"])
        match fault:
            case Fault.FLIP_RESPONSE:
                # Of an object: what a listing says, nothing covers.
                method, target = (
                    "GET",
                    self._random.choice(["/runs/one/", "/.keepstep/commits/", "/.keepstep/manifest-"]),
                )
            case Fault.FLIP_REQUEST:
                # The body of an upload's last request is XML that nothing covers either.
                method, target = "PUT", ""
            case Fault.DUPLICATE:
                method, target = "PUT", ""
        rule = Rule(
            name=fault.value,
            fault=fault,
            method=method,
            target=target,
            # A byte that flips at each look is not a bad read but a bad object.
            times=1 if fault is Fault.FLIP_RESPONSE else self._random.randint(1, 4),
            after_bytes=self._random.choice([0, self._random.randrange(200), self._random.randrange(1 << 20)]),
            seconds=self._moment(),
            status=self._random.choice([500, 503, 503]),
            body=_SLOW_DOWN,
        )
        self._store.proxy.add(rule)
        # A rule that nobody meets must not pile up with others.
        self._in(10.0, lambda: setattr(rule, "times", 0))

    def _outage(self) -> None:
        self._report.count("outages of the network")
        self._store.proxy.outage(True)
        self._in(self._moment(), lambda: self._store.proxy.outage(False))

    def _hit_agent(self) -> None:
        node = self._random.choice(self._job.nodes)
        what = self._random.choice(["SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "SIGTERM"])
        if what == "SIGTERM" and not self._trainers_may_end():
            what = "SIGKILL"
        self._hit(node.processes().get("agent"), "agents", what)

    def _end_trainer(self) -> None:
        """One of them, or both: then all are ended, and another attempt begins."""
        if not self._trainers_may_end():
            return
        what = self._random.choice(["SIGKILL", "SIGTERM", "SIGTERM"])
        nodes = self._random.choice([self._job.nodes, [self._random.choice(self._job.nodes)]])
        for node in nodes:
            self._hit(node.processes().get("trainer"), "trainers", what)

    def _stop_trainer(self) -> None:
        self._hit(self._random.choice(self._job.nodes).processes().get("trainer"), "trainers", "SIGSTOP")

    def _kill_restore(self) -> None:
        self._hit(self._random.choice(self._job.nodes).processes().get("restore"), "restores", "SIGKILL")

    def _hit(self, process: AnyProcess | None, whom: str, what: str) -> None:
        if process is None:
            return
        self._report.count(f"{what} of {whom}")
        process.send_signal(signal.Signals[what])
        if what == "SIGSTOP":
            self._in(self._moment(), lambda: process.send_signal(signal.SIGCONT))

    def _hit_store(self) -> None:
        if not self._store.running:
            return
        if self._store.kind.end is None or self._random.random() < 0.5:
            self._report.count("SIGSTOP of stores")
            self._store.signal(signal.SIGSTOP)
            self._in(self._moment(), lambda: self._store.signal(signal.SIGCONT))
        else:
            number = self._random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            self._report.count(f"{number.name} of stores")
            self._store.end(number)
            self._in(self._moment(), lambda: self._store.start_again())

    def _lose_node(self) -> None:
        # Before the first commit, a job that has lost half of its checkpoints needs a person to empty the other half.
        if self._trainers_may_end() and self._job.something_committed():
            self._report.count("nodes lost with their disk")
            self._job.lose_volume(self._random.choice(self._job.nodes))

    def _trainers_may_end(self) -> bool:
        """Only once some of the attempt's saves were acknowledged: on a slow machine too, there must be progress."""
        job = self._job
        if job.attempt != self._attempt:
            self._attempt, self._saves_to_live = job.attempt, 2 * self._random.randint(1, 8)
        return job.state is State.RUNNING and job.acknowledged >= self._saves_to_live
