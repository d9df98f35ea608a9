"""What a commit costs with many agents: from the last rank's seal to the marker, requests, and the agents' CPU.

    python -m benchmarks.scale

Real agents, eight ranks each, against one S3 server behind a proxy that adds 20 ms to every request. Then one real
committer of 1,000 agents, and a simulation of them (`benchmarks/scale_simulation.py`). Writes benchmarks/SCALE.md, and
exits 1 if a goal is missed.
"""

import os
import platform
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Request, Rule
from tests.servers.rclone import RcloneServer
from tests.servers.server import ENVIRONMENT, make_bucket

from benchmarks import scale_simulation
from keepstep_agent.core.model import FileEntry, Kind, RankManifest, SaveInfo
from keepstep_agent.core.stored.commit import manifest_key_of
from keepstep_agent.core.stored.manifest import encode_manifest
from keepstep_agent.core.stored.object_layout import file_key
from keepstep_api.v1 import agent_pb2

SIZES: Final = (8, 64)
ROUNDS: Final = 3
RANKS_PER_AGENT: Final = 8
LATENCY_SECONDS: Final = 0.02
MARKER_GOAL_SECONDS: Final = 0.5
MEMORY_GOAL_MIB: Final = 150.0
TAKE_OVER_GOAL_SECONDS: Final = 3.0
GROWTH_GOAL: Final = 2.0
REQUESTS_GOAL: Final = 4.0
REPORT: Final = Path(__file__).with_name("SCALE.md")
_LONGEST_SECONDS: Final = 240.0
_GRACE_SECONDS: Final = 120.0
_FILE_BYTES: Final = 4_000
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit of all agents together. Seconds count from the moment at which the last manifest was stored.

    `requests` are those of one agent on average, without those that send files and the look for a duplicate.
    """

    what: str
    agents: int
    marker_seconds: float
    all_know_seconds: float
    requests: float
    cpu_seconds: float


class Fleet:
    """Agents that share a store, and the ranks of a job, which announce to them."""

    def __init__(self, folder: Path, count: int, destination: str, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.agents = [
            AgentProcess(
                folder / f"volume-{number}",
                destination,
                environment=ENVIRONMENT,
                endpoint_url=proxy.endpoint_url,
                watch="off",
                grace_seconds=_GRACE_SECONDS,
            )
            for number in range(count)
        ]

    def each(self, work: Callable[[int], object], agents: Sequence[int] | None = None) -> None:
        """Do it for all agents, or for these, at once."""
        numbers = range(len(self.agents)) if agents is None else agents
        with ThreadPoolExecutor(len(self.agents)) as pool:
            list(pool.map(work, numbers))

    def announce(self, number: int, step: int, kind: agent_pb2.Kind = agent_pb2.KIND_PERIODIC) -> None:
        """All ranks of one agent announce the directory that they have written together."""
        agent = self.agents[number]
        path = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", _files(number), seed=step)
        for rank in _ranks_of(number):
            agent.announce(
                path,
                step,
                kind=kind,
                save=save_of(step),
                rank=rank,
                world_size=len(self.agents) * RANKS_PER_AGENT,
                local_world_size=RANKS_PER_AGENT,
            )

    def wait_committed(self, number: int, step: int) -> None:
        self.agents[number].wait_committed(save_of(step), _LONGEST_SECONDS)

    def wait_sealed(self, number: int, step: int) -> None:
        def sealed() -> bool:
            found = [one for one in self.agents[number].status().checkpoints if one.save == save_of(step)]
            return bool(found) and found[0].phase == agent_pb2.PHASE_SEALED

        wait_until(sealed, _LONGEST_SECONDS, f"agent {number} has sealed step {step}")

    def cpu_seconds(self) -> float:
        return sum(map(_cpu_seconds, self.agents))

    def requests(self, step: int) -> list[Request]:
        """Those that are about the save of this step."""
        named = (f"checkpoint-{step}/", f"checkpoint-{step}%2F", f".{save_of(step)}.json")
        return [request for request in self.proxy.log if any(one in request.target for one in named)]

    def result(self, what: str, step: int, *, cpu_seconds: float) -> Commit:
        requests = self.requests(step)
        puts = [one for one in requests if one.method == "PUT" and one.status == 200]
        sealed_at = max(one.answered_at for one in puts if "/.keepstep/manifest-" in one.path)
        marker_at = min(one.answered_at for one in puts if "/.keepstep/commits/" in one.path)
        small = ("/.keepstep/manifest-", "/.keepstep/commits/")
        files = [one for one in requests if one.method == "PUT" and not any(name in one.path for name in small)]
        return Commit(
            what=what,
            agents=len(self.agents),
            marker_seconds=marker_at - sealed_at,
            all_know_seconds=time.monotonic() - sealed_at,
            # Each agent looks once for a marker before it sends the first byte.
            requests=(len(requests) - len(files)) / len(self.agents) - 1,
            cpu_seconds=cpu_seconds / len(self.agents),
        )


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="keepstep-scale-") as directory:
        commits = [one for count in SIZES for one in measure(Path(directory) / str(count), count, rounds=ROUNDS)]
        memory_mib = committer_memory_mib(Path(directory) / "memory", max(scale_simulation.AGENTS))
    simulated = scale_simulation.measure()
    rows = [*goals(commits), *scale_simulation.goals(simulated), memory_goal(max(scale_simulation.AGENTS), memory_mib)]
    text = page(commits, simulated, rows)
    REPORT.write_text(text)
    print(text)
    return 0 if all(met for _, _, met in rows) else 1


def measure(folder: Path, count: int, *, rounds: int) -> list[Commit]:
    """Commit some saves with so many agents, one with the committer killed, and one at the end of all pods."""
    with fleet(folder, count) as job:
        found = [_commit(job, step) for step in range(1, rounds + 1)]
        found.append(_commit_without_committer(job, rounds + 1))
        found.append(_commit_at_the_end(job, rounds + 2))
    return found


@contextmanager
def fleet(folder: Path, count: int) -> Iterator[Fleet]:
    server = RcloneServer(folder / "data")
    server.start()
    with ExitStack() as stack:
        stack.callback(server.stop)
        bucket = make_bucket(server)
        port = urlsplit(bucket.endpoint_url).port
        assert port is not None
        proxy = FaultProxy(port)
        proxy.start()
        stack.callback(proxy.stop)
        job = Fleet(folder, count, bucket.destination, proxy)
        for agent in job.agents:
            stack.enter_context(agent)
        proxy.add(Rule(name="far", fault=Fault.DELAY, times=-1, seconds=LATENCY_SECONDS))
        # Each has made its first connection and knows what the store can do.
        job.each(lambda number: job.announce(number, 0))
        job.each(lambda number: job.wait_committed(number, 0))
        yield job


def committer_memory_mib(folder: Path, agents: int) -> float:
    """Return the most memory that the committer of so many agents ever has. The others' manifests are there already."""
    server = RcloneServer(folder / "data")
    server.start()
    try:
        bucket = make_bucket(server)
        info = SaveInfo(
            save=save_of(1),
            name="checkpoint-1",
            step=1,
            kind=Kind.PERIODIC,
            world_size=agents * RANKS_PER_AGENT,
        )
        root = folder / "data" / bucket.name / bucket.prefix
        for number in range(1, agents):
            ranks = [_rank_of(info, rank) for rank in _ranks_of(number)]
            _write(root / manifest_key_of(ranks), encode_manifest(ranks))
            for file in (file for one in ranks for file in one.files):
                _write(root / file_key(info, file.path), bytes(file.size_bytes))
        agent = AgentProcess(
            folder / "volume",
            bucket.destination,
            environment=ENVIRONMENT,
            endpoint_url=bucket.endpoint_url,
            warm=False,
            watch="off",
        )
        with agent:
            path = write_checkpoint(agent.checkpoints / info.name, _files(0))
            for rank in _ranks_of(0):
                agent.announce(
                    path,
                    info.step,
                    save=info.save,
                    rank=rank,
                    world_size=info.world_size,
                    local_world_size=RANKS_PER_AGENT,
                )
            agent.wait_committed(info.save, _LONGEST_SECONDS)
            return agent.memory_bytes("VmHWM") / 1024**2
    finally:
        server.stop()


