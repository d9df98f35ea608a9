"""A run's starts and saves, put together from what its agents have noted. Tolerates holes: a killed agent loses some.

An agent that was started again beside living ranks continues the same start of its pod. Pods belong to one start of the
job if they have the same attempt, their times overlap, and no two have the same place. A pod without a place may be
the replacement of one that still drains, so it joins no start whose ranks have trained before it began; if it has no
attempt either, it is a start of its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from keepstep_agent.core.model import Kind
from keepstep_agent.core.stored.ledger import (
    AgentEnded,
    AgentLife,
    AgentStarted,
    Alive,
    LedgerEntry,
    Noticed,
    RanksChanged,
    Resumed,
    SaveCommitted,
    Saved,
    joined_lives,
)

_STARTS_COMPARED: Final = 64
"""A pod is compared with so many of the latest starts: more of one run never overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of time, in unix seconds."""

    since: float
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSave:
    """A save, as all agents together have seen it. `stall`: when it held up training, on the pod where it took longest.

    `announced_at` is when the last pod had announced it, `committed_at` when the first knew of the commit. `units` is
    what the program had counted by then. `output`: as in the ledger's `Saved`.
    """

    save: str
    step: int
    output: str
    kind: str
    begun_at: float | None
    announced_at: float
    stall: Span | None
    committed_at: float | None
    size_bytes: int
    upload_seconds: float
    units: Mapping[str, float]

    @property
    def is_snapshot(self) -> bool:
        return self.kind == Kind.SNAPSHOT

    @property
    def taken_at(self) -> float:
        """When the state in it was that of the training: when the save began, as far as known."""
        return self.announced_at if self.begun_at is None else self.begun_at


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """One start of the run on all its pods. `trained`: when ranks were alive, in order, from when all pods had some.

    `resumed_step` and `resumed_save` count if `resumed` is `save`. `notice` is the source of the first notice.
    """

    attempt: str
    pods: int
    began_at: float
    restored_at: float
    ended_at: float
    ended: bool
    trained: tuple[Span, ...]
    resumed: Resumed
    resumed_step: int
    resumed_save: str
    noticed_at: tuple[float, ...]
    notice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """`starts` by begin, `saves` by announcement, `steps` as (moment, step) whenever an agent heard of one."""

    starts: tuple[JobStart, ...]
    saves: tuple[RunSave, ...]
    steps: tuple[tuple[float, int], ...]

    def resumed_save(self, start: JobStart) -> RunSave | None:
        """Return the save that a start resumed from; None if the ledger does not have it.

        If the start does not tell it, that is the newest that was committed before, of the last output directory.
        """
        if start.resumed is Resumed.NOTHING:
            return None
        if start.resumed is Resumed.SAVE:
            named = [save for save in self.saves if save.save == start.resumed_save] or [
                # Another agent of the run announced it, and was killed before it wrote that down.
                save
                for save in self.saves
                if save.step == start.resumed_step and save.announced_at <= start.began_at and not save.is_snapshot
            ]
        else:
            named = [
                save for save in self.saves if save.committed_at is not None and save.committed_at <= start.began_at
            ]
        return newest_save(named)


def newest_save(saves: Iterable[RunSave]) -> RunSave | None:
    """Return the save of the highest step, in the output directory that was saved to last; None if there is none."""
    found = tuple(saves)
    last = max(found, key=lambda save: save.announced_at, default=None)
    of_last = [save for save in found if last and save.output == last.output]
    return max(of_last, key=lambda save: (save.step, save.announced_at), default=None)


def run_history(lives: Iterable[AgentLife]) -> RunHistory:
    """Put together what the agents of one run have noted, in any order, and some of it twice."""
    known = [life for life in joined_lives(lives) if life.entries]
    by_pod: dict[str, list[AgentLife]] = defaultdict(list)
    for life in known:
        started = next((entry.start for entry in life.entries if isinstance(entry, AgentStarted)), life.agent)
        by_pod[started].append(life)
    pods = sorted((_pod_start(pod) for pod in by_pod.values()), key=lambda pod: pod.began_at)
    entries = [entry for life in known for entry in life.entries]
    heard = (Saved, Alive)
    return RunHistory(
        starts=tuple(_job_start(group) for group in _grouped(pods)),
        saves=_saves(known),
        steps=tuple(
            (entry.at, entry.step)
            for entry in entries
            if isinstance(entry, heard) and entry.step and getattr(entry, "save_kind", "") != Kind.SNAPSHOT
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PodStart:
    """One start of one pod."""

    attempt: str
    place: str
    began_at: float
    restored_at: float
    ended_at: float
    ended: bool
    trained: tuple[Span, ...]
    started: AgentStarted | None
    notices: tuple[Noticed, ...]


def _pod_start(lives: Sequence[AgentLife]) -> _PodStart:
    entries = sorted((entry for life in lives for entry in life.entries), key=lambda entry: (entry.at, entry.number))
    started = next((entry for entry in entries if isinstance(entry, AgentStarted)), None)
    first_at, last_at = entries[0].at, entries[-1].at
    restored_at = started.at if started else first_at
    began_at = first_at
    if started and started.restore_began_at is not None and started.restored_at is not None:
        began_at = min(first_at, started.restore_began_at)
        restored_at = min(max(began_at, started.restored_at), started.at)
    spans = _alive_spans(entries)
    if not spans and any(isinstance(entry, Saved) for entry in entries):
        # A program without Keepstep's client: nobody sees its processes.
        spans = (Span(since=restored_at, until=last_at),)
    return _PodStart(
        attempt=lives[0].attempt,
        place=lives[0].place,
        began_at=began_at,
        restored_at=restored_at,
        ended_at=last_at,
        ended=isinstance(entries[-1], AgentEnded),
        trained=spans,
        started=started,
        notices=tuple(entry for entry in entries if isinstance(entry, Noticed)),
    )


def _alive_spans(entries: Sequence[LedgerEntry]) -> tuple[Span, ...]:
    """Return when ranks were alive. If an agent follows a killed one, the first look tells whether they still are."""
    spans: list[Span] = []
    since: float | None = None
    unsure_until: float | None = None
    last_at = entries[0].at
    for entry in entries:
        match entry:
            case AgentStarted() if since is not None:
                unsure_until = last_at
            case RanksChanged(ranks=0) | AgentEnded() if since is not None:
                spans.append(Span(since=since, until=entry.at if unsure_until is None else unsure_until))
                since = unsure_until = None
            case RanksChanged() | Alive() if entry.ranks:
                since = entry.at if since is None else since
                unsure_until = None
            case _:
                pass
        last_at = entry.at
    if since is not None:
        spans.append(Span(since=since, until=last_at if unsure_until is None else unsure_until))
    return tuple(spans)


def _grouped(pods: Sequence[_PodStart]) -> list[list[_PodStart]]:
    groups: list[list[_PodStart]] = []
    for pod in pods:
        fitting = (group for group in reversed(groups[-_STARTS_COMPARED:]) if _belongs(pod, group))
        group = next(fitting, None)
        if group is None:
            groups.append([pod])
        else:
            group.append(pod)
    return groups


def _belongs(pod: _PodStart, group: Sequence[_PodStart]) -> bool:
    if group[0].attempt != pod.attempt or pod.began_at > max(one.ended_at for one in group):
        return False
    if pod.place:
        return all(one.place != pod.place for one in group)
    trained_at = min((span.since for one in group for span in one.trained), default=pod.began_at)
    return bool(pod.attempt) and pod.began_at <= trained_at


def _job_start(pods: Sequence[_PodStart]) -> JobStart:
    notices = sorted((notice for pod in pods for notice in pod.notices), key=lambda notice: notice.at)
    told = [pod.started for pod in pods if pod.started and pod.started.resumed is not Resumed.UNKNOWN]
    # A pod that could not tell may have had its agent killed before.
    chosen = max(told, key=lambda one: (one.resumed is Resumed.SAVE, -one.step), default=None)
    return JobStart(
        attempt=pods[0].attempt,
        pods=len(pods),
        began_at=min(pod.began_at for pod in pods),
        restored_at=max(pod.restored_at for pod in pods),
        ended_at=max(pod.ended_at for pod in pods),
        ended=all(pod.ended for pod in pods),
        trained=_trained_together(pods),
        resumed=chosen.resumed if chosen else Resumed.UNKNOWN,
        resumed_step=chosen.step if chosen else 0,
        resumed_save=chosen.save if chosen else "",
        noticed_at=tuple(notice.at for notice in notices),
        notice=notices[0].source if notices else "",
    )


def _trained_together(pods: Sequence[_PodStart]) -> tuple[Span, ...]:
    """Return when ranks of any pod were alive, from the moment when those of the last pod came."""
    began_at = max((pod.trained[0].since for pod in pods if pod.trained), default=0.0)
    joined: list[Span] = []
    for span in sorted((span for pod in pods for span in pod.trained), key=lambda span: span.since):
        since = max(span.since, began_at)
        if joined and since <= joined[-1].until:
            joined[-1] = Span(since=joined[-1].since, until=max(joined[-1].until, span.until))
        elif span.until > since:
            joined.append(Span(since=since, until=span.until))
    return tuple(joined)


def _saves(lives: Sequence[AgentLife]) -> tuple[RunSave, ...]:
    saved: dict[str, list[Saved]] = defaultdict(list)
    committed: dict[str, list[SaveCommitted]] = defaultdict(list)
    for life in lives:
        for entry in life.entries:
            match entry:
                case Saved():
                    saved[entry.save].append(entry)
                case SaveCommitted():
                    committed[entry.save].append(entry)
                case _:
                    pass
    found = [_run_save(entries, committed.get(save, ())) for save, entries in saved.items()]
    return tuple(sorted(found, key=lambda one: (one.announced_at, one.save)))


def _run_save(saved: Sequence[Saved], committed: Sequence[SaveCommitted]) -> RunSave:
    begun = [entry.begun_at for entry in saved if entry.begun_at is not None]
    stalls = [span for entry in saved if (span := _stall(entry))]
    return RunSave(
        save=saved[0].save,
        step=saved[0].step,
        output=saved[0].output,
        kind=saved[0].save_kind,
        begun_at=min(begun, default=None),
        announced_at=max(entry.at for entry in saved),
        stall=max(stalls, key=lambda span: span.until - span.since, default=None),
        committed_at=min((entry.at for entry in committed), default=None),
        size_bytes=sum(entry.size_bytes for entry in committed),
        upload_seconds=max((entry.upload_seconds for entry in committed), default=0.0),
        # Every rank counts for the whole job.
        units={name: done for entry in saved for name, done in entry.units.items()},
    )


def _stall(entry: Saved) -> Span | None:
    """Return when a save held up training: as long as the client measured, else from its begin to its announcement."""
    if entry.stall_seconds is not None:
        since = entry.begun_at if entry.begun_at is not None else entry.at - entry.stall_seconds
        return Span(since=since, until=since + entry.stall_seconds)
    return None if entry.begun_at is None else Span(since=entry.begun_at, until=max(entry.begun_at, entry.at))
