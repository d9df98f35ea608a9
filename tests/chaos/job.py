"""The run under chaos: two nodes, each with a volume, an agent and one rank, started again and again.

Plays launcher and kubelet: restore on every node, then agents and trainers; when one trainer ends the other is ended,
then the agents, and the next attempt begins. It never waits: `tick` does what is due.
"""

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from enum import Enum, auto
from pathlib import Path

from tests.chaos.command import HANG_SECONDS, Command
from tests.chaos.content import PART_BYTES
from tests.chaos.oracle import Oracle, Truth
from tests.chaos.rank_store import KeyServer
from tests.chaos.report import Loss, Report
from tests.harness.agent_process import AgentProcess
from tests.harness.warm_python import WarmProcess, warm_python
from tests.servers.server import Bucket

GRACE_SECONDS = 15
KEEP_LAST = 3
_LAUNCHER_PATIENCE_SECONDS = 10.0
_BACK_OFF_SECONDS = 40.0
"""How long the agents of trainers that saved nothing live on: a kubelet too starts such a job ever more slowly."""

AnyProcess = subprocess.Popen[bytes] | WarmProcess


class State(Enum):
    RESTORING = auto()
    RUNNING = auto()
    ENDING = auto()
    DRAINING = auto()


class Node:
    """One pod, as long as its volume lives; its processes come and go."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank = rank
        self.volume = directory / f"node-{rank}"
        self.agent: AgentProcess | None = None
        self.agent_due_at = 0.0
        self.trainer: WarmProcess | None = None
        self.restore: Command | None = None
        self.restored = False

    def processes(self) -> dict[str, AnyProcess]:
        """Those that run, by what they are."""
        found: dict[str, AnyProcess] = {}
        if self.agent_runs():
            assert self.agent
            found["agent"] = self.agent.process
        if self.trainer is not None and self.trainer.poll() is None:
            found["trainer"] = self.trainer
        if self.restore is not None and self.restore.process.poll() is None:
            found["restore"] = self.restore.process
        return found

    def agent_runs(self) -> bool:
        return self.agent is not None and self.agent.process.poll() is None

    def kill_all(self) -> None:
        """As when the node goes."""
        for process in self.processes().values():
            process.kill()
            process.wait(HANG_SECONDS)


class Job:
    """`directory` must be short: the agents' sockets lie in it."""

    def __init__(
        self,
        directory: Path,
        bucket: Bucket,
        endpoint_url: str,
        truth: Truth,
        oracle: Oracle,
        report: Report,
        seed: int,
    ) -> None:
        self.nodes = [Node(rank, directory) for rank in range(truth.world_size)]
        self.state = State.RESTORING
        self.attempt = 0
        self.acknowledged = 0
        """Saves of this attempt that an agent has acknowledged."""
        self.restore_seconds = 0.0
        """What the last one took."""
        self._directory = directory
        self._bucket = bucket
        self._endpoint_url = endpoint_url
        self._truth = truth
        self._oracle = oracle
        self._report = report
        self._random = random.Random(f"job/{seed}")
        self._keys: KeyServer | None = None
        self._since = time.monotonic()
        self._newest_before = -1
        self._begin_attempt()

    def tick(self) -> None:
        match self.state:
            case State.RESTORING:
                self._restore()
            case State.RUNNING:
                self._run()
            case State.ENDING:
                self._end_trainers()
            case State.DRAINING:
                self._drain()

    def lose_volume(self, node: Node) -> None:
        """The node goes with its disk: what its agent had and nobody else has is nobody's promise any more."""
        node.kill_all()
        shutil.rmtree(node.volume, ignore_errors=True)
        self._truth.excused |= self._truth.begun.keys() - self._oracle.ever
        node.restored = False

    def something_committed(self) -> bool:
        return self._oracle.newest_step() >= 0

    def start_agent(self, node: Node) -> None:
        assert node.agent
        node.agent.start(wait=False)
        self._report.count("lives of agents")

    def stop_training(self) -> None:
        """No trainer, agent or restore any more; the volumes stay as they are."""
        for node in self.nodes:
            node.kill_all()

    def start_last_agent(self, node: Node) -> None:
        """On the volume as it is, if there ever was one."""
        if node.agent is not None and node.volume.exists():
            self.start_agent(node)

    def end(self) -> None:
        """SIGKILL for everything that runs."""
        for node in self.nodes:
            node.kill_all()
        if self._keys:
            self._keys.stop()

    def judge_restore(self, command: Command, newest_before: int) -> bool:
        """Whether it brought a checkpoint or found that there is none; what it brought is compared byte by byte."""
        answer = command.answer()
        if command.process.returncode or answer is None:
            return False
        restored = next(iter(answer["restored"]), None)
        step = restored["step"] if restored else -1
        if step < newest_before:
            evidence = f"step {step} although step {newest_before} was committed: {answer} {command.errors()[-1500:]}"
            self._report.lose(Loss.OLD_RESTORE, evidence)
        if restored:
            place = Path(restored["path"])
            found = {
                path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()
            }
            if found != self._truth.files(restored["save"]):
                self._report.lose(Loss.WRONG_RESTORE, f"{answer} holds {sorted(found)}")
        return True

    def _begin_attempt(self) -> None:
        self.attempt += 1
        self.acknowledged = 0
        self._newest_before = self._oracle.newest_step()
        for node in self.nodes:
            node.restored = False
        self._enter(State.RESTORING)

    def _enter(self, state: State) -> None:
        self.state = state
        self._since = time.monotonic()

    def _restore(self) -> None:
        for node in self.nodes:
            if node.restore is not None and node.restore.ended(self._report):
                node.restored = self.judge_restore(node.restore, self._newest_before)
                self.restore_seconds = time.monotonic() - node.restore.began
                node.restore = None
            if not node.restored and node.restore is None:
                node.volume.mkdir(parents=True, exist_ok=True)
                node.restore = Command(
                    self._directory,
                    "restore",
                    self._bucket.destination,
                    f"--endpoint-url={self._endpoint_url}",
                    f"--volume={node.volume}",
                    f"--attempt={self._name}",
                    f"--node-rank={node.rank}",
                    "--json",
                )
        if all(node.restored for node in self.nodes):
            self._start()

    @property
    def _name(self) -> str:
        return f"attempt-{self.attempt}"

    def _start(self) -> None:
        self._keys = KeyServer()
        for node in self.nodes:
            node.agent = AgentProcess(
                node.volume,
                self._bucket.destination,
                endpoint_url=self._endpoint_url,
                attempt=self._name,
                node_rank=node.rank,
                part_size_bytes=PART_BYTES,
                max_concurrency=4,
                connect_timeout_seconds=5,
                read_timeout_seconds=10,
                grace_seconds=GRACE_SECONDS,
                keep_last=KEEP_LAST,
            )
            node.agent_due_at = 0.0
            self.start_agent(node)
            node.trainer = self._start_trainer(node)
        self._enter(State.RUNNING)

    def _start_trainer(self, node: Node) -> WarmProcess:
        assert self._keys
        environment = {
            **os.environ,
            "RANK": str(node.rank),
            "WORLD_SIZE": str(len(self.nodes)),
            "LOCAL_RANK": "0",
            "KEEPSTEP_VOLUME": str(node.volume),
            "CHAOS_RUN": self._truth.run,
            "CHAOS_ATTEMPT": self._name,
            "CHAOS_KEYS": str(self._keys.port),
        }
        output, told = os.pipe()
        with (
            Path(os.devnull).open("rb") as nothing,
            os.fdopen(told, "wb") as out,
            (self._directory / f"trainer-{node.rank}.log").open("ab") as errors,
        ):
            words = ["-m", "tests.chaos.trainer"]
            files = [nothing.fileno(), out.fileno(), errors.fileno()]
            trainer = warm_python("keepstep.agent_client.client").start(words, environment=environment, files=files)
        self._report.count("lives of trainers")
        threading.Thread(target=self._listen, args=(output, node.rank, self._name), daemon=True).start()
        return trainer

    def _listen(self, output: int, rank: int, attempt: str) -> None:
        with os.fdopen(output) as lines:
            for line in lines:
                words = line.split()
                # A trainer that was killed leaves half a line.
                if not line.endswith("\n"):
                    continue
                self._since = time.monotonic()
                match words:
                    case ["begun", step, save]:
                        self._truth.begun[save] = (attempt, int(step))
                    case ["acknowledged", step, save]:
                        self._truth.acknowledged.setdefault(save, set()).add(rank)
                        self.acknowledged += 1
                        self._report.count("announcements acknowledged")

    def _keep_agents(self) -> None:
        """Start those that died again, now and then so late that a save finds nobody."""
        now = time.monotonic()
        for node in self.nodes:
            if not node.agent_runs():
                if not node.agent_due_at:
                    node.agent_due_at = now + self._random.choice([0.0, 0.2, 3.0])
                elif now >= node.agent_due_at:
                    node.agent_due_at = 0.0
                    self.start_agent(node)

    def _run(self) -> None:
        self._keep_agents()
        if any(node.trainer is None or node.trainer.poll() is not None for node in self.nodes):
            for node in self.nodes:
                if node.trainer is not None and node.trainer.poll() is None:
                    node.trainer.terminate()
            self._enter(State.ENDING)
        elif time.monotonic() - self._since > HANG_SECONDS:
            self._hung("trainers, which made no step")

    def _end_trainers(self) -> None:
        running = [node.trainer for node in self.nodes if node.trainer is not None and node.trainer.poll() is None]
        if running and time.monotonic() - self._since > _LAUNCHER_PATIENCE_SECONDS:
            for trainer in running:
                trainer.kill()
        if running or not self.acknowledged:
            self._keep_agents()
        if not running and (self.acknowledged or time.monotonic() - self._since > _BACK_OFF_SECONDS):
            assert self._keys
            self._keys.stop()
            for node in self.nodes:
                if node.agent_runs():
                    assert node.agent
                    node.agent.process.send_signal(
                        self._random.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGKILL])
                    )
            self._enter(State.DRAINING)

    def _drain(self) -> None:
        if not any(node.agent_runs() for node in self.nodes):
            self._begin_attempt()
        elif time.monotonic() - self._since > HANG_SECONDS:
            self._hung("agents, which did not drain")

    def _hung(self, what: str) -> None:
        self._report.lose(Loss.HUNG, f"{what} in {self._name}, see {self._directory}")
        for node in self.nodes:
            node.kill_all()
