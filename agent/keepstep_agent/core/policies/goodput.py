"""What became of a run's time, from its ledger: productive time, and what was lost by cause. docs/design/0019.

The time from the first begin to the last end is cut where anything changes, and each piece gets one cause, so the
causes always sum up to the wall time. `run_history` puts the starts and saves together of which the entries tell.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Final

from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.run_history import JobStart, RunHistory, RunSave, Span, newest_save
from keepstep_agent.core.stored.ledger import Resumed


class Cause(StrEnum):
    """Why time was lost."""

    RESTORE = "restore"
    START = "start"
    STALL = "stall"
    REDONE = "redone"
    DRAIN = "drain"
    WAITING = "waiting"


WHY: Final[Mapping[Cause, str]] = {
    Cause.RESTORE: "fetching checkpoints before training",
    Cause.START: "from there until the training processes are there",
    Cause.STALL: "training waited for a save",
    Cause.REDONE: "work after the checkpoint that the next start resumed from",
    Cause.DRAIN: "uploading after training had ended",
    Cause.WAITING: "nothing was running between two starts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """One start of the run. `resumed_step` is None if nothing tells it.

    `lost_steps`: steps of earlier starts that agents had heard of, and that this one does not continue. `ended`: its
    agents have said that they exit. Otherwise it was killed, or it still runs.
    """

    attempt: str
    pods: int
    began_at: float
    ended_at: float
    ended: bool
    notice: str
    resumed_step: int | None
    lost_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """The figures of one run, or of several together. All times are in seconds.

    `steps_lost_known` are steps that agents had heard of, and that were trained again; `steps_lost` also estimates
    those that nobody told them of. `step_seconds` is None if no two saves tell it. `kept_…`: the work that just-in-time
    saves kept. `units`: what the program had counted at the newest committed checkpoint.
    """

    wall_seconds: float
    productive_seconds: float
    lost_seconds: Mapping[Cause, float]
    steps_lost_known: int
    steps_lost: int
    step_seconds: float | None
    kept_steps: int
    kept_seconds: float
    committed: int
    units: Mapping[str, float]
    starts: tuple[StartReport, ...]

    @property
    def goodput(self) -> float:
        """Productive time divided by wall time; 0 if there is none."""
        return self.productive_seconds / self.wall_seconds if self.wall_seconds else 0.0


def report_goodput(history: RunHistory) -> GoodputReport:
    """Calculate the figures of one run."""
    step_seconds = _step_seconds(history)
    lost_since = [_lost_since(history, position) for position in range(len(history.starts))]
    known = [_known_lost_steps(history, *one) if one else 0 for one in lost_since]
    kept = [_kept_by(history, save) for save in history.saves if _kept_work(save)]
    seconds = _sweep(
        [
            *_spans_of_starts(history.starts),
            *((_Paint.STALL, save.stall) for save in history.saves if save.stall),
            *((_Paint.REDONE, one[0]) for one in lost_since if one),
            *((_Paint.REDONE, span) for start in history.starts for span in _lost_in_place(history, start)),
            *((_Paint.KEPT, span) for _, span in kept),
        ]
    )
    lost = {cause: seconds[cause] for cause in Cause}
    committed = [save for save in history.saves if save.committed_at is not None]
    by_time = round(lost[Cause.REDONE] / step_seconds) if step_seconds else 0
    return GoodputReport(
        wall_seconds=seconds["productive"] + sum(lost.values()),
        productive_seconds=seconds["productive"],
        lost_seconds=lost,
        steps_lost_known=sum(known),
        steps_lost=max(sum(known), by_time),
        step_seconds=step_seconds,
        kept_steps=sum(steps for steps, _ in kept),
        kept_seconds=seconds["kept"],
        committed=len(committed),
        units=newest.units if (newest := newest_save(committed)) else {},
        starts=tuple(
            StartReport(
                attempt=start.attempt,
                pods=start.pods,
                began_at=start.began_at,
                ended_at=start.ended_at,
                ended=start.ended,
                notice=start.notice,
                resumed_step={Resumed.SAVE: start.resumed_step, Resumed.NOTHING: 0}.get(start.resumed),
                lost_steps=steps,
            )
            for start, steps in zip(history.starts, known, strict=True)
        ),
    )


def together(reports: Iterable[GoodputReport]) -> GoodputReport:
    """Add up the figures of several runs. Their time counts once for each run that it belongs to."""
    found = tuple(reports)
    return GoodputReport(
        wall_seconds=sum(one.wall_seconds for one in found),
        productive_seconds=sum(one.productive_seconds for one in found),
        lost_seconds={cause: sum(one.lost_seconds[cause] for one in found) for cause in Cause},
        steps_lost_known=sum(one.steps_lost_known for one in found),
        steps_lost=sum(one.steps_lost for one in found),
        step_seconds=None,
        kept_steps=sum(one.kept_steps for one in found),
        kept_seconds=sum(one.kept_seconds for one in found),
        committed=sum(one.committed for one in found),
        units={
            name: sum(one.units.get(name, 0.0) for one in found)
            for name in sorted({name for one in found for name in one.units})
        },
        starts=tuple(start for one in found for start in one.starts),
    )


class _Paint(StrEnum):
    """What a span of time is known to be; several may hold at once."""

    RUN = "run"
    TRAINING = "training"
    RESTORE = "restore"
    START = "start"
    DRAIN = "drain"
    STALL = "stall"
    REDONE = "redone"
    KEPT = "kept"


def _spans_of_starts(starts: Sequence[JobStart]) -> Iterator[tuple[_Paint, Span]]:
    if starts:
        whole = Span(since=starts[0].began_at, until=max(start.ended_at for start in starts))
        yield _Paint.RUN, whole
    for start in starts:
        yield _Paint.RESTORE, Span(since=start.began_at, until=start.restored_at)
        first = start.trained[0].since if start.trained else start.ended_at
        yield _Paint.START, Span(since=start.restored_at, until=first)
        for before, after in pairwise(start.trained):
            yield _Paint.START, Span(since=before.until, until=after.since)
        if start.trained:
            yield _Paint.DRAIN, Span(since=start.trained[-1].until, until=start.ended_at)
        for span in start.trained:
            yield _Paint.TRAINING, span


def _sweep(painted: Iterable[tuple[_Paint, Span]]) -> Mapping[str, float]:
    """Return the seconds of each cause, of productive time, and of what was kept of that."""
    changes = sorted(
        (moment, change, paint)
        for paint, span in painted
        if span.until > span.since
        for moment, change in ((span.since, 1), (span.until, -1))
    )
    seconds: dict[str, float] = defaultdict(float)
    open_spans: Counter[_Paint] = Counter()
    for (moment, change, paint), (following, _, _) in pairwise([*changes, (float("inf"), 0, _Paint.RUN)]):
        open_spans[paint] += change
        if open_spans[_Paint.RUN] and following > moment:
            cause = _cause(open_spans)
            seconds[cause or "productive"] += following - moment
            if cause is None and open_spans[_Paint.KEPT]:
                seconds["kept"] += following - moment
    return seconds


def _cause(painted: Mapping[_Paint, int]) -> Cause | None:
    """Return why a piece of time is lost; None if it is productive."""
    if painted[_Paint.TRAINING]:
        if painted[_Paint.STALL]:
            return Cause.STALL
        return Cause.REDONE if painted[_Paint.REDONE] else None
    # An earlier start may still drain while the next one begins.
    causes = (
        (_Paint.RESTORE, Cause.RESTORE),
        (_Paint.START, Cause.START),
        (_Paint.DRAIN, Cause.DRAIN),
    )
    return next((cause for paint, cause in causes if painted[paint]), Cause.WAITING)


def _lost_since(history: RunHistory, position: int) -> tuple[Span, int] | None:
    """Return the time that this start does not continue, and the step that it resumes from; None if nobody knows."""
    start = history.starts[position]
    if position == 0:
        return None
    if start.resumed is Resumed.NOTHING:
        return Span(since=history.starts[0].began_at, until=start.began_at), 0
    resumed = history.resumed_save(start)
    if resumed is not None:
        return Span(since=resumed.taken_at, until=start.began_at), resumed.step
    since = _since_unknown_save(history, start) if start.resumed is Resumed.SAVE else None
    return None if since is None else (Span(since=since, until=start.began_at), start.resumed_step)


def _since_unknown_save(history: RunHistory, start: JobStart) -> float | None:
    """Return since when work is lost at the latest, if an agent was killed before it wrote down what was resumed from.

    That is since an earlier start resumed from the same save, or since a later step was heard of; None if neither was.
    """
    earlier = (one for one in history.starts if one.began_at < start.began_at)
    same = [one.began_at for one in earlier if one.resumed_save == start.resumed_save]
    later = (at for at, step in history.steps if step > start.resumed_step and at < start.began_at)
    return min(same or later, default=None)


def _lost_in_place(history: RunHistory, start: JobStart) -> Iterator[Span]:
    """Yield what was lost where the ranks ended and came again beside their agents: all since the last save."""
    if len(start.trained) < 2:
        return
    newest_taken_at = list(accumulate((save.taken_at for save in history.saves), max))
    for before, after in pairwise(start.trained):
        announced = bisect_right(history.saves, before.until, key=lambda save: save.announced_at)
        since = newest_taken_at[announced - 1] if announced else before.since
        yield Span(since=since, until=after.since)


def _known_lost_steps(history: RunHistory, lost: Span, resumed_step: int) -> int:
    heard = [step for at, step in history.steps if lost.since <= at < lost.until]
    return max(0, max(heard, default=0) - resumed_step)


def _kept_work(save: RunSave) -> bool:
    return save.kind == Kind.JUST_IN_TIME and save.committed_at is not None


def _kept_by(history: RunHistory, save: RunSave) -> tuple[int, Span]:
    """Return the steps and the time that a just-in-time save kept: since the last commit before the notice.

    That is since the start's ranks came if it resumed from something newer, or if no commit is known.
    """
    start = next((one for one in reversed(history.starts) if one.began_at <= save.announced_at), None)
    moments = [at for at in start.noticed_at if at <= save.announced_at] if start else []
    noticed_at = max(moments, default=save.taken_at)
    before = [
        one
        for one in history.saves
        if one is not save
        and not one.is_snapshot
        and one.committed_at is not None
        and one.committed_at <= noticed_at
        and one.step <= save.step
    ]
    last = max(before, key=lambda one: one.announced_at, default=None)
    resumed = history.resumed_save(start) if start else None
    # Of another training, whose steps say nothing of this one's. A training may have two directories.
    is_of_another = resumed is not None and resumed.output != save.output and resumed.step > save.step
    if last and (start is None or is_of_another or start.resumed_step <= last.step):
        return save.step - last.step, Span(since=last.taken_at, until=save.taken_at)
    if start is None:
        return 0, Span(since=save.taken_at, until=save.taken_at)
    began_step = 0 if is_of_another else start.resumed_step
    if start.resumed is Resumed.UNKNOWN:
        began_step = min((step for at, step in history.steps if at >= start.began_at), default=save.step)
    since = start.trained[0].since if start.trained else start.restored_at
    return max(0, save.step - began_step), Span(since=since, until=save.taken_at)


def _step_seconds(history: RunHistory) -> float | None:
    """Return the seconds of one step, stalls left out, from saves that follow one another without an interruption."""
    outputs: dict[str, list[RunSave]] = defaultdict(list)
    for save in history.saves:
        if not save.is_snapshot:
            outputs[save.output].append(save)
    pairs = sorted(
        (pair for saves in outputs.values() for pair in pairwise(saves)), key=lambda pair: pair[0].announced_at
    )
    spans = sorted((span for start in history.starts for span in start.trained), key=lambda span: span.since)
    steps, seconds, position = 0, 0.0, 0
    for before, after in pairs:
        while position < len(spans) and spans[position].until < before.announced_at:
            position += 1
        uninterrupted = position < len(spans) and spans[position].since <= before.announced_at
        if not uninterrupted or spans[position].until < after.announced_at or after.step <= before.step:
            continue
        # A save that does not hold up training is announced when the next steps are done already.
        stall_seconds = before.stall.until - before.stall.since if before.stall else 0.0
        took_seconds = after.taken_at - before.taken_at - stall_seconds
        if took_seconds > 0:
            steps += after.step - before.step
            seconds += took_seconds
    return seconds / steps if steps else None
