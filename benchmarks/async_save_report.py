"""The page and the plot of `benchmarks.async_save`, and whether the goals are met."""

import os
import platform
import statistics
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import torch

mpl.use("agg")
from matplotlib import pyplot

OURS: Final = "keepstep.torch_loop"
STALL_GOAL: Final = 0.2
"""Of torch.save's stall."""
NOISE: Final = 1.1
"""No slower than the best of torch's own: as far as one run can tell."""
STEP_GOAL_SECONDS: Final = 2e-6
REPORT: Final = Path(__file__).with_name("ASYNC_SAVE.md")
PLOT: Final = Path(__file__).with_name("async_save.png")


@dataclass(slots=True)
class Way:
    """A way to save. `save` returns when training may go on: with a future if something goes on too."""

    name: str
    save: Callable[[Path], "Future[Any] | None"]
    stalls: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def later(self) -> list[float]:
        """Without the first, which makes memory and processes."""
        return self.stalls[1:]

    @property
    def steady(self) -> float:
        return statistics.median(self.later)

    @property
    def rate(self) -> float | None:
        return statistics.median(self.rates) if self.rates else None


def report(ways: list[Way], costs: dict[str, float], *, first_step_seconds: float, rounds: int) -> int:
    """Write the page; 1 if a goal is missed."""
    by_name = {way.name: way for way in ways}
    unit, ours = by_name["torch.save"].steady, by_name[OURS].steady
    best = min(way.steady for way in ways if way.name.startswith("dcp.async_save"))
    goals = [
        (f"stall ≤ {STALL_GOAL} x torch.save", f"{ours / unit:.3f}", ours <= STALL_GOAL * unit),
        (f"stall ≤ {NOISE} x the best of torch's own", f"{ours / best:.2f}", ours <= NOISE * best),
        (
            f"a step without a save ≤ {STEP_GOAL_SECONDS * 1e6:.0f} µs",
            f"{max(costs.values()) * 1e6:.2f} µs",
            max(costs.values()) <= STEP_GOAL_SECONDS,
        ),
    ]
    rows = [
        f"| {way.name} | {way.stalls[0]:.3f} | {way.steady:.3f} | {min(way.later):.3f} to {max(way.later):.3f} "
        f"| {way.steady / unit:.3f} | {_percent(way.rate)} |"
        for way in ways
    ]
    lines = [
        "# What a checkpoint costs training",
        "",
        "Made by `make bench` (`benchmarks/async_save.py`); do not edit.",
        "",
        f"1 GiB of fp32, {os.cpu_count()} cores ({platform.machine()}), no GPU, torch {torch.__version__}.",
        f"{rounds} rounds, in each of which every way saves once, in this order. At the end of them the machine had "
        f"{os.getloadavg()[2]:.1f} processes to run (1 is this one's).",
        "",
        "| way to save | stall, first (s) | stall, later (s) | its spread (s) | later, x torch.save "
        "| training meanwhile |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "Stall: how long the call holds up the training thread; later: the median of all rounds but the first.",
        "Training meanwhile: the speed of small steps while the checkpoint is written, against that without a save.",
        "torch.save and safetensors leave their data to the kernel; the others have it on disk when they are done.",
        "",
        f"{OURS} is the whole call of `TorchLoop.step`: capture of the state, copy, directory, thread. The memory",
        f"of the copy is made in the first step, which takes {first_step_seconds:.2f} s of training once.",
        "",
        "![stall per way to save](async_save.png)",
        "",
        "A step without a save:",
        "",
        "| asked by | µs |",
        "|---|---|",
        *(f"| {name} | {seconds * 1e6:.2f} |" for name, seconds in costs.items()),
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(f"| {goal} | {measured} | {'yes' if met else 'no'} |" for goal, measured, met in goals),
    ]
    REPORT.write_text("\n".join(lines) + "\n")
    print(REPORT.read_text())
    return 0 if all(met for _, _, met in goals) else 1


def plot(ways: list[Way]) -> None:
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    names = [way.name for way in reversed(ways)]
    places = range(len(names))
    steady = [way.steady for way in reversed(ways)]
    spread = [
        [way.steady - min(way.later) for way in reversed(ways)],
        [max(way.later) - way.steady for way in reversed(ways)],
    ]
    axes.barh([place + 0.2 for place in places], [way.stalls[0] for way in reversed(ways)], 0.38, label="first")
    axes.barh([place - 0.2 for place in places], steady, 0.38, xerr=spread, label="later: median, least and most")
    axes.set_yticks(list(places), names)
    axes.set_xlabel("seconds that training waits for a checkpoint of 1 GiB")
    axes.legend()
    figure.savefig(PLOT, dpi=110)


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.0f} %"
