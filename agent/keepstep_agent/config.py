"""Reads the settings from flags, environment and a TOML file, once, and reports every mistake together.

`core.settings.table` has each setting's name in each source. Flags beat the environment, the environment beats the
file, and the file beats other programs' variables.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from keepstep_agent.core.errors import ConfigurationError
from keepstep_agent.core.settings.checks import setting_problems
from keepstep_agent.core.settings.table import (
    RawSetting,
    build_settings,
    read_values,
    setting_field,
    setting_fields,
    with_paths,
)
from keepstep_agent.core.settings.values import Settings
from keepstep_api.names import OF_THE_TRAINER

_SERVICE_VARIABLE: Final = re.compile(
    r"KEEPSTEP(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
# Higher than difflib's default, because all names begin with KEEPSTEP_.
_SIMILAR_VARIABLES: Final = 0.85


def load_settings(
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Settings:
    """Load the settings.

    `flags` are by setting name; None means not given. `defaults`, also by name, are the command's own and replace those
    of the settings. Raises ConfigurationError.
    """
    problems: list[str] = []
    from_file = _read_file(file, problems) if file else {}
    said: list[RawSetting] = []
    for setting in setting_fields():
        sources = (
            (setting.flag, flags.get(setting.name)),
            (setting.environment, environment.get(setting.environment) or None),
            (f"{setting.key} in {file}", from_file.pop(setting.key, None)),
            *((name, environment.get(name) or None) for name in setting.foreign_variables),
            (f"the default of {setting.key}", defaults.get(setting.name)),
        )
        for origin, raw in sources:
            if raw is not None:
                said.append(RawSetting(setting=setting, origin=origin, raw=raw))
                break
    values, misread = read_values(said)
    problems += misread
    _report_unknown(from_file, file, problems)
    values = with_paths(_from_here(values))
    origins = {one.setting.key: one.origin for one in said}
    problems += setting_problems(values, lambda key: origins.get(key) or setting_field(key).flag)
    if problems:
        # A mistyped variable may be why a setting is missing.
        raise ConfigurationError([*problems, *unknown_variables(environment)])
    return build_settings(values)


def load_some_settings(
    keys: Collection[str], *, flags: Mapping[str, Any], environment: Mapping[str, str], defaults: Mapping[str, Any]
) -> Settings:
    """Load the store's settings and those of `keys`, for commands that need no agent. Others are not read or checked.

    Raises ConfigurationError.
    """
    read = [one for one in setting_fields() if one.section == "store" or one.key in keys]
    names = {name for one in read for name in (one.environment, *one.foreign_variables)}
    heard = {name: value for name, value in environment.items() if name in names}
    # These two must be valid. They are used only if they are among the keys, and then the command has other defaults.
    unused = {"volume": "/volume", "socket": "/socket"}
    return load_settings(flags=flags, environment=heard, defaults={**unused, **defaults})


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"cannot read the settings file {path}: {error}")
        return {}
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[key] = value
    return flat


def _report_unknown(left: Mapping[str, Any], file: Path | None, problems: list[str]) -> None:
    known = [setting.key for setting in setting_fields()]
    for key in left:
        near = difflib.get_close_matches(key, known, 1)
        problems.append(f"{file} has an unknown setting {key}" + (f"; did you mean {near[0]}?" if near else ""))


def _from_here(values: Mapping[str, Any]) -> dict[str, Any]:
    """Make paths absolute from the working directory, which the core does not know."""
    paths = ("volume", "checkpoint_directory", "state_directory") if values.get("volume") else ()
    absolute: dict[str, Any] = {name: str(Path(values[name]).absolute()) for name in paths if values.get(name)}
    if values.get("watch"):
        absolute["watch"] = tuple(os.path.normpath(Path(path).absolute()) for path in values["watch"])
    return {**values, **absolute}


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each variable that looks like a setting and is none; it may be mistyped.

    Such a variable is no error: in Kubernetes every Service called keepstep-something sets variables in all pods.
    """
    known = [*(setting.environment for setting in setting_fields()), *OF_THE_TRAINER]
    for name in sorted(environment):
        if name.startswith("KEEPSTEP_") and name not in known and not _SERVICE_VARIABLE.fullmatch(name):
            near = difflib.get_close_matches(name, known, 1, _SIMILAR_VARIABLES)
            yield f"the variable {name} is not a setting" + (f"; did you mean {near[0]}?" if near else "")
