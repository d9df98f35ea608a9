"""The metrics that agents and webhooks really have, with their labels, by asking the code that exposes them."""

from collections.abc import Iterable
from typing import Final

from prometheus_client import Metric

from keepstep_agent.config import load_settings
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.runtime.engine.telemetry import StateCollector
from keepstep_agent.webhook.application import Metrics

FROM_SCRAPES: Final = {"namespace", "pod", "container", "job", "instance"}
"""Labels that every sample gets."""


def agents_metrics() -> dict[str, dict[str, set[str]]]:
    """By name, the values that each label may have."""
    settings = load_settings(
        flags={"volume": "/volume", "destination": "file:///destination"}, environment={}, file=None
    )
    state = State(settings=settings, failures=dict.fromkeys(ErrorKind, 1))
    return _by_name(StateCollector(lambda: state, lambda: 0.0).collect())


def webhooks_metrics() -> dict[str, dict[str, set[str]]]:
    """The same of the webhook."""
    return _by_name(Metrics(lambda: 0.0).registry.collect())


def _by_name(families: Iterable[Metric]) -> dict[str, dict[str, set[str]]]:
    found: dict[str, dict[str, set[str]]] = {}
    for family in families:
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found
