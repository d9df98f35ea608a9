"""Makes the options of commands from `core.settings.table`: every setting, or those that locate the store."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import click

from mooring_agent.cli.formatting import errors_reported
from mooring_agent.config import load_settings, load_store_settings
from mooring_agent.core.settings.table import SettingField, setting_fields, text_of_tags
from mooring_agent.core.settings.values import Settings, StoreSettings
from mooring_api.names import ENV_DESTINATION

F = TypeVar("F", bound=Callable[..., Any])


def setting_options(command: F) -> F:
    """Add one option per setting, and --config FILE. The command passes its keyword arguments to `settings_from`."""
    for setting in reversed(list(setting_fields())):
        command = setting_option(setting)(command)
    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file with settings, see docs/settings.md.",
    )(command)


def settings_from(options: Mapping[str, Any], *, defaults: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    """Return the settings of a command that has `setting_options`. `defaults` apply to settings that are not given."""
    flags = dict(options)
    file = flags.pop("config", None)
    return load_settings(flags=flags, environment=os.environ, file=file, defaults=defaults)


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the settings as environment variables, for a child process that reads them as usual."""
    environment = {}
    for setting in setting_fields():
        holder = getattr(settings, setting.section) if setting.section else settings
        value = getattr(holder, setting.name)
        environment[setting.environment] = text_of_tags(value) if isinstance(value, tuple) else str(value)
    return environment


def setting_option(setting: SettingField) -> Callable[[F], F]:
    """Return the option of one setting; its value is None if it is not given."""
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


# What a person at a terminal needs. The other settings come from the environment only.
_OFFERED: Final = ("endpoint_url", "region", "addressing", "ca_bundle", "verify_tls")


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add DEST and the store's options. The command gets them as `store_settings`. Flags beat the environment."""

    @functools.wraps(command)
    def wrapper(*, destination: str, **values: Any) -> None:
        flags = {name: values.pop(name) for name in _OFFERED}
        with errors_reported():
            store_settings = load_store_settings(flags={**flags, "destination": destination}, environment=os.environ)
        command(store_settings=store_settings, **values)

    decorated: Callable[..., None] = wrapper
    for setting in reversed([one for one in setting_fields(StoreSettings, "store") if one.name in _OFFERED]):
        decorated = setting_option(setting)(decorated)
    return click.argument("destination", metavar="DEST", envvar=ENV_DESTINATION)(decorated)
