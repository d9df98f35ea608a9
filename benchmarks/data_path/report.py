"""The page `RESULTS.md`: tables, goals, and what was measured on what."""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from mmap import MAP_ANONYMOUS, MAP_POPULATE, MAP_PRIVATE, mmap
from statistics import median
from typing import Final

from benchmarks.data_path.comparison import Result, measured
from benchmarks.data_path.goals import Goal

_PROBE_BYTES: Final = 1 << 30
_REASONS: Final = "../docs/design/0009-the-data-path.md#goals-that-are-missed"


@dataclass(slots=True, kw_only=True)
class Report:
    """Sections in the order in which they were measured."""

    lines: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def section(self, title: str, *lines: str) -> None:
        self.lines += ["", f"## {title}", "", *lines]

    def comparison(self, title: str, results: Sequence[Result], *, files: int = 0) -> None:
        """With `files`, files per second stand in the place of GB/s."""
        rows = sorted(measured(results), key=lambda row: row.cost)
        speed = "files/s" if files else "GB/s"
        self.section(
            title,
            f"| tool | version | rounds | check sent | CPU s/GB | its spread | main thread's | {speed} | its spread "
            "| anonymous MiB | RSS MiB | start-up s (CPU s) | requests | MB on the wire |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(_row(row, files) for row in rows),
        )
        self.failures += [f"{title}: {row.tool}: {row.failure.splitlines()[0]}" for row in results if row.failure]

    def beside(self, mode: str, ours: Result, theirs: Result) -> None:
        """Ratios of ours to those of another checkout: the median, the least and the most of the rounds."""
        ways: Mapping[str, list[tuple[float, float]]] = {
            "CPU s/GB of the event loop's thread": _pairs(ours.main_thread_costs, theirs.main_thread_costs),
            "CPU s/GB": _pairs(ours.costs, theirs.costs),
            "GB/s": _pairs(ours.rates, theirs.rates),
            "peak RSS": _pairs(*(row.figures(lambda one: one.peak_rss_bytes) for row in (ours, theirs))),
            "peak anonymous memory": _pairs(
                *(row.figures(lambda one: one.peak_anonymous_bytes) for row in (ours, theirs))
            ),
        }
        rows = []
        for figure, pairs in ways.items():
            ratios = [one / other for one, other in pairs]
            rows.append(f"| {figure} | {median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |")
        title = f"{mode}: {ours.tool} / {theirs.tool}"
        self.section(title, "| figure | median of the ratios of rounds | spread |", "|---|---|---|", *rows)

    def series(self, title: str, unit: str, results: Mapping[int, Sequence[Result]]) -> None:
        names = sorted({row.tool for rows in results.values() for row in rows})
        self.section(title, f"| {unit} | " + " | ".join(f"{name}: CPU s/GB, GB/s" for name in names) + " |",
                     "|---" * (len(names) + 1) + "|")  # fmt: skip
        for amount, rows in results.items():
            by_name = {row.tool: f"{row.cost:.2f}, {row.rate:.2f}" for row in rows}
            self.lines.append(f"| {amount:,} | " + " | ".join(by_name.get(name, "-") for name in names) + " |")

    def text(self, heading: Sequence[str]) -> str:
        goals = [
            "## Goals",
            "",
            "| figure of Keepstep | goal | found | met |",
            "|---|---|---|---|",
            *(
                f"| {goal.figure} | {goal.bound} | {goal.found} | {'yes' if goal.met else '**no**'} |"
                for goal in self.goals
            ),
        ]
        if not all(goal.met for goal in self.goals):
            goals += ["", f"Where the CPU goes, and why goals are missed: [the data path]({_REASONS})."]
        failures = ["", "Failed, and so missing above:", "", *(f"- {text}" for text in self.failures)]
        return "\n".join([*heading, "", *goals, *self.lines, *(failures if self.failures else [])]) + "\n"


