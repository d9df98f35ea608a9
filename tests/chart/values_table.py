"""The table of values in the chart's README, from values.yaml and the comments in it.

`python -m tests.chart.values_table` writes it into the page.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml
from tests.chart.rendering import CHART

README: Final = CHART / "README.md"
_TABLE: Final = re.compile(
    r"(?<=<!-- values: made by `make pages` from values.yaml -->\n\n).*?(?=\n\n<!-- values -->)", re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One that people set: its path, its default as YAML has it, and the comment above it."""

    path: str
    default: Any
    meaning: str


def values() -> Iterator[Value]:
    """Those of values.yaml, in its order. A map is one value where a comment stands above it, else it is a section."""
    text = (CHART / "values.yaml").read_text()
    yield from _below(yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text), text.splitlines(), "")


def table() -> str:
    """In Markdown."""
    rows = [f"| `{value.path}` | {_shown(value.default)} | {value.meaning} |" for value in values()]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])


def page() -> str:
    """The README with this table in it."""
    found, count = _TABLE.subn(lambda _: table(), README.read_text())
    assert count == 1, "the page has one place for the table"
    return found


def _below(node: yaml.Node | None, content: Any, lines: list[str], path: str) -> Iterator[Value]:
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        meaning = _above(lines, key.start_mark.line)
        name = f"{path}{key.value}"
        if content[key.value] and isinstance(content[key.value], dict) and not meaning:
            yield from _below(value, content[key.value], lines, f"{name}.")
        else:
            yield Value(path=name, default=content[key.value], meaning=meaning)


def _above(lines: list[str], number: int) -> str:
    found: list[str] = []
    while number > 0 and lines[number - 1].lstrip().startswith("#"):
        number -= 1
        found.insert(0, lines[number].lstrip().lstrip("#").strip())
    return " ".join(found)


def _shown(default: Any) -> str:
    return "empty" if default in ("", [], {}) else f"`{default if isinstance(default, str) else json.dumps(default)}`"


if __name__ == "__main__":
    README.write_text(page())
