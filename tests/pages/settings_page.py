"""docs/settings.md, made from the settings' own table: `python -m tests.pages.settings_page > docs/settings.md`."""

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from keepstep_agent.core.settings.table import SettingField, setting_fields

_INTRODUCTION: Final = """\
# Settings

<!-- Made by `python -m tests.pages.settings_page`: change the text in core/settings/values.py, not here. -->

Every setting of the agent and of `keepstep run`. A flag beats the environment, the environment beats the file that
`--config` names. Sizes are bytes, or a number with KiB, MiB, GiB, TiB (or Ki, Mi, Gi, Ti), KB, MB or GB. All mistakes
are reported at once.
"""
_DERIVED: Final = {
    "checkpoint_directory": "`checkpoints` below the volume",
    "socket": "`.keepstep/agent.sock` below the volume",
    "state_directory": "`.keepstep/agent` below the volume",
}


def settings_page() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *_tables()])


def _tables() -> Iterator[str]:
    for section, settings in groupby(_ordered(), key=lambda setting: setting.section):
        yield f"## In the file's table `[{section}]`\n" if section else "## At the top of the file\n"
        yield "| in the file | flag | environment | default | meaning |"
        yield "|---|---|---|---|---|"
        for setting in settings:
            cells = (f"`{setting.name}`", f"`{setting.flag}`", f"`{setting.environment}`", _default(setting))
            yield f"| {' | '.join(cells)} | {setting.help} |"
        yield ""


def _ordered() -> list[SettingField]:
    """TOML wants what is at the top before the tables."""
    return sorted(setting_fields(), key=lambda setting: setting.section != "")


def _default(setting: SettingField) -> str:
    if setting.default is None:
        return _DERIVED.get(setting.key, "must be given")
    if setting.default in ("", ()):
        return "empty"
    return f"`{str(setting.default).lower() if isinstance(setting.default, bool) else setting.default}`"


if __name__ == "__main__":
    print(settings_page(), end="")
