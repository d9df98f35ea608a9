"""Logs and metrics. Metrics are read off the state when somebody asks, so nothing has to be counted twice.

Invariant: nothing here raises because nobody listens any more, on a closed pipe or a terminal that hung up.
"""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO, cast

import structlog

from mooring_agent.core.model import Phase
from mooring_agent.core.printable import printable
from mooring_agent.core.state import State
from mooring_agent.runtime.status import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client.core import Metric


def configure_logs(log_format: str) -> None:
    """One line per event on stderr: a constant event name and its fields."""
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.JSONRenderer()]
        if log_format == "json"
        else [_without_controls, structlog.dev.ConsoleRenderer(colors=False)]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # The program of a run writes there too: a line and its end in one write, or another's comes in between.
        logger_factory=structlog.WriteLoggerFactory(file=_stderr()),
        cache_logger_on_first_use=False,
    )


def _without_controls(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """For a terminal, which would obey them: names and messages may be anybody's. A traceback keeps its lines."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "\n".join(printable(line) for line in (value.split("\n") if key == "exception" else [value]))
    return event


def say(line: str) -> None:
    """A line for people, on stderr."""
    stderr = _stderr()
    stderr.write(f"{line}\n")
    stderr.flush()


class _UnheardStderr(io.TextIOBase):
    """Stderr as it is now; what cannot be written is lost, and nobody is told: this is where we would say it."""

    def write(self, text: str) -> int:
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()


def _stderr() -> TextIO:
    return cast(TextIO, _UnheardStderr())


class StateCollector:
    """A prometheus collector over the agent's state; names are in docs/metrics.md."""

    def __init__(self, state: "Callable[[], State]", now: "Callable[[], float]") -> None:
        self._state = state
        self._now = now

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._state()
        status = describe(state, self._now())
        gauges = {
            "mooring_recovery_point_age_seconds": (
                "Age of the newest committed checkpoint: what a crash now would cost; -1 when there is none",
                status.recovery_point_age_seconds,
            ),
            "mooring_recovery_point_step": (
                "Step of the newest committed checkpoint; -1 when there is none",
                status.newest_committed.step if status.HasField("newest_committed") else -1,
            ),
            "mooring_backlog_bytes": ("Bytes staged and not yet durable", status.backlog_bytes),
            "mooring_goodput_bytes_per_second": (
                "Upload rate while uploading; 0 when unknown",
                status.goodput_bytes_per_second,
            ),
            "mooring_drain_seconds": ("Seconds the backlog needs at that rate; -1 when unknown", status.drain_seconds),
            "mooring_grace_seconds": ("Configured grace period", state.settings.termination.grace_seconds),
            "mooring_volume_budget_bytes": ("Bytes that may still be written to the volume", status.budget_bytes),
            "mooring_live_ranks": ("Training processes alive in this pod", status.live_ranks),
            "mooring_terminating": ("1 after a termination notice", float(status.terminating)),
            "mooring_upload_window": ("Parts on the wire at most", int(state.window)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        phases = CounterMetricFamily("mooring_checkpoints", "Checkpoints by what became of them", labels=["outcome"])
        for phase in (Phase.COMMITTED, Phase.SHED, Phase.FAILED):
            phases.add_metric([phase.value], state.outcomes.get(phase, 0))
        yield phases
        stored = CounterMetricFamily("mooring_stored_bytes", "Bytes made durable since the agent started")
        stored.add_metric([], state.stored_bytes)
        yield stored
        failures = CounterMetricFamily("mooring_work_failures", "Failed tries by kind of error", labels=["kind"])
        for kind, count in state.failures.items():
            failures.add_metric([kind.value], count)
        yield failures
