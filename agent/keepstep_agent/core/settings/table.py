"""The table of all settings, made from the fields of `Settings`: names, parsing, and formatting.

A setting `transfer.part_size_bytes` is `--part-size-bytes`, `KEEPSTEP_PART_SIZE_BYTES`, `part_size_bytes` in the
table `[transfer]` of the file, and a pod's annotation `keepstep.dev/part-size-bytes`. Settings that only S3 has are
`KEEPSTEP_S3_…`. Parsing does not depend on where a value
comes from: `origin` only appears in the error.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from decimal import Decimal
from functools import cache
from typing import Any, Final, get_args, get_origin, get_type_hints
from urllib.parse import quote, unquote

from keepstep_agent.core.limits import largest_setting
from keepstep_agent.core.settings.values import Duration, Settings, Share
from keepstep_api.names import (
    AGENT_STATE_DIRECTORY,
    ANNOTATION_PREFIX,
    CHECKPOINT_DIRECTORY,
    LAZY,
    OFF,
    SOCKET,
    STATE_DIRECTORY,
)

# botocore reads only the first region variable; every other AWS SDK reads the second, which EKS and Lambda set.
# The clouds' own variables tell every program where a metadata service was moved to.
_FOREIGN_VARIABLES: Final = {
    "store.region": ("AWS_DEFAULT_REGION", "AWS_REGION"),
    "termination.preemption_endpoint": ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "GCE_METADATA_HOST"),
    "cluster.pod_name": ("POD_NAME",),
    "cluster.pod_namespace": ("POD_NAMESPACE",),
    "cluster.pod_uid": ("POD_UID",),
    "cluster.kubernetes_host": ("KUBERNETES_SERVICE_HOST",),
    "cluster.kubernetes_port": ("KUBERNETES_SERVICE_PORT",),
}
_STORE_WIDE: Final = frozenset({"destination"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting: its section, its name, and what it means. `section` is empty at the top level."""

    section: str
    name: str
    value_type: type
    help: str
    default: Any

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        infix = "S3_" if self.section == "store" and self.name not in _STORE_WIDE else ""
        return f"KEEPSTEP_{infix}{self.name.upper()}"

    @property
    def annotation(self) -> str:
        return ANNOTATION_PREFIX + self.name.replace("_", "-")

    @property
    def foreign_variables(self) -> tuple[str, ...]:
        """Other programs' variables that apply if the setting is not given to Keepstep itself."""
        return _FOREIGN_VARIABLES.get(self.key, ())


@cache
def setting_fields(cls: type = Settings, section: str = "") -> tuple[SettingField, ...]:
    """Return every setting, in the order of docs/settings.md. Cached: the webhook needs them for every pod."""
    return tuple(_fields_of(cls, section))


def _fields_of(cls: type, section: str) -> Iterator[SettingField]:
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _fields_of(hint, field.name)
            continue
        value_type, text = get_args(hint)[:2]
        default = None if field.default is MISSING else field.default
        yield SettingField(section=section, name=field.name, value_type=value_type, help=text, default=default)


@cache
def setting_field(key: str) -> SettingField:
    """Return the setting of a key. Raises KeyError for a key that no setting has."""
    return {setting.key: setting for setting in setting_fields()}[key]


def environment_variable(key: str) -> str:
    """The environment variable of a setting. Raises KeyError for a key that no setting has."""
    return setting_field(key).environment


def spelled(key: str) -> str:
    """Return how to write a setting, for a hint to somebody who may have a pod or not."""
    setting = setting_field(key)
    return f"{setting.flag} (in a pod {setting.annotation})"


def build_settings(values: Mapping[str, Any]) -> Settings:
    """Build the settings from valid `values` by key, which include the required ones. The rest gets defaults."""
    of_section: dict[str, dict[str, Any]] = defaultdict(dict)
    for setting in setting_fields():
        if setting.key in values:
            of_section[setting.section][setting.name] = values[setting.key]
    arguments = of_section[""]
    for name, hint in get_type_hints(Settings).items():
        if isinstance(hint, type) and is_dataclass(hint):
            arguments[name] = hint(**of_section[name])
    return Settings(**arguments)


