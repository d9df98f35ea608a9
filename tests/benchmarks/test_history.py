"""The benchmark of a long history, as small as it can be: every operation works on what it writes."""

from pathlib import Path

import pytest
from benchmarks.history import goals, measure, page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_operation_works_on_the_history_that_is_written(short_directory: Path) -> None:
    found = measure(short_directory, (12, 24), rounds=1)
    restored = short_directory / "volume-24-0" / "checkpoints"
    assert {path.name for path in restored.iterdir()} == {"checkpoint-2400"}
    assert [row[0] for row in goals(found)] == [
        "ls with 24 checkpoints ≤ 1 s",
        "restore with 24 checkpoints ≤ 1 s",
        "agent's start with 24 checkpoints ≤ 2 s",
        "prune: seconds per checkpoint ≤ 1.5 x",
    ]
    assert "| 24 |" in page(found)
