"""The options by which every command that talks to a destination is told where it is and how to reach it."""

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from mooring_agent.config import SettingField, setting_fields
from mooring_agent.core.settings import StoreSettings
from mooring_api.names import ENV_DESTINATION

# What a person at a terminal needs; what only shapes uploads is the agent's.
_OFFERED: Final = ("endpoint_url", "region", "addressing", "ca_bundle", "verify_tls")


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds DEST and the options; the command gets them as `store_settings`. Flags beat the environment."""
    settings = [one for one in setting_fields(StoreSettings, "store") if one.name in _OFFERED]

    @functools.wraps(command)
    def wrapper(*, destination: str, **values: Any) -> None:
        chosen = {one.name: values.pop(one.name) for one in settings}
        command(store_settings=StoreSettings(destination=destination, **chosen), **values)

    decorated: Callable[..., None] = wrapper
    for one in reversed(settings):
        decorated = _option(one)(decorated)
    return click.argument("destination", metavar="DEST", envvar=ENV_DESTINATION)(decorated)


def _option(setting: SettingField) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag = f"{setting.flag}/{setting.flag.replace('--', '--no-', 1)}" if setting.value_type is bool else setting.flag
    value_type: Any = setting.value_type
    if setting.name == "addressing":
        value_type = click.Choice(["auto", "path", "virtual"])
    return click.option(
        flag,
        setting.name,
        type=value_type,
        default=setting.default,
        show_default=setting.name == "addressing",
        envvar=[setting.environment, *setting.foreign_variables],
        help=setting.help,
    )