_METHOD: Final = """\
The store is a C program on the same cores over loopback; it discards uploads and is no bottleneck. It verifies
CRC64NVME of small bodies, which is what Keepstep's probe asks, and believes the checks of large ones: that costs a
client the same. The column of checks is what it saw in the requests. Over TLS all use AES-128-GCM.

CPU is user + system of the tool's process. The clock starts with its first request, and what was spent before is its
start-up (so is what some peers read of a small file before they ask for anything). For Keepstep's agent, which runs
already and has committed the same files before, it starts with the announcement and ends when the checkpoint is
committed. Else it ends with the process, after a download when the file system is synchronised. What the main thread
takes of it is, for Keepstep, what the event loop takes. Keepstep's restore checks every byte by CRC64NVME; no peer
verifies what it downloads in ranges.

Tuned: parts of 32 MiB and 8 connections where a tool can be told (s5cmd, rclone: 4 files x 2), as the C limits have and
Keepstep begins with; else its defaults. boto3, aws and obstore are tuned to send a checksum instead of a signed
payload, or nothing (unchecked)."""


_BESIDE: Final = [
    "# What moving a checkpoint costs the event loop",
    "",
    "Made by `python -m benchmarks.data_path --only keepstep --beside CHECKOUT --output benchmarks`; do not edit. This "
    "code and that of another checkout make the same transfers in the same rounds. The event loop is the main thread "
    "of Keepstep's processes; its CPU time is what the kernel's scheduler counts for that thread.",
]


def heading(*, rounds: int, gibibytes: float, beside: bool = False) -> list[str]:
    """`beside`: of the page that compares with another checkout."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    title = [
        "# What moving a checkpoint costs",
        "",
        "Made by `make bench` (`python -m benchmarks.data_path`); do not edit.",
    ]
    return [
        *(_BESIDE if beside else title),
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime())}; {os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB "
        f"of memory, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}; load after it "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        f"Memory that was free for long costs {_fresh_memory_cost():.2f} CPU s per GB here when it is touched "
        "first, page cache and buffers alike; used a moment ago it costs 0.2 to 0.3. What goes past the page cache "
        "is spared that.",
        "",
        f"{gibibytes:g} GiB in four files, in page cache before an upload; {rounds} rounds, in each of which every "
        "tool makes the transfer once, another one first each time; a peer that is less than half as fast as the "
        "fastest one and more than twice as expensive as the cheapest has two (one with small files). Figures are "
        "medians, spreads the least and the most; ratios of goals are medians of those of each round. "
        "GB are 10^9 bytes.",
        "",
        _METHOD,
    ]


def _row(row: Result, files: int) -> str:
    factor = files / (row.size_bytes / 1e9) if files else 1.0
    digits = 0 if files else 2
    rates = [rate * factor for rate in row.rates]
    counts = row.measurements[-1].counts
    return (
        f"| {row.tool} | {row.version} | {len(row.measurements)} | {row.check or '-'} | {row.cost:.3f} "
        f"| {min(row.costs):.3f} to {max(row.costs):.3f} | {row.main_thread_cost:.3f} | {median(rates):.{digits}f} "
        f"| {min(rates):.{digits}f} to {max(rates):.{digits}f} "
        f"| {_peak(row.figures(lambda one: one.peak_anonymous_bytes))} "
        f"| {_peak(row.figures(lambda one: one.peak_rss_bytes))} "
        f"| {median(row.figures(lambda one: one.start_wall_seconds)):.2f} "
        f"({median(row.figures(lambda one: one.start_cpu_seconds)):.2f}) "
        f"| {counts.requests} | {(counts.bytes_in + counts.bytes_out) / 1e6:.0f} |"
    )


def _pairs(ours: list[float], theirs: list[float]) -> list[tuple[float, float]]:
    """The rounds that both have."""
    return list(zip(ours, theirs, strict=False))


def _peak(sizes_bytes: Sequence[float]) -> str:
    return f"{max(sizes_bytes) / (1 << 20):.0f}"


def _fresh_memory_cost() -> float:
    """CPU seconds per GB of a first touch."""
    began = time.process_time()
    mmap(-1, _PROBE_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE).close()
    return (time.process_time() - began) / (_PROBE_BYTES / 1e9)
