"""What snapshots of an output directory cost: bytes sent and read, CPU, and seconds until what was written is pinned.

    python -m benchmarks.mirror_costs [--quick] [--interval 15]

Real agents beside a program that announces nothing, with the C store, which counts what it receives. First one file is
rewritten in place again and again. Then checkpoints are added to a directory that has many, one at a time. Then two
agents are idle side by side, one of them with a directory of many files. Then a program saves far faster than its store
takes it. Last, agents are killed, and what they have stored is as old as it is. Writes benchmarks/MIRROR.md, unless it
is --quick, and exits 1 if a goal is missed. Takes sixteen minutes, and 5 GiB below the temporary directory.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.data_path.build import build
from benchmarks.data_path.certificate import make_certificate
from benchmarks.data_path.process import process_cpu_ns
from benchmarks.data_path.server import Server
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.servers.server import ENVIRONMENT

from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_api.names import STATE_DIRECTORY

MIB: Final = 1 << 20
SENT_GOAL: Final = 1.05
"""Bytes that the store receives for an added checkpoint, of the checkpoint's bytes."""
IDLE_GOAL_SECONDS_PER_HOUR: Final = 10.0
STAGED_GOAL: Final = 1.1
"""Bytes that snapshots hold on the volume besides the newest save, of one save's bytes."""
AGE_GOAL_SECONDS: Final = 15.0
"""Age of what comes back after everything was lost, if the store takes it at once."""
FAST_INTERVAL_SECONDS: Final = 5.0
SLOW_STORE_SHARE: Final = 0.05
"""Of the pace at which the fast program saves, so much is what its store takes."""
_LOOK_SECONDS: Final = 0.2
_HEAD_BYTES: Final = 64
_FIRST_KILL_SECONDS: Final = 20.0
_KILLED_WITHIN_SECONDS: Final = 10.0
REPORT: Final = Path(__file__).with_name("MIRROR.md")
FILES_PER_FOLDER: Final = 100
_SETTLE_SECONDS: Final = 15.0
"""An agent looks often for twelve seconds after the last change."""
_HOUSEKEEPING_SECONDS: Final = 0.3
_LONGEST_SECONDS: Final = 300.0
_GAP_SECONDS: Final = (7.0, 10.0)
"""Between a commit and the next save: more than the agent leaves between two snapshots, and at no fixed phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How large everything is. `interval_seconds`: between the beginnings of two saves in place."""

    in_place_bytes: int = 1024 * MIB
    saves: int = 6
    interval_seconds: float = 15.0
    checkpoints: int = 40
    checkpoint_bytes: int = 20_000_000
    added: int = 10
    files: int = 20_000
    idle_seconds: float = 180.0
    fast_bytes: int = 1024 * MIB
    fast_seconds: float = 120.0
    kills: int = 10


