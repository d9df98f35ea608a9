"""docs/contributing/where.md sends nobody to a file that is not there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (?P<change>[^|]+) \| `(?P<file>[^`]+)` \| `(?P<symbol>[^`]+)` \|",
    (ROOT / "docs/contributing/where.md").read_text(),
    re.MULTILINE,
)


def test_the_page_answers_ten_questions() -> None:
    assert len(ROWS) == 10


@pytest.mark.parametrize(("change", "file", "symbol"), ROWS)
def test_the_file_to_open_first_holds_what_to_look_for(change: str, file: str, symbol: str) -> None:
    assert re.search(rf"^{re.escape(symbol)}\b", (ROOT / file).read_text(), re.MULTILINE), change