_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS: Final = {
    "": 1,
    **{f"{letter}IB": factor for letter, factor in _BINARY.items()},
    # As Kubernetes writes them.
    **{f"{letter}I": factor for letter, factor in _BINARY.items()},
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_SHOWN_CHARACTERS: Final = 40
_PATHS: Final = tuple[str, ...]
_NO_PATHS: Final = "off"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_CHOICES: Final = {
    "addressing": ("auto", "path", "virtual"),
    "io_priority": ("inherit", *map(str, range(8)), "idle"),
    "log_format": ("json", "console"),
    "restore": ("whole", LAZY, OFF),
    "preemption_source": ("off", "auto", "aws", "gcp", "azure"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSetting:
    """What was written for one setting, and where; `origin` appears in error messages."""

    setting: SettingField
    origin: str
    raw: Any


def read_values(said: Iterable[RawSetting]) -> tuple[dict[str, Any], list[str]]:
    """Return the values by the settings' keys, and a problem for each that cannot be parsed."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for one in said:
        try:
            values[one.setting.key] = _value(one.setting, one.raw)
        except ValueError as error:
            problems.append(f"{one.origin}: {error}")
    return values, problems


def with_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values`, with the paths that follow from the volume where they are missing or empty."""
    volume = values.get("volume")
    if not volume:
        return dict(values)
    places = {
        "checkpoint_directory": f"{volume}/{CHECKPOINT_DIRECTORY}",
        "socket": f"{volume}/{STATE_DIRECTORY}/{SOCKET}",
        "state_directory": f"{volume}/{STATE_DIRECTORY}/{AGENT_STATE_DIRECTORY}",
    }
    completed = {**values, **{name: values.get(name) or place for name, place in places.items()}}
    if values.get("watch") is None:
        completed["watch"] = (completed["checkpoint_directory"],)
    return completed


def _value(setting: SettingField, raw: Any) -> Any:
    if setting.value_type == _PATHS:
        return _paths(raw)
    if get_origin(setting.value_type) is tuple:
        return _tags(raw)
    text = _text(raw).strip()
    if setting.value_type is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError(f"{text!r} is neither true nor false")
        return text.lower() in _TRUE
    if setting.value_type is int and ("_bytes" in setting.name):
        return _within_limit(setting, parse_bytes(text), text)
    if setting.value_type is Duration:
        return Duration(_within_limit(setting, parse_seconds(text), text))
    if setting.value_type is Share:
        return Share(_within_limit(setting, parse_share(text), text))
    if setting.value_type in (int, float):
        try:
            number = setting.value_type(text)
        except ValueError:
            raise ValueError(f"{text[:_SHOWN_CHARACTERS]!r} is not a number") from None
        # Refuses NaN and infinity too.
        if not 0 <= number < math.inf:
            raise ValueError(f"{text[:_SHOWN_CHARACTERS]} must be 0 or more")
        return _within_limit(setting, number, text)
    choices = _CHOICES.get(setting.name)
    if choices and text not in choices:
        raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
    return text


def _within_limit(setting: SettingField, number: float, text: str) -> float:
    most = largest_setting(setting.name)
    if number > most:
        raise ValueError(f"{text[:_SHOWN_CHARACTERS]} must be {most} or less")
    return number


def _text(raw: Any) -> str:
    """Return one value as text. Booleans become `true` and `false`, as TOML writes them."""
    if isinstance(raw, list | dict):
        raise ValueError("give a single value, not a list or a table")
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def parse_bytes(text: str) -> int:
    """Parse `64MiB`, `64Mi`, `5 GB` or plain bytes. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,25}(?:\.[0-9]{1,25})?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(
            f"{text[:_SHOWN_CHARACTERS]!r} is not a size; "
            "write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB or GB"
        )
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def parse_share(text: str) -> float:
    """Parse `1%` or `0.01`. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,20})?(?:e-[0-9]{1,2})?)\s*(%?)", text)
    if not match:
        raise ValueError(f"{text[:_SHOWN_CHARACTERS]!r} is not a share; write a percentage, as 1%")
    return float(match[1]) / (100 if match[2] else 1)


_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 24 * 3600.0}


def parse_seconds(text: str) -> float:
    """Parse `90s`, `10m`, `1.5h`, `7d` or plain seconds. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([a-z]?)", text.strip())
    if not match or match[2] not in _SECONDS:
        raise ValueError(
            f"{text[:_SHOWN_CHARACTERS]!r} is not a duration; write seconds, or a number with s, m, h or d"
        )
    return float(match[1]) * _SECONDS[match[2]]


def text_of(setting: SettingField, value: Any) -> str:
    """Format a setting's value as in a flag or a variable."""
    if setting.value_type == _PATHS:
        return ":".join(value) or _NO_PATHS
    return text_of_tags(value) if isinstance(value, tuple) else str(value)


def text_of_tags(tags: Iterable[tuple[str, str]]) -> str:
    """Format tags as in a flag or a variable, with special characters percent-encoded."""
    return ",".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in tags)


def _paths(raw: Any) -> tuple[str, ...] | None:
    """Parse paths separated by colons, or a list of them. `off` is none; None means the default."""
    texts = list(raw) if isinstance(raw, list | tuple) else _text(raw).split(":")
    if any(not isinstance(text, str) for text in texts):
        raise ValueError(f"give directories, or {_NO_PATHS}")
    paths = tuple(text.strip() for text in texts if text.strip())
    word = paths[0].lower() if len(paths) == 1 else ""
    if word in _TRUE:
        raise ValueError(f"give directories, or {_NO_PATHS}")
    if word in _FALSE | {_NO_PATHS}:
        return ()
    return paths or None


def _tags(raw: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(raw, dict):
        return tuple((key, _text(value)) for key, value in raw.items())
    if isinstance(raw, list):
        raise ValueError("give tags as a table, or as one text of key=value pairs separated by commas")
    pairs = []
    for item in filter(None, str(raw).split(",")):
        key, separator, value = item.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"{item!r} is not key=value")
        pairs.append((unquote(key.strip()), unquote(value.strip())))
    return tuple(pairs)
