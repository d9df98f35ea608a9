"""The page and the plot of `benchmarks.just_in_time`, and the goal."""

import os
import platform
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot

GOAL: Final = 1.1
"""Of what the checkpoint's bytes take at the store's rate; and one window on top."""
REPORT: Final = Path(__file__).with_name("JUST_IN_TIME.md")
PLOT: Final = Path(__file__).with_name("just_in_time.png")
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`rate`: of the store, bytes per second; `backlog`: checkpoints announced before the last one."""

    rate: int
    file_bytes: int
    files: int
    backlog: int
    part_bytes: int
    connections: int

    @property
    def checkpoint_bytes(self) -> int:
        return self.files * self.file_bytes

    @property
    def window_bytes(self) -> int:
        return self.connections * self.part_bytes

    @property
    def alone_seconds(self) -> float:
        """What the last checkpoint takes if it has the store for itself from the first moment."""
        return self.checkpoint_bytes / self.rate

    @property
    def goal_seconds(self) -> float:
        return GOAL * self.alone_seconds + self.window_bytes / self.rate


class Store(Protocol):
    """What a contestant needs of it."""

    prefix: str
    endpoint_url: str

    def wait_received(self, size_bytes: int) -> None: ...

    def wait_stored(self, key: str) -> float: ...


@dataclass(slots=True)
class Contestant:
    """`run` gives (when SIGTERM was sent, when the last checkpoint was durable). Keepstep is the first."""

    name: str
    run: Callable[[Scenario, Store, Sequence[Path]], tuple[float, float]]
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def is_met(contestants: list[Contestant], scenario: Scenario) -> bool:
    return contestants[0].median <= scenario.goal_seconds


def page(contestants: list[Contestant], scenario: Scenario, *, rounds: int) -> str:
    rows = [
        f"| {one.name} | {one.median:.2f} | {min(one.seconds):.2f} to {max(one.seconds):.2f} "
        f"| {one.median / scenario.alone_seconds:.2f} |"
        for one in contestants
    ]
    lines = [
        "# From SIGTERM to durable",
        "",
        "Made by `make bench` (`benchmarks/just_in_time.py`); do not edit.",
        "",
        *_what_was_measured(scenario, rounds),
        "",
        "| uploader | SIGTERM to durable (s) | its spread (s) | x its bytes ÷ the store's rate |",
        "|---|---|---|---|",
        *rows,
        "",
        "Durable: the store has the commit marker, which comes after the last file. In Keepstep's time is also what it",
        "takes to announce and pin the checkpoint, and its manifest, a listing and the marker, one after the other.",
        "Its parts carry a CRC64NVME for the store to verify; the other two are boto3 without checksums, and put a",
        "marker after the last file (`benchmarks/plain_uploader.py`). Who takes the newest first, but finishes what",
        "is begun, waits for less than this when the signal comes later: for the rest of what is begun.",
        "",
        "![SIGTERM to durable](just_in_time.png)",
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        f"| ≤ {GOAL} x (bytes ÷ rate) + one window = {scenario.goal_seconds:.2f} s | {contestants[0].median:.2f} s "
        f"| {'yes' if is_met(contestants, scenario) else 'no'} |",
    ]
    return "\n".join(lines) + "\n"


def _what_was_measured(scenario: Scenario, rounds: int) -> list[str]:
    size, backlog = scenario.checkpoint_bytes / _GIB, scenario.backlog * scenario.checkpoint_bytes / _GIB
    text = (
        f"A just-in-time checkpoint of {size:.2f} GiB in {scenario.files} files, behind a backlog of {backlog:.2f} GiB "
        f"in {scenario.backlog} checkpoints, the first of which has just begun to be sent. The store takes "
        f"{scenario.rate / 1e6:.0f} MB/s in all. Everybody has {scenario.connections} connections and parts of "
        f"{scenario.part_bytes / (1 << 20):.0f} MiB. {rounds} rounds, in each of which all have their turn; "
        f"{os.cpu_count()} cores ({platform.machine()}), and at the end {os.getloadavg()[1]:.1f} processes to run."
    )
    return textwrap.wrap(text, 118)


def plot(contestants: list[Contestant], scenario: Scenario) -> None:
    figure, axes = pyplot.subplots(figsize=(9, 3), layout="constrained")
    shown = contestants[::-1]
    medians = [one.median for one in shown]
    spread: list[Any] = [
        [one.median - min(one.seconds) for one in shown],
        [max(one.seconds) - one.median for one in shown],
    ]
    axes.barh([one.name for one in shown], medians, 0.6, xerr=spread)
    axes.axvline(scenario.alone_seconds, color="black", linestyle=":", label="its bytes ÷ the store's rate")
    axes.axvline(scenario.goal_seconds, color="black", linestyle="--", label="goal")
    axes.set_xlabel("seconds from SIGTERM to durable: median, least and most")
    axes.legend()
    figure.savefig(PLOT, dpi=110)
