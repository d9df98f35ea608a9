"""What a long history costs: `ls`, `restore`, `prune` and the agent's start with few and with many checkpoints.

    python -m benchmarks.history [--quick]

Whole commands against a real S3 server on loopback, started cold, with the time that a command needs to print its own
help beside them. Writes benchmarks/HISTORY.md, unless it is --quick, and exits 1 if a goal is missed. Takes three
minutes.
"""

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.fakes.memory_store import MemoryStore
from tests.harness.agent_process import AgentProcess
from tests.restore.stored_checkpoints import store_checkpoint
from tests.servers.rclone import RcloneServer
from tests.servers.server import ENVIRONMENT

GOALS_SECONDS: Final[Mapping[str, float]] = MappingProxyType({"ls": 1.0, "restore": 1.0, "agent's start": 2.0})
"""Besides the time that a command takes to print its help."""
LINEAR_GOAL: Final = 1.5
"""`prune`: seconds per checkpoint with the longest history, of those with the shortest."""
SIZES: Final = (2_500, 5_000, 10_000)
REPORT: Final = Path(__file__).with_name("HISTORY.md")
_ROUNDS: Final = 3
_LONGEST_SECONDS: Final = 300.0
_KEEP_LAST: Final = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history")
    parser.add_argument("--quick", action="store_true", help="200 and 400 checkpoints, one round, and no page")
    arguments = parser.parse_args()
    sizes, rounds = ((200, 400), 1) if arguments.quick else (SIZES, _ROUNDS)
    with tempfile.TemporaryDirectory(prefix="mooring-history-") as folder:
        found = measure(Path(folder), sizes, rounds=rounds)
    text = page(found)
    print(text)
    if not arguments.quick:
        REPORT.write_text(text)
    return 0 if all(met for _, _, met in goals(found)) else 1


def measure(folder: Path, sizes: Sequence[int], *, rounds: int) -> dict[int, dict[str, float]]:
    """Return the least seconds of each operation, by the number of checkpoints. Each round has every size once."""
    root = folder / "served"
    for count in sizes:
        write_history(root / "bucket" / f"run-{count}", count)
    server = RcloneServer(root)
    server.start()
    seconds: dict[int, dict[str, float]] = {count: {} for count in sizes}
    try:
        for round_number in range(rounds):
            for count in sizes:
                volume = folder / f"volume-{count}-{round_number}"
                for name, work in _operations(f"s3://bucket/run-{count}", server.endpoint_url, volume).items():
                    began_at = time.monotonic()
                    work()
                    took = time.monotonic() - began_at
                    seconds[count][name] = min(seconds[count].get(name, took), took)
    finally:
        server.stop()
    return seconds


def write_history(root: Path, count: int) -> None:
    """Write so many committed checkpoints of one small file into the folder that the server serves as a prefix."""
    store = MemoryStore()

    async def fill() -> None:
        for number in range(1, count + 1):
            await store_checkpoint(store, number * 100, ranks=[{"model.pt": b"model"}])

    asyncio.run(fill())
    for key, stored in store.objects.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored.body)


def _operations(destination: str, endpoint_url: str, volume: Path) -> dict[str, Callable[[], object]]:
    endpoint = f"--endpoint-url={endpoint_url}"

    def mooring(*arguments: str) -> None:
        command = [sys.executable, "-m", "mooring_agent", *arguments]
        environment = {**os.environ, **ENVIRONMENT}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=_LONGEST_SECONDS)

    def start_agent() -> None:
        beside = volume.with_name(f"{volume.name}-agent")
        with AgentProcess(beside, destination, environment=ENVIRONMENT, warm=False, endpoint_url=endpoint_url) as agent:
            agent.terminate()

    return {
        "help": lambda: mooring("--help"),
        "ls": lambda: mooring("ls", destination, endpoint),
        "restore": lambda: mooring("restore", destination, endpoint, "--volume", str(volume)),
        "agent's start": start_agent,
        "prune": lambda: mooring("prune", destination, endpoint, f"--keep-last={_KEEP_LAST}", "--dry-run"),
    }


def goals(found: Mapping[int, Mapping[str, float]]) -> list[tuple[str, str, bool]]:
    """Return each goal, what was measured, and whether it is met."""
    least, most = min(found), max(found)
    rows = []
    for name, goal in GOALS_SECONDS.items():
        took = _beside_help(found[most], name)
        rows.append((f"{name} with {most:,} checkpoints ≤ {goal:g} s", f"{took:.2f} s", took <= goal))
    ratio = (_beside_help(found[most], "prune") / most) / (_beside_help(found[least], "prune") / least)
    rows.append((f"prune: seconds per checkpoint ≤ {LINEAR_GOAL} x", f"{ratio:.2f} x", ratio <= LINEAR_GOAL))
    return rows


def _beside_help(seconds: Mapping[str, float], name: str) -> float:
    return seconds[name] - seconds["help"]


def page(found: Mapping[int, Mapping[str, float]]) -> str:
    names = list(next(iter(found.values())))
    text = (
        f"Seconds that a whole command takes, started cold, the least of {_ROUNDS} rounds ({os.cpu_count()} cores, "
        f"{platform.machine()}; rclone's S3 server on loopback, which looks through the whole folder for every page "
        "that it lists). Each checkpoint has one small file. The goals are for the seconds beyond those that a command "
        f"takes to print its help. `prune` keeps the last {_KEEP_LAST} and is a dry run: it lists every object. At the "
        f"end the machine had {os.getloadavg()[0]:.1f} processes to run."
    )
    lines = [
        "# What a long history costs",
        "",
        "Made by `make bench` (`benchmarks/history.py`); do not edit.",
        "",
        *textwrap.wrap(text, 118),
        "",
        f"| checkpoints | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(f"| {count:,} | {' | '.join(f'{row[name]:.2f}' for name in names)} |" for count, row in found.items()),
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(f"| {goal} | {measured} | {'yes' if met else 'no'} |" for goal, measured, met in goals(found)),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
