"""docs/metrics.md and the collector tell the same."""

from pathlib import Path

from mooring_agent.config import load_settings
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.state import State
from mooring_agent.runtime.telemetry import StateCollector

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def collected() -> list[tuple[str, str, str, str]]:
    """Name as it is exposed, type, labels and meaning."""
    settings = load_settings(
        flags={"volume": "/volume", "destination": "file:///destination"}, environment={}, file=None
    )
    state = State(settings=settings, failures={ErrorKind.THROTTLED: 1})
    rows = []
    for family in StateCollector(lambda: state, lambda: 0.0).collect():
        (name,) = {sample.name for sample in family.samples}
        labels = sorted({label for sample in family.samples for label in sample.labels})
        rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation))
    return rows


def test_the_page_of_metrics_is_what_the_collector_gives() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `mooring_")]
    written = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert written == collected()
