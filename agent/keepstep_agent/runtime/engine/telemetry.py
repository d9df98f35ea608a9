"""What the agent tells of its state: metrics, and lines of the log.

Metrics are read from the state at each scrape, so nothing is counted twice. The checkpoint log has one line for each
event that a person would ask about. Failures and refusals are logged at once, but not at every retry, so that an outage
does not fill the disk.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from keepstep_agent.core.agent import drain
from keepstep_agent.core.agent.events import (
    Announced,
    Committed,
    DurableEvent,
    Event,
    Failed,
    ObjectsLost,
    Shed,
    Staged,
    WorkFailed,
)
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import WorkId
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.runtime.engine.logs import say
from keepstep_agent.runtime.engine.status import describe

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_QUIET_SECONDS: Final = 5.0
_REFUSALS_KEPT: Final = 64

_failure_log = structlog.get_logger("keepstep.dispatcher")


@dataclass(slots=True)
class _Seen:
    logged_at: float
    suppressed: int = 0


class FailureLog:
    """Logs at most one line per kind of error in five seconds; each line counts the failures left out before it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[ErrorKind, _Seen] = {}

    def failed(self, work: WorkId, error: KeepstepError) -> None:
        now = self._monotonic()
        seen = self._seen.get(error.kind)
        if seen is not None and now - seen.logged_at < _QUIET_SECONDS:
            seen.suppressed += 1
            return
        _failure_log.warning(
            "work.failed",
            operation=work.operation.value,
            save=work.save,
            rank=work.rank,
            path=work.path,
            part=work.number,
            kind=error.kind.value,
            error=str(error),
            hint=error.hint,
            suppressed=seen.suppressed if seen is not None else 0,
        )
        self._seen[error.kind] = _Seen(logged_at=now)


class StandstillLog:
    """Logs what does not get on: a checkpoint that is set aside, and a drain that ends unless the store takes more.

    `on_event` is the engine's listener.
    """

    def __init__(self) -> None:
        self._said_of: float | None = None

    def on_event(self, state: State, event: Event) -> None:
        if not isinstance(event, WorkFailed):
            return
        checkpoint = state.checkpoints.get(event.work.save)
        why = checkpoint.set_aside if checkpoint is not None else None
        if checkpoint is not None and why is not None and (why.at, why.work) == (state.now, event.work):
            _failure_log.warning(
                "checkpoint.set_aside",
                checkpoint=str(checkpoint.info),
                save=event.work.save,
                operation=why.work.operation.value,
                path=why.path,
                reason=why.reason,
                action="everything else is stored first, and this is tried again",
            )
        gives_up_at = drain.gives_up_store_at(state)
        if gives_up_at is not None and self._said_of != state.standstill.since:
            self._said_of = state.standstill.since
            left_seconds = max(0.0, gives_up_at - state.now)
            say(f"keepstep: not stored yet: {state.storage_error}; waiting {left_seconds:.0f} s, unless that changes")


class RefusalLog:
    """Logs one line for each refused save, however often its trainer asks."""

    def __init__(self) -> None:
        self._told: deque[tuple[str, int]] = deque(maxlen=_REFUSALS_KEPT)

    def refused(self, attempt: str, step: int, kind: Kind, reason: str) -> None:
        if (attempt, step) in self._told:
            return
        self._told.append((attempt, step))
        _failure_log.warning(
            "save.refused",
            step=step,
            attempt=attempt,
            kind=kind.value,
            reason=reason,
            hint="training goes on without this checkpoint: raise the volume's size or sizeLimit, or save less often",
        )


