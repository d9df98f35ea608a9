"""What a long history costs, and what a checkpoint of many pods does: each operation with few and with many of them.

    python -m benchmarks.history [--quick]

Whole commands against a real S3 server on loopback, started cold, with the time that a command needs to print its own
help beside them; and the agent's retention after a commit, without a process of its own. Writes benchmarks/HISTORY.md,
unless it is --quick, and exits 1 if a goal is missed. Takes a quarter of an hour, most of it for `verify --all`.
"""

import argparse
import asyncio
import itertools
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

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.catalog.markers import list_down_to
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.core.policies.retention.horizon import horizon_of
from keepstep_agent.core.settings.values import RetentionSettings, StoreSettings

GOALS_SECONDS: Final[Mapping[str, float]] = MappingProxyType(
    {"ls": 1.0, "restore": 1.0, "agent's start": 2.0, "retention": 1.0}
)
"""Besides the time that a command takes to print its help."""
LINEAR: Final = ("prune", "verify --all")
LINEAR_GOAL: Final = 1.5
"""Seconds per checkpoint, or per pod, with the most of them, of those with the least."""
SIZES: Final = (2_500, 10_000)
PODS: Final = (250, 1_000)
REPORT: Final = Path(__file__).with_name("HISTORY.md")
_ROUNDS: Final = 3
_LONGEST_SECONDS: Final = 1_200.0
_KEEP_LAST: Final = 10
_EVERY_STEPS: Final = 100
"""Every checkpoint of the history has a step that is a multiple of it."""
_CHECKPOINTS_OF_PODS: Final = 3

