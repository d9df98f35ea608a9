"""Keepstep's memory while it moves 8 GiB: as it likes, and in a control group that allows it 192 MiB."""

from collections.abc import Callable
from typing import Final

from benchmarks.data_path.goals import Goal
from benchmarks.data_path.keepstep import Keepstep
from benchmarks.data_path.process import ToolError
from benchmarks.data_path.workplace import Workplace
from tests.harness.control_group import NoControlGroup, memory_control_group

ANONYMOUS_GOAL_MIB: Final = 110
LIMIT_BYTES: Final = 192 << 20


def measure_memory(workplace: Workplace, say: Callable[[str], None]) -> tuple[list[str], list[Goal]]:
    """Rows of a table, and the goals."""
    rows, goals = [], []
    keepstep = Keepstep()
    with workplace.job(upload=True, secure=False) as job:
        keepstep.prepare(job)
    for limited in (False, True):
        for upload in (True, False):
            what = f"{'upload' if upload else 'restore'}{', 192 MiB control group' if limited else ''}"
            try:
                anonymous, resident = _measure(workplace, upload=upload, limited=limited)
            except NoControlGroup as reason:
                rows.append(f"| {what} | not measured: {reason} | |")
                continue
            except (ToolError, AssertionError) as failure:
                say(f"{what}: {failure}")
                rows.append(f"| {what} | did not complete | |")
                goals.append(Goal(figure=what, bound="completes", found="did not", met=False))
                continue
            say(f"{what}: {anonymous} MiB anonymous, {resident} MiB resident")
            rows.append(f"| {what} | {anonymous} | {resident} |")
            goals.append(
                Goal(
                    figure=f"peak anonymous memory, {what}",
                    bound=f"≤ {ANONYMOUS_GOAL_MIB} MiB",
                    found=f"{anonymous} MiB",
                    met=anonymous <= ANONYMOUS_GOAL_MIB,
                )
            )
    return rows, goals


def _measure(workplace: Workplace, *, upload: bool, limited: bool) -> tuple[int, int]:
    """(anonymous, resident) MiB at most."""
    with workplace.job(upload=upload, secure=False) as job:
        if limited:
            with memory_control_group(LIMIT_BYTES) as group:
                measurement = Keepstep(group).run(job)
        else:
            measurement = Keepstep().run(job)
    return measurement.peak_anonymous_bytes >> 20, measurement.peak_rss_bytes >> 20
