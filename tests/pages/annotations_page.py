"""docs/annotations.md, made from the code's own tables: `python -m tests.pages.annotations_page`."""

from collections.abc import Iterator
from typing import Final

from keepstep_agent.core.injection.annotation_table import OWN, WRITTEN_BY_US, settings_annotations
from keepstep_agent.core.settings.table import SettingField

_INTRODUCTION: Final = """\
# Annotations

<!-- Made by `python -m tests.pages.annotations_page` from core/injection and core/settings. -->

What a pod asks Keepstep for. They stand in the metadata of the pod itself: in the template of a Job or of anything else
that makes pods, not in the Job's own. Values are texts, so numbers and `true` want quotation marks. All mistakes in a
pod are reported at once, and one in a name with the name that is nearest.

```yaml
metadata:
  annotations:
    keepstep.dev/inject: "true"
    keepstep.dev/destination: s3://bucket/runs/one
```
"""
_HEADING: Final = "| annotation | default | meaning |\n|---|---|---|"


def annotations_page() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *_tables()])


def _tables() -> Iterator[str]:
    yield "## The injection\n"
    yield _HEADING
    for field in OWN:
        yield f"| `{field.key}` | {field.default} | {field.help} |"
    yield "\n## The agent's settings\n"
    yield "More about them in [settings](settings.md). The others are set by the injection itself.\n"
    yield _HEADING
    for key, setting in settings_annotations().items():
        yield f"| `{key}` | {_default(setting)} | {setting.help} |"
    yield "\n## Written by Keepstep\n"
    yield "| annotation | meaning |\n|---|---|"
    for field in WRITTEN_BY_US:
        yield f"| `{field.key}` | {field.help} |"
    yield ""


def _default(setting: SettingField) -> str:
    if setting.default in ("", ()):
        return "empty"
    return f"`{str(setting.default).lower() if isinstance(setting.default, bool) else setting.default}`"


if __name__ == "__main__":
    print(annotations_page(), end="")
