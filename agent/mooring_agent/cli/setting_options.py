"""Every setting as an option of a command, made from the settings' own table (`core.setting_fields`)."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import click

from mooring_agent.config import load_settings
from mooring_agent.core.setting_fields import SettingField, setting_fields
from mooring_agent.core.setting_values import text_of_tags
from mooring_agent.core.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


def setting_options(command: F) -> F:
    """Adds one option per setting, and --config FILE; the command hands its keyword arguments to `settings_from`."""
    for setting in reversed(list(setting_fields())):
        command = setting_option(setting)(command)
    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file with settings, see docs/settings.md.",
    )(command)


def settings_from(options: Mapping[str, Any], *, defaults: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    """The settings of a command that has `setting_options`; `defaults` count where nobody said anything."""
    flags = dict(options)
    file = flags.pop("config", None)
    return load_settings(flags=flags, environment=os.environ, file=file, defaults=defaults)


def environment_of(settings: Settings) -> dict[str, str]:
    """The settings as environment, for a child process that reads them the ordinary way."""
    environment = {}
    for setting in setting_fields():
        holder = getattr(settings, setting.section) if setting.section else settings
        value = getattr(holder, setting.name)
        environment[setting.environment] = text_of_tags(value) if isinstance(value, tuple) else str(value)
    return environment


def setting_option(setting: SettingField) -> Callable[[F], F]:
    """The option of one setting; None where it is not given."""
    names = [setting.flag]
    if setting.value_type is bool:
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
    if setting.name == "destination":
        names.append("--to")
    default = setting.default
    shown = "" if default in (None, "", ()) else f"  [default: {default}]"
    kind: dict[str, Any] = {"type": bool} if setting.value_type is bool else {"metavar": "TEXT"}
    return click.option(
        *names, setting.name, default=None, help=f"{setting.help}{shown}  [env: {setting.environment}]", **kind
    )