def _rank_of(info: SaveInfo, rank: int) -> RankManifest:
    file = FileEntry(path=f"__{rank}_0.distcp", size_bytes=_FILE_BYTES, part_size_bytes=2**23, checksums=(rank,))
    return RankManifest(info=info, rank=rank, saved_at=time.time(), files=(file,))


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def _ranks_of(number: int) -> range:
    return range(number * RANKS_PER_AGENT, (number + 1) * RANKS_PER_AGENT)


def _files(number: int) -> dict[str, int]:
    return {f"__{rank}_0.distcp": _FILE_BYTES for rank in _ranks_of(number)}


def _commit(job: Fleet, step: int) -> Commit:
    before = job.cpu_seconds()
    job.each(lambda number: job.announce(number, step))
    job.each(lambda number: job.wait_committed(number, step))
    return job.result("commit", step, cpu_seconds=job.cpu_seconds() - before)


def _commit_without_committer(job: Fleet, step: int) -> Commit:
    """The agent with rank 0 is killed when all but the last agent have sealed."""
    *first, last = range(len(job.agents))
    before = job.cpu_seconds()
    job.each(lambda number: job.announce(number, step), first)
    job.each(lambda number: job.wait_sealed(number, step), first)
    cpu_of_killed = _cpu_seconds(job.agents[0])
    job.agents[0].kill()
    job.announce(last, step)
    job.each(lambda number: job.wait_committed(number, step), [*first[1:], last])
    cpu_seconds = sum(map(_cpu_seconds, job.agents[1:])) + cpu_of_killed - before
    found = job.result("committer killed", step, cpu_seconds=cpu_seconds)
    job.agents[0].start()
    job.wait_committed(0, step)
    return found


