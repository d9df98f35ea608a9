"""How soon the ranks can know of a termination notice that comes while the agent uploads as fast as it can."""

from collections.abc import Callable
from statistics import median
from typing import Final

from benchmarks.data_path.goals import Goal
from benchmarks.data_path.keepstep import Keepstep
from benchmarks.data_path.workplace import Workplace

MEDIAN_GOAL_MS: Final = 50
ROUNDS: Final = 10


def measure_notice(workplace: Workplace, say: Callable[[str], None], rounds: int) -> tuple[list[str], list[Goal]]:
    """Rows of a table, and the goals."""
    rows, goals = [], []
    for secure in (False, True):
        what = "upload-tls" if secure else "upload-http"
        found_ms = []
        figure, bound = f"{what}: ms from a notice to the ranks' signal", f"≤ {MEDIAN_GOAL_MS}"
        try:
            for _ in range(rounds):
                with workplace.job(upload=True, secure=secure) as job:
                    found_ms.append(Keepstep().notice_seconds(job) * 1e3)
                say(f"{what}: the ranks can know after {found_ms[-1]:.1f} ms")
        except AssertionError as failure:
            # What the other sections have measured takes hours, and is kept.
            say(f"{what}: {failure}")
            rows.append(f"| {what} | did not complete | | |")
            goals.append(Goal(figure=figure, bound=bound, found="did not complete", met=False))
            continue
        rows.append(f"| {what} | {len(found_ms)} | {median(found_ms):.0f} | {max(found_ms):.0f} |")
        goals.append(
            Goal(
                figure=figure,
                bound=bound,
                found=f"{median(found_ms):.0f}",
                met=median(found_ms) <= MEDIAN_GOAL_MS,
            )
        )
    return rows, goals
