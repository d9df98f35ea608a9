"""The options by which every command that talks to a destination is told where it is and how to reach it."""

import functools
import os
from collections.abc import Callable
from typing import Any, Final

import click

from mooring_agent.cli.reporting import errors_reported
from mooring_agent.cli.setting_options import setting_option
from mooring_agent.config import load_store_settings
from mooring_agent.core.setting_fields import setting_fields
from mooring_agent.core.settings import StoreSettings
from mooring_api.names import ENV_DESTINATION

# What a person at a terminal needs; the others come from the environment alone.
_OFFERED: Final = ("endpoint_url", "region", "addressing", "ca_bundle", "verify_tls")


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds DEST and the options; the command gets them as `store_settings`. Flags beat the environment."""

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
