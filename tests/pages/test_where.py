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
_MOST_LINES = 700


def test_the_page_answers_ten_questions() -> None:
    assert len(ROWS) == 10


@pytest.mark.parametrize(("change", "file", "symbol"), ROWS)
def test_the_file_to_open_first_holds_what_to_look_for(change: str, file: str, symbol: str) -> None:
    assert re.search(rf"^{re.escape(symbol)}\b", (ROOT / file).read_text(), re.MULTILINE), change


def test_modules_can_be_read_at_once_and_folders_at_a_glance() -> None:
    modules = _lines("client/keepstep", "agent/keepstep_agent")
    assert not [path for path, lines in modules.items() if lines > _MOST_LINES]
    assert statistics.median(modules.values()) >= 120, "a concept in one module is more than a few lines"
    assert not [folder for folder, count in Counter(path.parent for path in modules).items() if count > 15]


def test_modules_of_tests_can_be_read_at_once_too() -> None:
    assert not [path for path, lines in _lines("tests").items() if lines > _MOST_LINES]


def _lines(*folders: str) -> dict[Path, int]:
    return {
        path: path.read_text().count("\n")
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py") and "node_modules" not in path.parts
    }