FULL: Final = Scenario()
QUICK: Final = Scenario(
    in_place_bytes=8 * MIB,
    saves=2,
    interval_seconds=1.0,
    checkpoints=6,
    checkpoint_bytes=2_000_000,
    added=2,
    files=2000,
    idle_seconds=20.0,
    fast_bytes=64 * MIB,
    fast_seconds=75.0,
    kills=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an agent has used, and what the store has received. `read_bytes`: by reads, sendfile and copies alike."""

    cpu_seconds: float
    read_bytes: int
    written_bytes: int
    received_bytes: int

    def since(self, before: "Usage") -> "Usage":
        return Usage(
            cpu_seconds=self.cpu_seconds - before.cpu_seconds,
            read_bytes=self.read_bytes - before.read_bytes,
            written_bytes=self.written_bytes - before.written_bytes,
            received_bytes=self.received_bytes - before.received_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot: what it used from the beginning of the write until the commit.

    `staged_seconds`: from the end of the write until everything was pinned.
    """

    used: Usage
    staged_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """CPU seconds of two agents in `seconds`, and of one look at the files."""

    seconds: float
    watching_cpu_seconds: float
    empty_cpu_seconds: float
    look_cpu_seconds: float

    @property
    def watch_cpu_seconds(self) -> float:
        """What the files cost."""
        return self.watching_cpu_seconds - self.empty_cpu_seconds


class WatchedOutput:
    """An output directory and its agent."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.output = folder / "out"
        self.output.mkdir(parents=True)
        self._server = server
        self.agent = AgentProcess(
            folder / "volume",
            f"s3://bench/{folder.name}",
            environment=ENVIRONMENT,
            endpoint_url=server.endpoint_url(secure=False),
            watch=self.output,
            warm=False,
        )

    def usage(self) -> Usage:
        pid = self.agent.process.pid
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        counted = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
        return Usage(
            cpu_seconds=process_cpu_ns(pid) / 1e9,
            read_bytes=counted["rchar"],
            written_bytes=counted["wchar"],
            received_bytes=self._server.counts().bytes_in,
        )

    def snapshot_of(self, write: Callable[[], object]) -> Snapshot:
        """Write, and wait until a snapshot of it is committed."""
        before = self.usage()
        write()
        ended_at = time.time()
        staged_at = 0.0

        def committed() -> bool:
            nonlocal staged_at
            done = {line["save"] for line in self.agent.log("checkpoint.committed")}
            for line in self.agent.log("checkpoint.staged"):
                staged_at = datetime.fromisoformat(line["timestamp"]).timestamp()
                if staged_at >= ended_at and line["save"] in done:
                    return True
            return False

        wait_until(committed, _LONGEST_SECONDS, "a snapshot of it is committed")
        time.sleep(_HOUSEKEEPING_SECONDS)
        return Snapshot(used=self.usage().since(before), staged_seconds=staged_at - ended_at)


@contextmanager
def store(folder: Path) -> Iterator[Server]:
    server = Server(
        build(folder).server,
        sources=folder / "none",
        spool=folder / "spool",
        certificate=make_certificate(folder / "tls"),
    )
    with server:
        yield server


def rewritten_in_place(folder: Path, server: Server, scenario: Scenario) -> list[Snapshot]:
    """One file, all of which each save writes again."""
    watched = WatchedOutput(folder, server)
    path = watched.output / "state.bin"
    block = os.urandom(MIB)

    def write() -> None:
        with path.open("r+b" if path.exists() else "wb") as file:
            for _ in range(scenario.in_place_bytes // MIB):
                file.write(time.time_ns().to_bytes(8) + block[8:])

    snapshots = []
    with watched.agent:
        for _ in range(1 + scenario.saves):
            next_at = time.monotonic() + scenario.interval_seconds
            snapshots.append(watched.snapshot_of(write))
            time.sleep(max(0.0, next_at - time.monotonic()))
    # The first one is linked, as nothing is in place yet.
    return snapshots[1:]


def added_one_at_a_time(folder: Path, server: Server, scenario: Scenario) -> list[Snapshot]:
    """Directories of four files each."""
    watched = WatchedOutput(folder, server)
    chance = random.Random(folder.name)

    def write(number: int) -> None:
        sizes = {f"shard-{file}.bin": scenario.checkpoint_bytes // 4 for file in range(4)}
        write_checkpoint(watched.output / f"checkpoint-{number}", sizes, seed=number)

    snapshots = []
    with watched.agent:
        watched.snapshot_of(lambda: list(map(write, range(scenario.checkpoints))))
        for number in range(scenario.checkpoints, scenario.checkpoints + scenario.added):
            time.sleep(chance.uniform(*_GAP_SECONDS))
            snapshots.append(watched.snapshot_of(partial(write, number)))
    return snapshots


def idle_watch(folder: Path, server: Server, scenario: Scenario) -> Idle:
    """Both agents run at the same time, so that what the machine does besides is the same for both."""
    watching, empty = WatchedOutput(folder / "watching", server), WatchedOutput(folder / "empty", server)

    def write() -> None:
        for number in range(scenario.files):
            path = watching.output / f"folder-{number // FILES_PER_FOLDER}" / f"file-{number}"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{number}\n")

    with watching.agent, empty.agent:
        watching.snapshot_of(write)
        time.sleep(_SETTLE_SECONDS)
        before = [one.usage().cpu_seconds for one in (watching, empty)]
        time.sleep(scenario.idle_seconds)
        after = [one.usage().cpu_seconds for one in (watching, empty)]
        look = look_cpu_seconds(watching.output)
    spent = [end - begin for begin, end in zip(before, after, strict=True)]
    return Idle(
        seconds=scenario.idle_seconds,
        watching_cpu_seconds=spent[0],
        empty_cpu_seconds=spent[1],
        look_cpu_seconds=look,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fast:
    """A program that saves faster than its store takes it.

    `staged_bytes`: the most that snapshots held on the volume. `warnings`: how often the agent said that the store is
    slow.
    """

    saves: int
    snapshots: int
    staged_bytes: int
    warnings: int


def fast_saver(folder: Path, scenario: Scenario) -> Fast:
    """Each save is written under another name and renamed, so that a snapshot links it."""
    output, store = folder / "out", folder / "store"
    output.mkdir(parents=True)
    agent = AgentProcess(
        folder / "volume",
        f"file://{store}",
        watch=output,
        warm=False,
        bandwidth_bytes_per_second=int(scenario.fast_bytes / FAST_INTERVAL_SECONDS * SLOW_STORE_SHARE),
    )
    staged = folder / "volume" / STATE_DIRECTORY / "staged"
    block = os.urandom(MIB)
    saves, most_bytes = 0, 0
    with agent:
        until = time.monotonic() + scenario.fast_seconds
        while time.monotonic() < until:
            next_at = time.monotonic() + FAST_INTERVAL_SECONDS
            saves += 1
            with (output / "state.tmp").open("wb") as file:
                for _ in range(scenario.fast_bytes // MIB):
                    file.write(saves.to_bytes(8) + block[8:])
            (output / "state.tmp").rename(output / "state.bin")
            while time.monotonic() < next_at:
                most_bytes = max(most_bytes, _bytes_below(staged))
                time.sleep(_LOOK_SECONDS)
        wait_until(
            lambda: _newest_stored(store, "state.bin").startswith(saves.to_bytes(8)), _LONGEST_SECONDS, "all is stored"
        )
        return Fast(
            saves=saves,
            snapshots=len(agent.log("checkpoint.committed")),
            staged_bytes=most_bytes,
            warnings=len(agent.log("snapshot.store_is_slow")),
        )


def age_after_kills(folder: Path, scenario: Scenario, save: Callable[[Path, str], object]) -> list[float]:
    """Kill the agent of a program that saves each second, again and again. Return how old what is stored is, each time.

    That is the time since the save after the newest stored one was complete.
    """
    chance = random.Random(folder.name)
    ages: list[float] = []
    for number in range(scenario.kills):
        output, store = folder / str(number) / "out", folder / str(number) / "store"
        output.mkdir(parents=True)
        with AgentProcess(folder / str(number) / "volume", f"file://{store}", watch=output, warm=False) as agent:
            saved_at: list[float] = []
            until = time.monotonic() + _FIRST_KILL_SECONDS + chance.uniform(0, _KILLED_WITHIN_SECONDS)
            while time.monotonic() < until:
                save(output, json.dumps({"save": len(saved_at)}))
                saved_at.append(time.monotonic())
                time.sleep(1.0)
            agent.kill()
            killed_at = time.monotonic()
        newest = _newest_stored(store, "state.json")
        superseded_at = saved_at[json.loads(newest)["save"] + 1 :] if newest else saved_at
        ages.append(killed_at - superseded_at[0] if superseded_at else 0.0)
    return ages


def renamed(output: Path, content: str) -> None:
    (output / "state.tmp").write_text(content)
    (output / "state.tmp").rename(output / "state.json")


def rewritten(output: Path, content: str) -> None:
    (output / "state.json").write_text(content)


def two_files(output: Path, content: str) -> None:
    rewritten(output, content)
    (output / "optimizer.json").write_text(content)


def _newest_stored(store: Path, name: str) -> bytes:
    """Return the begin of a file that each snapshot sends, in the newest committed one; empty if there is none."""
    markers = sorted((store / STATE_DIRECTORY / "snapshots" / "node-0").glob("*.json"))
    if not markers:
        return b""
    with (store / "node-0" / markers[0].name.split(".")[1] / "out" / name).open("rb") as file:
        return file.read(_HEAD_BYTES)


def _bytes_below(folder: Path) -> int:
    """Return the bytes of the files that have no name but those below this folder."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat(follow_symlinks=False)
            found += status.st_size if path.is_file() and status.st_nlink == 1 else 0
    return found


def look_cpu_seconds(output: Path) -> float:
    """The median of five."""
    directories = OutputDirectories(output.parent / "volume", [str(output)])
    known = directories.scan((), {}).files
    spent = []
    for _ in range(5):
        began = time.thread_time()
        directories.scan((), known)
        spent.append(time.thread_time() - began)
    return statistics.median(spent)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirror_costs")
    parser.add_argument("--quick", action="store_true", help="a look at it, and no page")
    parser.add_argument("--interval", type=float, help="seconds between two saves in place")
    arguments = parser.parse_args()
    scenario = QUICK if arguments.quick else FULL
    if arguments.interval is not None:
        scenario = replace(scenario, interval_seconds=arguments.interval)
    with tempfile.TemporaryDirectory(prefix="keepstep-mirror-") as name:
        folder = Path(name)
        with store(folder) as server:
            in_place = rewritten_in_place(folder / "in-place", server, scenario)
            _say(f"in place: {in_place}")
            added = added_one_at_a_time(folder / "added", server, scenario)
            _say(f"added: {added}")
            idle = idle_watch(folder, server, scenario)
            _say(f"idle: {idle}")
        fast = fast_saver(folder / "fast", scenario)
        _say(f"fast: {fast}")
        with ThreadPoolExecutor() as threads:
            killed = [
                threads.submit(age_after_kills, folder / save.__name__, scenario, save)
                for save in (renamed, rewritten, two_files)
            ]
            ages = {
                save.__name__: one.result() for save, one in zip((renamed, rewritten, two_files), killed, strict=True)
            }
        _say(f"ages: {ages}")
    goals = goals_of(added, idle, fast, ages, scenario)
    text = page(in_place, added, idle, fast, ages, scenario, goals)
    print(text)
    if not arguments.quick:
        REPORT.write_text(text)
    return 0 if all(value <= goal for _, value, goal, _ in goals) else 1


def goals_of(
    added: Sequence[Snapshot],
    idle: Idle,
    fast: Fast,
    ages: Mapping[str, Sequence[float]],
    scenario: Scenario,
) -> list[tuple[str, float, float, str]]:
    """(what, measured, goal, unit)"""
    sent = max(one.used.received_bytes for one in added) / _checkpoint_bytes(scenario)
    per_hour = idle.watch_cpu_seconds * 3600 / idle.seconds
    return [
        ("bytes sent for an added checkpoint, the most", sent, SENT_GOAL, "x its own"),
        (f"idle watch of {scenario.files:,} files", per_hour, IDLE_GOAL_SECONDS_PER_HOUR, "CPU s per hour"),
        (
            "held on the volume for a slow store, the most",
            fast.staged_bytes / scenario.fast_bytes,
            STAGED_GOAL,
            "saves",
        ),
        ("age of what is stored when all is lost, the most", max(map(max, ages.values())), AGE_GOAL_SECONDS, "s"),
    ]


def page(
    in_place: Sequence[Snapshot],
    added: Sequence[Snapshot],
    idle: Idle,
    fast: Fast,
    ages: Mapping[str, Sequence[float]],
    scenario: Scenario,
    goals: Sequence[tuple[str, float, float, str]],
) -> str:
    held_bytes = scenario.checkpoints * _checkpoint_bytes(scenario)
    lines = [
        "# What snapshots of an output directory cost",
        "",
        "Made by `make bench` (`benchmarks/mirror_costs.py`); do not edit.",
        "",
        *textwrap.wrap(
            f"{os.cpu_count()} cores ({platform.machine()}, Python {platform.python_version()}). At its end the "
            f"machine had {os.getloadavg()[0]:.1f} processes to run. Bytes and CPU are those of one snapshot, from the "
            "beginning of the write until the commit: the median, and the most in brackets. Pinned: from the end of "
            "the write until the program may write again without an effect on the snapshot. Two of these seconds "
            "are the quiet that the agent waits for.",
            118,
        ),
        "",
        "| scenario | snapshots | written (MB) | store received (MB) | agent read (MB) | agent wrote (MB) | CPU (s) "
        "| pinned after (s) |",
        "|---|---|---|---|---|---|---|---|",
        _row(f"rewritten in place each {scenario.interval_seconds:g} s", in_place, scenario.in_place_bytes),
        _row(f"added to {scenario.checkpoints} others ({_mb(held_bytes)} MB)", added, _checkpoint_bytes(scenario)),
        "",
        "A file is read for its checksums and again to be sent, and what is sent counts as written. What is rewritten",
        "in place is copied first.",
        "",
        f"| idle for {idle.seconds:.0f} s | CPU (s) | CPU s per hour |",
        "|---|---|---|",
        _idle_row(f"beside {scenario.files:,} files", idle.watching_cpu_seconds, idle),
        _idle_row("beside an empty directory", idle.empty_cpu_seconds, idle),
        _idle_row("difference", idle.watch_cpu_seconds, idle),
        "",
        f"One look at {scenario.files:,} files takes {idle.look_cpu_seconds * 1e3:.0f} ms of CPU.",
        "",
        *textwrap.wrap(
            f"A program renames a save of {scenario.fast_bytes / MIB:.0f} MiB each {FAST_INTERVAL_SECONDS:g} s; its "
            f"store takes {SLOW_STORE_SHARE:.0%} of that. Of {fast.saves} saves {fast.snapshots} were stored, and the "
            f"last of them last. Snapshots held at most {_mb(fast.staged_bytes)} MB on the volume besides the newest "
            f"save. The agent said {fast.warnings} times that the store is slow.",
            118,
        ),
        "",
        *textwrap.wrap(
            "Small saves each second, and after 20 to 30 seconds the program and its agent are killed. Since when what "
            "is stored was not the newest any more, in seconds:",
            118,
        ),
        "",
        "| how it saves | kills | age (s) |",
        "|---|---|---|",
        *(f"| {name.replace('_', ' ')} | {len(found)} | {_cell(found, 1)} |" for name, found in ages.items()),
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(
            f"| {what} ≤ {goal:g} {unit} | {value:.3g} {unit} | {'yes' if value <= goal else 'no'} |"
            for what, value, goal, unit in goals
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(what: str, snapshots: Sequence[Snapshot], written_bytes: int) -> str:
    cells = [
        _cell([one.used.received_bytes / 1e6 for one in snapshots], 1),
        _cell([one.used.read_bytes / 1e6 for one in snapshots], 1),
        _cell([one.used.written_bytes / 1e6 for one in snapshots], 1),
        _cell([one.used.cpu_seconds for one in snapshots], 2),
        _cell([one.staged_seconds for one in snapshots], 2),
    ]
    return f"| {what} | {len(snapshots)} | {_mb(written_bytes)} | {' | '.join(cells)} |"


def _cell(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})"


def _idle_row(what: str, cpu_seconds: float, idle: Idle) -> str:
    return f"| {what} | {cpu_seconds:.3f} | {cpu_seconds * 3600 / idle.seconds:.1f} |"


def _checkpoint_bytes(scenario: Scenario) -> int:
    return scenario.checkpoint_bytes // 4 * 4


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
