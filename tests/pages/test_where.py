"""A stranger finds where a change belongs: by docs/contributing/where.md, and because folders and modules are small."""

import re
import statistics
from collections import Counter
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


def test_modules_can_be_read_at_once_and_folders_at_a_glance() -> None:
    modules = {
        path: path.read_text().count("\n")
        for product in ("client/mooring", "agent/mooring_agent")
        for path in (ROOT / product).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert not [path for path, lines in modules.items() if lines > 400]
    assert statistics.median(modules.values()) >= 120, "a concept in one module is more than a few lines"
    assert not [folder for folder, count in Counter(path.parent for path in modules).items() if count > 15]
