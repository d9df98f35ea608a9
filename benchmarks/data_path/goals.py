"""What the comparison must show, and whether it does.

A ratio is the median of the ratios of each round: what slows the machine down in one round slows both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from benchmarks.data_path.comparison import KEEPSTEP, Result, is_peer, measured

LOOP_COST_GOAL: Final = 0.08
"""CPU seconds per GB. No number of cores brings one agent past the inverse of it, in GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    figure: str
    bound: str
    found: str
    met: bool


def comparison_goals(results: Mapping[str, Sequence[Result]]) -> list[Goal]:
    """Of the modes that were measured, as far as the tools it takes were."""
    goals = []
    limits = {
        "upload-http": (2.5, "limits: C sendfile"),
        "upload-tls": (1.6, "limits: C pread+SSL_write"),
        "download-http": (2.0, "limits: C recv+pwrite"),
        "download-tls": (2.0, "limits: C SSL_read+pwrite"),
    }
    for mode, rows in results.items():
        by_name = {row.tool: row for row in measured(rows)}
        ours = by_name.get(KEEPSTEP)
        if ours is None:
            continue
        factor, name = limits[mode]
        if name in by_name:
            goals.append(_at_most(f"{mode}: CPU s/GB", ours, by_name[name], factor))
        goals.append(_loop_goal(mode, ours))
        others = [row for row in by_name.values() if is_peer(row.tool)]
        rivals = [row for row in others if row.check] if mode.startswith("upload") else others
        if rivals:
            cheapest = min(rivals, key=lambda row: row.cost)
            goals.append(_at_most(f"{mode}: CPU s/GB", ours, cheapest, 0.5 if mode == "upload-http" else 1.0))
        if others:
            fastest = max(others, key=lambda row: row.rate)
            goals.append(at_least(f"{mode}: throughput", ours, fastest))
    return goals


def _loop_goal(mode: str, ours: Result) -> Goal:
    return Goal(
        figure=f"{mode}: CPU s/GB of the event loop's thread",
        bound=f"≤ {LOOP_COST_GOAL:g}",
        found=f"{ours.main_thread_cost:.3f}",
        met=ours.main_thread_cost <= LOOP_COST_GOAL,
    )


def ratio(ours: Result, theirs: Result, of: Callable[[Result], list[float]]) -> float:
    """Of the rounds that both have."""
    return median(one / other for one, other in zip(of(ours), of(theirs), strict=False))


def at_least(figure: str, ours: Result, theirs: Result) -> Goal:
    found = ratio(ours, theirs, lambda row: row.rates)
    return Goal(figure=figure, bound=f"≥ 1.0 x {theirs.tool}", found=f"{found:.2f} x", met=found >= 1.0)


def _at_most(figure: str, ours: Result, theirs: Result, factor: float) -> Goal:
    found = ratio(ours, theirs, lambda row: row.costs)
    return Goal(figure=figure, bound=f"≤ {factor:g} x {theirs.tool}", found=f"{found:.2f} x", met=found <= factor)
