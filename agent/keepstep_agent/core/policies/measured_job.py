"""Takes the numbers that advice on saves needs from a run's ledger, as far as it has them."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final

from keepstep_agent.core.policies.run_history import RunHistory, RunSave

_SAVES_COUNTED: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """As JobNumbers. None: the ledger does not tell it."""

    checkpoint_bytes: int | None
    rate_bytes_per_second: float | None
    stall_seconds: float | None
    write_seconds: float | None
    mtbf_seconds: float | None
    pods: int | None


def measure_job(history: RunHistory) -> MeasuredJob:
    """Return what the last 50 committed checkpoints and all starts tell.

    A failure is a start that ended without a notice and was followed by another one: those with a notice lose nothing.
    """
    committed = [save for save in history.saves if save.committed_at is not None and not save.is_snapshot]
    saves = committed[-_SAVES_COUNTED:]
    pods = history.starts[-1].pods if history.starts else None
    failures = sum(not start.noticed_at for start in history.starts[:-1])
    trained_seconds = sum(span.until - span.since for start in history.starts for span in start.trained)
    return MeasuredJob(
        checkpoint_bytes=max((save.size_bytes for save in saves), default=0) or None,
        rate_bytes_per_second=_median(_rates(saves, pods or 1)),
        stall_seconds=_median(save.stall.until - save.stall.since for save in saves if save.stall),
        write_seconds=_median(save.announced_at - save.begun_at for save in saves if save.begun_at is not None),
        mtbf_seconds=trained_seconds / failures if failures and trained_seconds else None,
        pods=pods,
    )


def _rates(saves: Iterable[RunSave], pods: int) -> Iterable[float]:
    # From the announcement to the commit, which is longer than the upload alone.
    return (save.size_bytes / pods / save.upload_seconds for save in saves if save.upload_seconds and save.size_bytes)


def _median(numbers: Iterable[float]) -> float | None:
    found = list(numbers)
    return median(found) if found else None
