"""The plots beside `RESULTS.md`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from benchmarks.data_path.comparison import KEEPSTEP, LIMITS, Result, measured

mpl.use("agg")
from matplotlib import pyplot

_COLOURS = {KEEPSTEP: "tab:blue", LIMITS: "tab:gray"}


def plot_comparison(mode: str, results: Sequence[Result], path: Path) -> None:
    """CPU and throughput side by side, the cheapest on top."""
    rows = sorted(measured(results), key=lambda row: row.cost, reverse=True)
    figure, (costs, rates) = pyplot.subplots(
        1, 2, figsize=(12, 0.36 * len(rows) + 1.4), sharey=True, layout="constrained"
    )
    colours = [_COLOURS.get(row.tool.split(":")[0], "tab:orange") for row in rows]
    labels = [row.tool + (f" ({row.check})" if row.check else "") for row in rows]
    for axes, what, figures in (
        (costs, "CPU seconds per GB (user + system): less is better", [row.costs for row in rows]),
        (rates, "GB per second: more is better", [row.rates for row in rows]),
    ):
        middles = [sorted(values)[len(values) // 2] for values in figures]
        spread = [
            [middle - min(values) for middle, values in zip(middles, figures, strict=True)],
            [max(values) - middle for middle, values in zip(middles, figures, strict=True)],
        ]
        axes.barh(range(len(rows)), middles, color=colours, xerr=spread, ecolor="black", capsize=2)
        axes.set_xlabel(what)
        axes.grid(axis="x", alpha=0.3)
    costs.set_yticks(range(len(rows)), labels)
    figure.suptitle(mode)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_series(unit: str, results: Mapping[int, Sequence[Result]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name in sorted({row.tool for rows in results.values() for row in rows}):
        points = [(amount, row.cost) for amount, rows in results.items() for row in rows if row.tool == name]
        axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == KEEPSTEP else 1.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(unit)
    axes.set_ylabel("CPU seconds per GB")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
