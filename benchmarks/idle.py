"""What an agent costs that has nothing to do: its start, the memory that it ever had, its CPU.

    python -m benchmarks.idle

Real agents as the injection starts them, with the HTTP pages, beside a trainer that lives and saves nothing. The upload
goes to rclone's S3 server over TLS, as to any cloud's. Writes benchmarks/IDLE.md, and exits 1 if a goal is missed.
"""

import fcntl
import os
import platform
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.servers.process import free_port
from tests.servers.rclone import RcloneServer
from tests.servers.server import ENVIRONMENT, Bucket, make_bucket
from tests.servers.tls import make_certificate

STARTS: Final = 5
WINDOWS: Final = 6
WINDOW_SECONDS: Final = 10.0
"""Every look of an idle agent is due once in it."""
SETTLE_SECONDS: Final = 5.0
UPLOAD_BYTES: Final = 1024 * 1024
RSS_GOAL_MIB: Final = 100
START_GOAL_SECONDS: Final = 1.0
CPU_GOAL_SECONDS_PER_HOUR: Final = 10.0
REPORT: Final = Path(__file__).with_name("IDLE.md")
_START_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """From exec to the first 200 of /readyz, and the CPU that it took until then."""

    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """An agent in which nothing has happened for a while."""

    when: str
    resident_mib: float
    highest_mib: float
    anonymous_mib: float
    cpu_seconds_per_hour: float


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="keepstep-idle-") as directory:
        server = RcloneServer(Path(directory) / "data", make_certificate(Path(directory) / "tls"))
        server.start()
        try:
            starts, idle = measure(Path(directory), make_bucket(server))
        finally:
            server.stop()
    return report(starts, idle)


def measure(directory: Path, bucket: Bucket) -> tuple[list[Start], list[Idle]]:
    starts = []
    for number in range(STARTS):
        with started(directory / f"start-{number}", bucket) as (_, _, start):
            starts.append(start)
    with started(directory / "idle", bucket) as (agent, pages, _), trainer_beside(agent):
        idle = [watched("before the first upload", agent)]
        urllib.request.urlopen(f"{pages}/metrics").close()
        idle.append(watched("after a scrape", agent))
        source = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": UPLOAD_BYTES})
        agent.wait_committed(agent.announce(source, 1).save)
        idle.append(watched("after the first upload", agent))
    return starts, idle


@contextmanager
def started(directory: Path, bucket: Bucket) -> Iterator[tuple[AgentProcess, str, Start]]:
    """An agent that serves, and where its pages are."""
    directory.mkdir()
    address = f"127.0.0.1:{free_port()}"
    agent = AgentProcess(
        directory / "volume",
        bucket.destination,
        environment=ENVIRONMENT,
        endpoint_url=bucket.endpoint_url,
        ca_bundle=bucket.ca_bundle,
        http_address=address,
    )

    def ready() -> bool:
        try:
            urllib.request.urlopen(f"http://{address}/readyz").close()
        except urllib.error.URLError:
            return False
        return True

    try:
        began = time.perf_counter()
        agent.start(wait=False)
        wait_until(ready, _START_SECONDS, "the agent serves")
        wall_seconds = time.perf_counter() - began
        yield agent, f"http://{address}", Start(wall_seconds=wall_seconds, cpu_seconds=cpu_seconds(agent))
    finally:
        agent.kill()


@contextmanager
def trainer_beside(agent: AgentProcess) -> Iterator[None]:
    """A rank that lives, as its lock says: it is looked at each second."""
    lock = agent.volume / ".keepstep" / "ranks" / "0"
    with lock.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        agent.register(local_rank=0, rank=0, world_size=1)
        yield


def watched(when: str, agent: AgentProcess) -> Idle:
    time.sleep(SETTLE_SECONDS)
    read = [cpu_seconds(agent)]
    for _ in range(WINDOWS):
        time.sleep(WINDOW_SECONDS)
        read.append(cpu_seconds(agent))
    # The median: the kernel's work for others, interrupts and what they bring, is charged to whoever runs just then.
    spent = statistics.median(after - before for before, after in pairwise(read))
    return Idle(
        when=when,
        resident_mib=agent.memory_bytes("VmRSS") / 2**20,
        highest_mib=agent.memory_bytes("VmHWM") / 2**20,
        anonymous_mib=agent.memory_bytes("RssAnon") / 2**20,
        cpu_seconds_per_hour=spent * 3600 / WINDOW_SECONDS,
    )


def cpu_seconds(agent: AgentProcess) -> float:
    """Of all its threads, none of which ends meanwhile; the clock ticks of /proc/<pid>/stat are too coarse for this."""
    threads = Path(f"/proc/{agent.process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def report(starts: list[Start], idle: list[Idle]) -> int:
    wall = [start.wall_seconds for start in starts]
    most_cpu = max(one.cpu_seconds_per_hour for one in idle)
    goals = [
        ("RSS at any time, uploads of a MiB too", max(one.highest_mib for one in idle), RSS_GOAL_MIB, "MiB"),
        ("start to serving, median", statistics.median(wall), START_GOAL_SECONDS, "s"),
        ("idle CPU, the most of the three", most_cpu, CPU_GOAL_SECONDS_PER_HOUR, "s per hour"),
    ]
    lines = [
        "# What an idle agent costs",
        "",
        "Made by `make bench` (`benchmarks/idle.py`); do not edit.",
        "",
        f"An agent with its HTTP pages beside one living rank, on {os.cpu_count()} cores ({platform.machine()},",
        f"Python {platform.python_version()}). CPU: the median of {WINDOWS} windows of {WINDOW_SECONDS:.0f} s each.",
        f"At its end the machine had {os.getloadavg()[0]:.1f} processes to run.",
        "",
        "| when | RSS MiB | highest until then | anonymous MiB | CPU s per hour |",
        "|---|---|---|---|---|",
        *(
            f"| {one.when} | {one.resident_mib:.1f} | {one.highest_mib:.1f} | {one.anonymous_mib:.1f} "
            f"| {one.cpu_seconds_per_hour:.1f} |"
            for one in idle
        ),
        "",
        f"{STARTS} starts to the first answer of /readyz took {min(wall):.2f} to {max(wall):.2f} s and "
        f"{statistics.median(start.cpu_seconds for start in starts):.2f} s of CPU.",
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(
            f"| {what} ≤ {goal:g} {unit} | {value:.2f} {unit} | {'yes' if value <= goal else 'no'} |"
            for what, value, goal, unit in goals
        ),
    ]
    text = "\n".join(lines) + "\n"
    REPORT.write_text(text)
    print(text)
    return 0 if all(value <= goal for _, value, goal, _ in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
