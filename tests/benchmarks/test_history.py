"""The benchmark of a long history, as small as it can be: every operation works on what it writes."""

from pathlib import Path

import pytest
from benchmarks.history import goals, measure, page
from tests.servers.server import ENVIRONMENT

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_every_operation_works_on_the_history_that_is_written(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    histories, wide = measure(short_directory, (12, 24), (2, 3), rounds=1)
    restored = short_directory / "volume-24-0" / "checkpoints"
    assert {path.name for path in restored.iterdir()} == {"checkpoint-2400"}
    assert [row[0] for row in goals(histories, wide)] == [
        "ls with 24 checkpoints ≤ 1 s",
        "restore with 24 checkpoints ≤ 1 s",
        "agent's start with 24 checkpoints ≤ 2 s",
        "retention with 24 checkpoints ≤ 1 s",
        "prune: seconds per checkpoint ≤ 1.5 x",
        "verify --all: seconds per checkpoint ≤ 1.5 x",
        "prune: seconds per pod ≤ 1.5 x",
        "verify --all: seconds per pod ≤ 1.5 x",
    ]
    text = page(histories, wide)
    assert "| 24 |" in text
    assert "| 3 |" in text
