"""Makes the options of commands from `core.settings.table`: every setting, or the store's and a few others."""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import click

from keepstep_agent.cli.formatting import errors_reported
from keepstep_agent.config import load_settings, load_some_settings
from keepstep_agent.core.settings.table import SettingField, setting_fields, text_of
from keepstep_agent.core.settings.values import Settings
from keepstep_api.names import (
    AGENT_STATE_DIRECTORY,
    CHECKPOINT_DIRECTORY,
    ENV_DESTINATION,
    RUN_VOLUME,
    STATE_DIRECTORY,
)

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
        environment[setting.environment] = text_of(setting, value)
    return environment


def setting_option(setting: SettingField, default: str | None = None) -> Callable[[F], F]:
    """Return the option of one setting; its value is None if it is not given. `default` replaces the setting's own."""
    names = [setting.flag]
    if setting.value_type is bool:
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
    if setting.name == "destination":
        names.append("--to")
    default = default or setting.default
    shown = "" if default in (None, "", ()) else f"  [default: {default}]"
    kind: dict[str, Any] = {"type": bool} if setting.value_type is bool else {"metavar": "TEXT"}
    if setting.value_type == tuple[str, ...]:
        # click gives an empty tuple if the option is not given.
        kind = {"metavar": "DIR", "multiple": True, "callback": lambda context, option, given: given or None}
    return click.option(
        *names, setting.name, default=None, help=f"{setting.help}{shown}  [env: {setting.environment}]", **kind
    )


# What a person at a terminal needs. The store's other settings come from the environment only.
_OFFERED: Final = frozenset(
    f"store.{name}" for name in ("endpoint_url", "region", "addressing", "ca_bundle", "verify_tls", "requester_pays")
)


def destination_options(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add DEST, the store's options, and those of the settings `keys`. The command gets all of these as `settings`.

    Flags beat the environment. The volume is that of `keepstep run` by default, and logs are for people in a terminal.
    """
    offered = [one for one in setting_fields() if one.key in _OFFERED or one.key in keys]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(*, destination: str, **values: Any) -> None:
            flags = {"destination": destination, **{one.name: values.pop(one.name) for one in offered}}
            defaults = {"log_format": "console" if sys.stderr.isatty() else "json"}
            if "volume" in keys:
                defaults["volume"] = RUN_VOLUME
            with errors_reported():
                settings = load_some_settings(keys, flags=flags, environment=os.environ, defaults=defaults)
            command(settings=settings, **values)

        decorated: Callable[..., None] = wrapper
        shown = {
            "volume": f"./{RUN_VOLUME}",
            "checkpoint_directory": f"<volume>/{CHECKPOINT_DIRECTORY}",
            "state_directory": f"<volume>/{STATE_DIRECTORY}/{AGENT_STATE_DIRECTORY}",
            "log_format": "console in a terminal, else json",
        }
        for setting in reversed(offered):
            decorated = setting_option(setting, shown.get(setting.key))(decorated)
        return click.argument("destination", metavar="DEST", envvar=ENV_DESTINATION)(decorated)

    return decorate