def _commit_at_the_end(job: Fleet, step: int) -> Commit:
    before = job.cpu_seconds()
    job.each(lambda number: job.agents[number].notify_termination(grace_seconds=_GRACE_SECONDS))
    job.each(lambda number: job.announce(number, step, agent_pb2.KIND_JUST_IN_TIME))
    job.each(lambda number: job.wait_committed(number, step))
    found = job.result("end of all pods", step, cpu_seconds=job.cpu_seconds() - before)
    job.each(lambda number: job.agents[number].terminate())
    codes = [agent.wait(_LONGEST_SECONDS) for agent in job.agents]
    assert codes == [0] * len(codes), codes
    return found


def save_of(step: int) -> str:
    return f"0123abcd-c{step:06d}"


def _cpu_seconds(agent: AgentProcess) -> float:
    """User and system time of the process so far."""
    fields = Path(f"/proc/{agent.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def goals(commits: Sequence[Commit]) -> list[tuple[str, str, bool]]:
    """Return each goal, what was measured, and whether it is met."""
    least, most = min(one.agents for one in commits), max(one.agents for one in commits)

    def median(what: str, agents: int) -> float:
        return statistics.median(one.marker_seconds for one in commits if (one.what, one.agents) == (what, agents))

    rows = []
    for what in ("commit", "end of all pods"):
        seconds, growth = median(what, most), median(what, most) / median(what, least)
        goal = f"{what}: marker with {most} agents ≤ {MARKER_GOAL_SECONDS:g} s"
        rows.append((goal, f"{seconds:.2f} s", seconds <= MARKER_GOAL_SECONDS))
        goal = f"{what}: {most} agents to {least} ≤ {GROWTH_GOAL:g} x"
        rows.append((goal, f"{growth:.1f} x", growth <= GROWTH_GOAL))
    seconds = max(median("committer killed", count) for count in (least, most))
    goal = f"committer killed: marker ≤ {TAKE_OVER_GOAL_SECONDS:g} s"
    rows.append((goal, f"{seconds:.2f} s", seconds <= TAKE_OVER_GOAL_SECONDS))
    requests = max(one.requests for one in commits if one.what == "commit")
    rows.append((f"requests per agent and commit ≤ {REQUESTS_GOAL:g}", f"{requests:.1f}", requests <= REQUESTS_GOAL))
    return rows


def memory_goal(agents: int, memory_mib: float) -> tuple[str, str, bool]:
    goal = f"most memory of the committer of {agents:,} agents ≤ {MEMORY_GOAL_MIB:g} MiB"
    return goal, f"{memory_mib:.0f} MiB", memory_mib <= MEMORY_GOAL_MIB


def page(
    commits: Sequence[Commit],
    simulated: Sequence[scale_simulation.Result],
    rows: Sequence[tuple[str, str, bool]],
) -> str:
    text = (
        f"Real agents with {RANKS_PER_AGENT} ranks each, which announce one small file per rank "
        f"({os.cpu_count()} cores, {platform.machine()}). They use rclone's S3 server on loopback behind a proxy that "
        f"adds {LATENCY_SECONDS * 1000:.0f} ms to every request. Seconds count from the moment at which the last "
        "manifest was stored, to the marker, and to the moment at which the last agent has read it. Requests are those "
        "of one agent on average that have to do with the commit: not those that send files, and not the one look for "
        "a duplicate before the first byte. CPU is that of one agent on average, from the announcements to the commit. "
        f"At the end the machine had {os.getloadavg()[0]:.1f} processes to run."
    )
    lines = [
        "# What a commit costs with many agents",
        "",
        "Made by `make scale` (`benchmarks/scale.py`); do not edit.",
        "",
        *textwrap.wrap(text, 118),
        "",
        "| what | agents | marker | all know | requests | CPU |",
        "|---|---|---|---|---|---|",
        *(
            f"| {one.what} | {one.agents} | {one.marker_seconds:.2f} s | {one.all_know_seconds:.2f} s "
            f"| {one.requests:.1f} | {one.cpu_seconds:.3f} s |"
            for one in commits
        ),
        "",
        *scale_simulation.section(simulated),
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(f"| {goal} | {measured} | {'yes' if met else 'no'} |" for goal, measured, met in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