Seconds = dict[int, dict[str, float]]
"""Of each operation, by the number of checkpoints or pods."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history")
    parser.add_argument("--quick", action="store_true", help="few checkpoints and pods, one round, and no page")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    sizes, pods, rounds = ((200, 400), (10, 20), 1) if arguments.quick else (SIZES, PODS, _ROUNDS)
    with tempfile.TemporaryDirectory(prefix="keepstep-history-") as folder:
        histories, wide = measure(Path(folder), sizes, pods, rounds=rounds)
    text = page(histories, wide)
    print(text)
    if not arguments.quick:
        REPORT.write_text(text)
    return 0 if all(met for _, _, met in goals(histories, wide)) else 1


def measure(folder: Path, sizes: Sequence[int], pods: Sequence[int], *, rounds: int) -> tuple[Seconds, Seconds]:
    """Return the least seconds of each operation. Each round has every size once.

    `sizes` are numbers of checkpoints, and `pods` numbers of pods that each wrote a part of three checkpoints.
    """
    root = folder / "served"
    for count in sizes:
        write_history(root / "bucket" / f"run-{count}", count)
    for count in pods:
        write_history(root / "bucket" / f"pods-{count}", _CHECKPOINTS_OF_PODS, pods=count)
    server = RcloneServer(root)
    server.start()
    histories: Seconds = {count: {} for count in sizes}
    wide: Seconds = {count: {} for count in pods}
    try:
        retentions = {count: Retention(f"s3://bucket/run-{count}", server.endpoint_url, count) for count in sizes}
        for round_number in range(rounds):
            for count in sizes:
                volume = folder / f"volume-{count}-{round_number}"
                operations = _operations(f"s3://bucket/run-{count}", server.endpoint_url, volume)
                operations["retention"] = retentions[count].after_a_commit
                if round_number:
                    # It takes minutes.
                    del operations["verify --all"]
                _measure(operations, histories[count])
            for count in pods:
                operations = _operations(f"s3://bucket/pods-{count}", server.endpoint_url, folder)
                _measure({name: operations[name] for name in ("help", "ls", *LINEAR)}, wide[count])
    finally:
        server.stop()
    return histories, wide


def _measure(operations: Mapping[str, Callable[[], float]], found: dict[str, float]) -> None:
    for name, work in operations.items():
        took = work()
        found[name] = min(found.get(name, took), took)


def write_history(root: Path, count: int, *, pods: int = 1) -> None:
    """Write committed checkpoints of one small file of each pod into the folder that the server serves as a prefix."""
    store = MemoryStore()

    async def fill() -> None:
        for number in range(1, count + 1):
            ranks = [{f"model-{pod}.pt": b"model"} for pod in range(pods)]
            await store_checkpoint(store, number * _EVERY_STEPS, ranks=ranks)

    asyncio.run(fill())
    for key, stored in store.objects.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored.body)


class Retention:
    """The agent's retention over a history of `count` checkpoints, all of which stay.

    Those committed here do not: one of them goes after each commit, once there are too many.
    """

    def __init__(self, destination: str, endpoint_url: str, count: int) -> None:
        self._store_settings = StoreSettings(destination=destination, endpoint_url=endpoint_url)
        self._settings = RetentionSettings(keep_last=_KEEP_LAST, keep_every_steps=_EVERY_STEPS)
        self._steps = itertools.count(count * _EVERY_STEPS + 1)
        self._before = _KEEP_LAST

    def after_a_commit(self) -> float:
        return asyncio.run(self._after_a_commit())

    async def _after_a_commit(self) -> float:
        async with open_store(self._store_settings) as store:
            horizon = horizon_of(await list_down_to(store, 0), self._settings)
            for _ in range(self._before + 1):
                info = await store_checkpoint(store, next(self._steps), ranks=[{"model.pt": b"model"}])
            self._before = 0
            began_at = time.monotonic()
            report = await prune_recent(store, self._settings, horizon, series={""}, now=time.time(), known={info.save})
            took = time.monotonic() - began_at
        assert report is not None
        assert len(report.plan.deletions) == 1, report.plan
        return took


def _operations(destination: str, endpoint_url: str, volume: Path) -> dict[str, Callable[[], float]]:
    endpoint = f"--endpoint-url={endpoint_url}"

    def keepstep(*arguments: str) -> float:
        command = [sys.executable, "-m", "keepstep_agent", *arguments]
        began_at = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST_SECONDS)
        return time.monotonic() - began_at

    def start_agent() -> float:
        beside = volume.with_name(f"{volume.name}-agent")
        began_at = time.monotonic()
        with AgentProcess(beside, destination, environment=ENVIRONMENT, warm=False, endpoint_url=endpoint_url) as agent:
            agent.terminate()
        return time.monotonic() - began_at

    return {
        "help": lambda: keepstep("--help"),
        "ls": lambda: keepstep("ls", destination, endpoint),
        "restore": lambda: keepstep("restore", destination, endpoint, "--volume", str(volume)),
        "agent's start": start_agent,
        "prune": lambda: keepstep("prune", destination, endpoint, "--keep-last=1", "--dry-run"),
        "verify --all": lambda: keepstep("verify", "--all", destination, endpoint),
    }


def goals(histories: Seconds, wide: Seconds) -> list[tuple[str, str, bool]]:
    """Return each goal, what was measured, and whether it is met."""
    most = max(histories)
    rows = []
    for name, goal in GOALS_SECONDS.items():
        took = _beside_help(histories[most], name)
        rows.append((f"{name} with {most:,} checkpoints ≤ {goal:g} s", f"{took:.2f} s", took <= goal))
    for what, found in (("checkpoint", histories), ("pod", wide)):
        least, most = min(found), max(found)
        for name in LINEAR:
            ratio = (_beside_help(found[most], name) / most) / (_beside_help(found[least], name) / least)
            rows.append((f"{name}: seconds per {what} ≤ {LINEAR_GOAL} x", f"{ratio:.2f} x", ratio <= LINEAR_GOAL))
    return rows


def _beside_help(seconds: Mapping[str, float], name: str) -> float:
    # The agent's retention has no command.
    return seconds[name] - (seconds["help"] if name != "retention" else 0.0)


def page(histories: Seconds, wide: Seconds) -> str:
    about = (
        f"Seconds that a whole command takes, started cold, the least of {_ROUNDS} rounds ({os.cpu_count()} cores, "
        f"{platform.machine()}; rclone's S3 server on loopback, which looks through the whole folder for every page "
        "that it lists). Each checkpoint has one small file. The goals are for the seconds beyond those that a command "
        "takes to print its help. `prune` keeps the last one and is a dry run: it lists every object. `verify --all` "
        "reads every object, once. `retention` is what the agent does after a commit, if it keeps every checkpoint "
        f"of the history and the last {_KEEP_LAST} of those that are committed now: it deletes one. At the end the "
        f"machine had {os.getloadavg()[0]:.1f} processes to run."
    )
    about_pods = (
        f"The same with {_CHECKPOINTS_OF_PODS} checkpoints, each of so many pods with one manifest and one small file."
    )
    lines = [
        "# What a long history costs",
        "",
        "Made by `make bench` (`benchmarks/history.py`); do not edit.",
        "",
        *textwrap.wrap(about, 118),
        "",
        *_table("checkpoints", histories),
        "",
        about_pods,
        "",
        *_table("pods", wide),
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(f"| {goal} | {measured} | {'yes' if met else 'no'} |" for goal, measured, met in goals(histories, wide)),
    ]
    return "\n".join(lines) + "\n"


def _table(what: str, found: Seconds) -> list[str]:
    names = list(next(iter(found.values())))
    return [
        f"| {what} | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(f"| {count:,} | {' | '.join(f'{row[name]:.2f}' for name in names)} |" for count, row in found.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
