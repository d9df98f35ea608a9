"""The annotations that values may give to every pod, in the schema of values, from the program's own.

`python -m tests.chart.annotation_names` writes them into the schema.
"""

import json
import re
from typing import Final

from tests.chart.rendering import CHART

from keepstep_agent.core.injection.annotation_table import OWN, settings_annotations

SCHEMA: Final = CHART / "values.schema.json"
_OF_ONE_RUN: Final = {"inject", "destination", "attempt"}
_WITH_A_VALUE_OF_THEIR_OWN: Final = {"grace-seconds", "cpu", "memory"}
_NAMES: Final = re.compile(r'(?<="propertyNames": \{\n            "enum": \[\n).*?(?=\n            \]\n)', re.DOTALL)


def for_every_pod() -> list[str]:
    """In the order of docs/annotations.md."""
    own = [field.key for field in OWN if field.name not in _OF_ONE_RUN | _WITH_A_VALUE_OF_THEIR_OWN]
    return [*own, *settings_annotations()]


def schema() -> str:
    """With these names in it."""
    names = ",\n".join(" " * 14 + json.dumps(name) for name in for_every_pod())
    found, count = _NAMES.subn(lambda _: names, SCHEMA.read_text())
    assert count == 1, "the schema has one place for the names"
    return found


if __name__ == "__main__":
    SCHEMA.write_text(schema())