class StateCollector:
    """A prometheus collector over the agent's state; names are in docs/metrics.md."""

    def __init__(self, state: Callable[[], State], now: Callable[[], float]) -> None:
        self._state = state
        self._now = now

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._state()
        status = describe(state, self._now())
        gauges = {
            "keepstep_recovery_point_age_seconds": (
                "Age of the newest committed checkpoint in seconds; -1 when there is none",
                status.recovery_point_age_seconds,
            ),
            "keepstep_recovery_point_step": (
                "Step of the newest committed checkpoint; -1 when there is none",
                status.newest_committed.step if status.HasField("newest_committed") else -1,
            ),
            "keepstep_recovery_point_objective_seconds": (
                "Oldest that the newest committed checkpoint may get; 0 without an objective",
                status.objective.recovery_point_seconds,
            ),
            "keepstep_recovery_point_reached_seconds": (
                "How old the newest committed checkpoint gets with the saves that the agent asks for; 0 without an "
                "objective",
                status.objective.reached_seconds,
            ),
            "keepstep_save_interval_seconds": (
                "Seconds between two saves that the agent asks for; 0 without an objective",
                status.objective.interval_seconds,
            ),
            "keepstep_trainer_step": (
                "Step that the trainer is at; -1 while it tells none",
                status.progress.step if status.HasField("progress") else -1,
            ),
            "keepstep_step_age_seconds": (
                "Seconds since the trainer's last step, or its last batch of an evaluation; -1 while it tells none",
                status.progress.age_seconds if status.HasField("progress") else -1,
            ),
            "keepstep_steps_per_second": (
                "Steps per second of about the last minute; 0 when unknown",
                status.progress.steps_per_second,
            ),
            "keepstep_trainer_stuck": (
                "1 while there is no step for longer than the setting step_timeout",
                float(status.progress.stuck),
            ),
            "keepstep_events_due": (
                "Commits that receivers of events have still to be told",
                state.untold_news.count,
            ),
            "keepstep_backlog_bytes": ("Bytes that are staged and not yet durable", status.backlog_bytes),
            "keepstep_upload_rate_bytes_per_second": (
                "Upload rate while uploading, in bytes per second; 0 when unknown",
                status.upload_rate_bytes_per_second,
            ),
            "keepstep_drain_seconds": ("Seconds to upload the backlog; -1 when unknown", status.drain_seconds),
            "keepstep_grace_seconds": ("Configured grace period in seconds", state.settings.termination.grace_seconds),
            "keepstep_volume_budget_bytes": ("Bytes that may still be written to the volume", status.budget_bytes),
            "keepstep_live_ranks": ("Training processes alive in this pod", status.live_ranks),
            "keepstep_set_aside": (
                "Pieces of work that are tried again last, because agents died while they were under way",
                len(status.set_aside),
            ),
            "keepstep_terminating": ("1 after a termination notice", float(status.terminating)),
            "keepstep_upload_window": ("Maximum number of parts transferred at the same time", int(state.window)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        phases = CounterMetricFamily("keepstep_checkpoints", "Checkpoints, by how they ended", labels=["outcome"])
        for phase in (Phase.COMMITTED, Phase.SHED, Phase.FAILED):
            phases.add_metric([phase.value], state.outcomes.get(phase, 0))
        yield phases
        stored = CounterMetricFamily("keepstep_stored_bytes", "Bytes made durable since the agent started")
        stored.add_metric([], state.stored_bytes)
        yield stored
        failures = CounterMetricFamily("keepstep_work_failures", "Failed work, by kind of error", labels=["kind"])
        for kind, count in state.failures.items():
            failures.add_metric([kind.value], count)
        yield failures


log = structlog.get_logger("keepstep.checkpoint")


def log_event(state: State, event: DurableEvent) -> None:
    """Log an event of a checkpoint's life, if a person would ask about it. `state` is the state after the event."""
    match event:
        case Announced():
            info = event.info
            log.info(
                "checkpoint.announced",
                name=info.name,
                step=info.step,
                save=info.save,
                kind=info.kind.value,
                rank=event.rank,
                world_size=info.world_size,
            )
        case Staged():
            size_bytes = sum(file.size_bytes for file in event.files)
            log.info(
                "checkpoint.staged",
                save=event.work.save,
                rank=event.work.rank,
                files=len(event.files),
                size_bytes=size_bytes,
                copied=sum(file.private for file in event.files),
            )
        case Committed():
            checkpoint = state.checkpoints[event.work.save]
            log.info(
                "checkpoint.committed",
                name=checkpoint.info.name,
                step=checkpoint.info.step,
                save=event.work.save,
                size_bytes=checkpoint.size_bytes,
                seconds=round(event.at - checkpoint.announced_at, 3),
            )
        case ObjectsLost():
            log.warning("checkpoint.objects_lost", save=event.work.save, files=len(event.files))
        case Shed():
            log.warning("checkpoint.shed", save=event.save, step=_step(state, event.save), reason=event.reason)
        case Failed():
            log.error(
                "checkpoint.failed",
                save=event.save,
                step=_step(state, event.save),
                kind=event.kind.value,
                reason=event.reason,
                hint=event.hint,
            )
        case _:
            # Parts, uploads and pins: too many to log, and the journal has them.
            return


def _step(state: State, save: str) -> int | None:
    checkpoint = state.checkpoints.get(save)
    return checkpoint.info.step if checkpoint else None
