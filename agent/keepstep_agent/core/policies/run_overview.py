"""What a page says of a run: its recovery point, how it stands, what its time went into, its starts and checkpoints.

Computed from what the markers' listing and the ledger say. Either may be missing: then what it alone knows is None or
empty. Nothing here grows with the age of a run: the newest starts and checkpoints are kept, and the sums of all.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from keepstep_agent.core.model import CommitMarker, Kind
from keepstep_agent.core.policies.goodput import GoodputReport, StartReport, report_goodput
from keepstep_agent.core.policies.restore_choice import CommittedSave, last_commit_at, last_line
from keepstep_agent.core.policies.run_history import JobStart, RunHistory, RunSave, run_history
from keepstep_agent.core.stored.ledger import AgentEnded, AgentLife, SaveLost

MOST_STARTS: Final = 100
MOST_CHECKPOINTS: Final = 200
MOST_SPANS: Final = 20
"""How many starts and checkpoints of a run are kept, the newest, and how many spans and notices of a start."""
_RUNNING_SECONDS: Final = 900.0
"""Agents give a sign every five minutes while training processes live: three may be missed."""


class RunStanding(StrEnum):
    """How a run stands. `RUNNING`, `STOPPED` and `FAILED` are what `keepstep du`, without the ledger, calls active."""

    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"
    COMPLETE = "complete"
    ABANDONED = "abandoned"


class CheckpointState(StrEnum):
    """`SHED` and `FAILED` are the ledger's words. `LOST`: nothing tells why it was never committed.

    `DAMAGED`: it is committed, and a restore has found it damaged.
    """

    COMMITTED = "committed"
    PRUNED = "pruned"
    WEIGHTS_ONLY = "weights only"
    DAMAGED = "damaged"
    IN_PROGRESS = "in progress"
    SHED = "shed"
    FAILED = "failed"
    LOST = "lost"


_WHOLE: Final = (CheckpointState.COMMITTED, CheckpointState.DAMAGED)
"""All its objects are there, as far as the listing tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """The newest committed checkpoint that no restore has found damaged.

    `taken_at` is when the state in it was that of the training, as far as known. `step` is None if it is a snapshot, of
    whose steps nobody knows.
    """

    step: int | None
    kind: str
    taken_at: float
    committed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """What became of a run's time, from its whole ledger, in seconds. `step_seconds` as in `GoodputReport`."""

    goodput: float
    wall_seconds: float
    productive_seconds: float
    lost_seconds: Mapping[str, float]
    steps_lost: int
    kept_steps: int
    kept_seconds: float
    step_seconds: float | None
    starts: int
    committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """A run in one row. `recovery` and `time` are None without a committed checkpoint and without a ledger.

    `listed` committed checkpoints are stored; more than these if not `all_listed`. `stored_bytes` are those of the
    announced checkpoints whose size is known, `unsized` is how many others there are: snapshots share objects, so the
    sum of their sizes says nothing. `ended` and `failed` tell of the
    last start. `unread`: how many objects of the ledger could not be read or are too many.
    """

    recovery: RecoveryPoint | None
    time: RunTime | None
    last_sign_at: float | None
    last_commit_at: float | None
    final: bool
    ended: bool
    failed: bool
    listed: int
    all_listed: bool
    stored_bytes: int
    unsized: int
    unread: int = 0

    @property
    def sign_at(self) -> float | None:
        """The last sign of life. A commit is one, which the ledger may not have yet."""
        return max(filter(None, (self.last_sign_at, self.last_commit_at)), default=None)

    def standing(self, now: float, abandoned_after_seconds: float) -> RunStanding:
        if self.final:
            return RunStanding.COMPLETE
        sign_at = self.sign_at or 0.0
        if not self.ended and sign_at >= now - _RUNNING_SECONDS:
            return RunStanding.RUNNING
        # As `keepstep du` counts it.
        if (self.last_commit_at or sign_at) < now - abandoned_after_seconds:
            return RunStanding.ABANDONED
        return RunStanding.FAILED if self.failed else RunStanding.STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRow:
    """One start of a run. `trained` and `noticed_at` have the newest, as (since, until) and moments."""

    attempt: str
    pods: int
    began_at: float
    restored_at: float
    trained: tuple[tuple[float, float], ...]
    ended_at: float
    ended: bool
    noticed_at: tuple[float, ...]
    notice: str
    resumed_step: int | None
    lost_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One checkpoint or snapshot. What nothing tells is empty or None; `reason` says why it was shed or has failed.

    `output`: its output directory, or what stands for one that nothing names; empty: the checkpoint directory.
    """

    save: str
    step: int | None
    output: str
    series: str
    kind: str
    state: CheckpointState
    taken_at: float
    committed_at: float | None
    size_bytes: int | None
    stall_seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """The newest starts by begin, and the newest checkpoints first. `more_…`: how many others the run has."""

    starts: tuple[StartRow, ...]
    more_starts: int
    checkpoints: tuple[CheckpointRow, ...]
    more_checkpoints: int
    units: Mapping[str, float]


def overview_of(
    listed: Sequence[CommittedSave],
    newest: CommitMarker | None,
    lives: Iterable[AgentLife],
    *,
    weights_only: Sequence[CommittedSave] = (),
    damaged: Collection[str] = (),
    all_listed: bool = True,
    unread: int = 0,
) -> tuple[RunOverview, RunDetails]:
    """Compute what a run's pages show.

    `listed` are the committed saves, newest first: announced checkpoints, or snapshots if there are none. `newest` is
    the marker of their `usable_newest`; None if it cannot be read. Of the saves in `weights_only` a prune has left the
    weights.
    """
    known = tuple(lives)
    history = run_history(known)
    if newest is not None:
        listed = [replace(one, saved_at=newest.saved_at) if one.save == newest.info.save else one for one in listed]
    timed = _by_ledger(listed, history)
    report = report_goodput(history) if history.starts else None
    rows = _checkpoint_rows(
        timed, newest, history, known, weights_only=weights_only, damaged=damaged, all_listed=all_listed
    )
    sizes = {row.save: row.size_bytes for row in rows if row.state in _WHOLE and not row.series}
    last = history.starts[-1] if history.starts else None
    overview = RunOverview(
        recovery=_recovery_point(usable_newest(timed, damaged), newest, history),
        time=_time(report) if report else None,
        last_sign_at=max((start.ended_at for start in history.starts), default=None),
        last_commit_at=last_commit_at(timed) if timed else None,
        final=newest is not None and newest.info.kind is Kind.FINAL,
        ended=last is not None and last.ended,
        failed=last is not None and _has_failed(last, known),
        listed=len(listed),
        all_listed=all_listed,
        stored_bytes=sum(sizes.get(one.save) or 0 for one in listed),
        unsized=sum(sizes.get(one.save) is None for one in listed),
        unread=unread,
    )
    starts = _start_rows(history.starts, report.starts if report else (), rows)
    details = RunDetails(
        starts=starts,
        more_starts=len(history.starts) - len(starts),
        checkpoints=rows[:MOST_CHECKPOINTS],
        more_checkpoints=max(0, len(rows) - MOST_CHECKPOINTS),
        units=dict(report.units) if report else {},
    )
    return overview, details


def usable_newest(listed: Iterable[CommittedSave], damaged: Collection[str]) -> CommittedSave | None:
    """Return the newest of saves that are listed newest first, in the output directory that was committed to last.

    Those in `damaged` do not count.
    """
    return next(iter(last_line(one for one in listed if one.save not in damaged)), None)


def _has_failed(start: JobStart, lives: Iterable[AgentLife]) -> bool:
    """Whether an agent of the last start leaves what is not committed, or its program has failed without a notice."""
    ends = [entry for life in lives for entry in life.entries if isinstance(entry, AgentEnded)]
    ends = [end for end in ends if end.at >= start.began_at]
    return any(end.code or (end.program_failed and not start.noticed_at) for end in ends)


def _recovery_point(
    first: CommittedSave | None, newest: CommitMarker | None, history: RunHistory
) -> RecoveryPoint | None:
    if first is None:
        return None
    noted = next((save for save in history.saves if save.save == first.save), None)
    kind = Kind.SNAPSHOT.value if first.series else ""
    taken_at = first.committed_at
    if noted is not None:
        kind, taken_at = noted.kind, noted.taken_at
    elif newest is not None and newest.info.save == first.save:
        kind, taken_at = newest.info.kind.value, newest.saved_at
    return RecoveryPoint(
        step=None if first.series else first.step, kind=kind, taken_at=taken_at, committed_at=first.committed_at
    )


def _by_ledger(listed: Iterable[CommittedSave], history: RunHistory) -> list[CommittedSave]:
    """Return the saves with when they were committed, where the ledger says it: no marker has to be read for it."""
    noted = {save.save: save.committed_at for save in history.saves}
    return [replace(one, saved_at=noted.get(one.save) or one.saved_at) for one in listed]


def _time(report: GoodputReport) -> RunTime:
    return RunTime(
        goodput=report.goodput,
        wall_seconds=report.wall_seconds,
        productive_seconds=report.productive_seconds,
        lost_seconds={cause.value: seconds for cause, seconds in report.lost_seconds.items()},
        steps_lost=report.steps_lost,
        kept_steps=report.kept_steps,
        kept_seconds=report.kept_seconds,
        step_seconds=report.step_seconds,
        starts=len(report.starts),
        committed=report.committed,
    )


def _start_rows(
    starts: Sequence[JobStart], reports: Sequence[StartReport], checkpoints: Sequence[CheckpointRow]
) -> tuple[StartRow, ...]:
    signs = sorted(at for row in checkpoints for at in (row.taken_at, row.committed_at) if at is not None)
    rows = []
    for position in range(max(0, len(starts) - MOST_STARTS), len(starts)):
        start, report = starts[position], reports[position]
        trained = [(span.since, span.until) for span in start.trained[-MOST_SPANS:]]
        ended_at = start.ended_at
        if not start.ended and trained:
            # The markers tell of commits that the ledger does not have yet, or that a killed agent had not written.
            following = starts[position + 1].began_at if position + 1 < len(starts) else float("inf")
            before = bisect_left(signs, following)
            ended_at = max(ended_at, signs[before - 1]) if before else ended_at
            trained[-1] = (trained[-1][0], ended_at)
        rows.append(
            StartRow(
                attempt=start.attempt,
                pods=start.pods,
                began_at=start.began_at,
                restored_at=start.restored_at,
                trained=tuple(trained),
                ended_at=ended_at,
                ended=start.ended,
                noticed_at=start.noticed_at[-MOST_SPANS:],
                notice=start.notice,
                resumed_step=report.resumed_step,
                lost_steps=report.lost_steps,
            )
        )
    return tuple(rows)


def _checkpoint_rows(
    listed: Sequence[CommittedSave],
    newest: CommitMarker | None,
    history: RunHistory,
    lives: Iterable[AgentLife],
    *,
    weights_only: Iterable[CommittedSave],
    damaged: Collection[str],
    all_listed: bool,
) -> tuple[CheckpointRow, ...]:
    lost = {entry.save: entry for life in lives for entry in life.entries if isinstance(entry, SaveLost)}
    noted = {save.save: save for save in history.saves}
    stored = {one.save for one in listed}
    lowest = min((one.step for one in listed), default=0)
    last = history.starts[-1] if history.starts else None
    rows = [
        replace(row, state=CheckpointState.DAMAGED) if row.save in damaged else row
        for row in (_listed_row(one, noted.get(one.save), newest) for one in listed)
    ]
    # A prune that was interrupted has left both markers: then it is whole.
    left = [one for one in weights_only if one.save not in stored]
    rows += [_weights_row(one, noted.get(one.save)) for one in left]
    stored |= {one.save for one in left}
    for save in history.saves:
        if save.save in stored:
            continue
        beyond = not all_listed and save.step <= lowest
        state = _state_of(save, lost.get(save.save), last, beyond=beyond)
        rows.append(
            CheckpointRow(
                save=save.save,
                step=None if save.is_snapshot else save.step,
                output=save.output,
                series="",
                kind=save.kind,
                state=state,
                taken_at=save.taken_at,
                committed_at=save.committed_at,
                size_bytes=save.size_bytes if save.committed_at is not None else None,
                stall_seconds=_stall_seconds(save),
                reason=lost[save.save].reason if save.save in lost else "",
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.taken_at, row.step or 0, row.save), reverse=True))


def _listed_row(one: CommittedSave, noted: RunSave | None, newest: CommitMarker | None) -> CheckpointRow:
    marker = newest if newest and newest.info.save == one.save else None
    kind, size_bytes, taken_at = Kind.SNAPSHOT.value if one.series else "", None, one.committed_at
    output = one.output_key
    if noted is not None:
        kind, taken_at, output = noted.kind, noted.taken_at, noted.output
        size_bytes = noted.size_bytes if noted.committed_at is not None else None
    if marker is not None:
        kind, size_bytes, output = marker.info.kind.value, marker.size_bytes, marker.info.output_directory
        taken_at = marker.saved_at if noted is None else taken_at
    return CheckpointRow(
        save=one.save,
        step=None if one.series else one.step,
        output=output,
        series=one.series,
        kind=kind,
        state=CheckpointState.COMMITTED,
        taken_at=taken_at,
        committed_at=one.committed_at,
        size_bytes=size_bytes,
        stall_seconds=_stall_seconds(noted) if noted else None,
        reason="",
    )


def _weights_row(one: CommittedSave, noted: RunSave | None) -> CheckpointRow:
    row = _listed_row(one, noted, None)
    # What is left is smaller than what was committed, and the marker is younger than the commit.
    committed_at = noted.committed_at if noted else None
    return replace(row, state=CheckpointState.WEIGHTS_ONLY, size_bytes=None, committed_at=committed_at)


def _state_of(save: RunSave, lost: SaveLost | None, last: JobStart | None, *, beyond: bool) -> CheckpointState:
    """Judge a save that the listing does not show. `beyond`: it may just not reach so far down."""
    if save.committed_at is not None:
        return CheckpointState.COMMITTED if beyond else CheckpointState.PRUNED
    if lost is not None:
        return CheckpointState.SHED if lost.outcome == CheckpointState.SHED else CheckpointState.FAILED
    is_of_last = last is not None and not last.ended and save.announced_at >= last.began_at
    return CheckpointState.IN_PROGRESS if is_of_last else CheckpointState.LOST


def _stall_seconds(save: RunSave) -> float | None:
    return save.stall.until - save.stall.since if save.stall else None
