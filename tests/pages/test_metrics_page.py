"""docs/metrics.md and what the agent and the webhook expose tell the same."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import Metric

from keepstep_agent.config import load_settings
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.injection.admission_review import Outcome
from keepstep_agent.runtime.engine.telemetry import StateCollector
from keepstep_agent.webhook.application import Metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def agents() -> Iterable[Metric]:
    settings = load_settings(
        flags={"volume": "/volume", "destination": "file:///destination"}, environment={}, file=None
    )
    state = State(settings=settings, failures={ErrorKind.THROTTLED: 1})
    return StateCollector(lambda: state, lambda: 0.0).collect()


def webhooks() -> Iterable[Metric]:
    return Metrics(lambda: 0.0).registry.collect()


def rows(families: Iterable[Metric]) -> Iterator[tuple[str, str, str, str]]:
    """Name as it is asked for, type, labels and meaning."""
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        # Of a histogram's buckets.
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        yield f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation


def test_the_page_of_metrics_is_what_is_exposed() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `keepstep_")]
    written = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert written == [*rows(agents()), *rows(webhooks())]


def test_the_page_of_metrics_has_all_that_may_become_of_a_review() -> None:
    text = PAGE.read_text()
    assert [outcome for outcome in Outcome if f"`{outcome}`" not in text] == []
