"""Reads the settings from flags, environment and a TOML file, once, and reports every mistake together.

A setting `transfer.part_size_bytes` is `--part-size-bytes`, `MOORING_PART_SIZE_BYTES`, and `part_size_bytes` in the
table `[transfer]` of the file; those of the store that only S3 knows are `MOORING_S3_…`. Flags beat the environment,
the environment beats the file, and the file beats what others' variables say.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_args, get_origin, get_type_hints
from urllib.parse import quote, unquote

from mooring_agent.core.errors import ConfigurationError, MooringError
from mooring_agent.core.object_layout import LONGEST_PREFIX_BYTES, check_token
from mooring_agent.core.settings import GIB, MIB, Settings, StoreSettings, TerminationSettings, TransferSettings
from mooring_api.names import (
    CHECKPOINT_DIRECTORY,
    SOCKET,
    SOCKET_PATH_LIMIT_BYTES,
    STATE_DIRECTORY,
)

_UNITS: Final = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_CHOICES: Final = {
    "addressing": ("auto", "path", "virtual"),
    "log_format": ("json", "console"),
    "notices": ("off", "auto", "aws", "gcp", "azure"),
}
_S3_PART_LEAST_BYTES: Final = 5 * MIB
_S3_PART_MOST_BYTES: Final = 5 * GIB
_SERVICE_VARIABLE: Final = re.compile(
    r"MOORING(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
# All begin alike.
_SIMILAR_VARIABLES: Final = 0.85
# botocore reads the first alone; every other SDK of AWS reads the second, which is what EKS and Lambda set.
# Whoever moves a metadata service says so to every program by the cloud's own variable.
_FOREIGN_VARIABLES: Final = {
    "store.region": ("AWS_DEFAULT_REGION", "AWS_REGION"),
    "termination.notices_endpoint": ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "GCE_METADATA_HOST"),
    "cluster.pod_name": ("POD_NAME",),
    "cluster.pod_namespace": ("POD_NAMESPACE",),
    "cluster.pod_uid": ("POD_UID",),
    "cluster.kubernetes_host": ("KUBERNETES_SERVICE_HOST",),
    "cluster.kubernetes_port": ("KUBERNETES_SERVICE_PORT",),
}
_STORE_WIDE: Final = frozenset({"destination"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting: where it is, what it is called, and what it means. `section` is empty at the top."""

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
        return f"MOORING_{infix}{self.name.upper()}"

    @property
    def foreign_variables(self) -> tuple[str, ...]:
        """Variables that are not ours and count where nobody said anything to Mooring itself."""
        return _FOREIGN_VARIABLES.get(self.key, ())


@cache
def setting_fields(cls: type = Settings, section: str = "") -> tuple[SettingField, ...]:
    """Every setting, in the order of docs/settings.md. Kept: the webhook looks at them for every pod."""
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


def load_settings(
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    flag_name: Callable[[SettingField], str] = attrgetter("flag"),
) -> Settings:
    """`flags` by setting name; None there means not given; `flag_name` is what they are called in a problem.
    `defaults`, by name, of this command instead of the settings' own. Raises ConfigurationError."""
    problems: list[str] = []
    from_file = _read_file(file, problems) if file else {}
    values: dict[str, Any] = {}
    for setting in setting_fields():
        sources = (
            (flag_name(setting), flags.get(setting.name)),
            (setting.environment, environment.get(setting.environment) or None),
            (f"{setting.key} in {file}", from_file.pop(setting.key, None)),
            *((name, environment.get(name) or None) for name in setting.foreign_variables),
            (f"the default of {setting.key}", defaults.get(setting.name)),
        )
        for origin, raw in sources:
            if raw is not None:
                _convert(setting, origin, raw, values, problems)
                break
    _report_unknown(from_file, file, problems)
    _fill_paths(values)
    _check(values, problems)
    if problems:
        # One of them may be why something is missing.
        raise ConfigurationError([*problems, *unknown_variables(environment)])
    settings = _build(Settings, "", values)
    assert isinstance(settings, Settings)
    return settings


def load_store_settings(*, flags: Mapping[str, Any], environment: Mapping[str, str]) -> StoreSettings:
    """For commands that talk to a destination and are no agent: what else is set is neither read nor checked.

    Raises ConfigurationError.
    """
    names = {
        name for one in setting_fields(StoreSettings, "store") for name in (one.environment, *one.foreign_variables)
    }
    heard = {name: value for name, value in environment.items() if name in names}
    # All that must be said besides; nobody looks at it here.
    return load_settings(flags={**flags, "volume": "/volume"}, environment=heard).store


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
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


def _convert(setting: SettingField, origin: str, raw: Any, values: dict[str, Any], problems: list[str]) -> None:
    try:
        values[setting.key] = _value(setting, raw)
    except ValueError as error:
        problems.append(f"{origin}: {error}")


def _value(setting: SettingField, raw: Any) -> Any:
    if get_origin(setting.value_type) is tuple:
        return _tags(raw)
    text = _text(raw).strip()
    if setting.value_type is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError(f"{text!r} is neither true nor false")
        return text.lower() in _TRUE
    if setting.value_type is int and ("_bytes" in setting.name):
        return parse_bytes(text)
    if setting.value_type in (int, float):
        try:
            number = setting.value_type(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not math.isfinite(number) or number < 0:
            raise ValueError(f"{text} must be 0 or more")
        return number
    choices = _CHOICES.get(setting.name)
    if choices and text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}")
    return text


def _text(raw: Any) -> str:
    """One value as the file writes it: a true there is no True."""
    if isinstance(raw, list | dict):
        raise ValueError("one value is wanted, not a list or a table")
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def parse_bytes(text: str) -> int:
    """`64MiB`, `5 GB` or plain bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def text_of_tags(tags: Iterable[tuple[str, str]]) -> str:
    """The form of tags in a flag or a variable; what is special there is percent-encoded."""
    return ",".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in tags)


def _tags(raw: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(raw, dict):
        return tuple((key, _text(value)) for key, value in raw.items())
    if isinstance(raw, list):
        raise ValueError("tags are a table, or one text of key=value separated by commas")
    pairs = []
    for item in filter(None, str(raw).split(",")):
        key, separator, value = item.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"{item!r} is not key=value")
        pairs.append((unquote(key.strip()), unquote(value.strip())))
    return tuple(pairs)


def _fill_paths(values: dict[str, Any]) -> None:
    """What follows from the volume unless it was said."""
    volume = values.get("volume")
    if volume:
        volume = values["volume"] = str(Path(volume).absolute())
        values.setdefault("checkpoint_directory", f"{volume}/{CHECKPOINT_DIRECTORY}")
        values["checkpoint_directory"] = str(Path(values["checkpoint_directory"]).absolute())
        values.setdefault("socket", f"{volume}/{STATE_DIRECTORY}/{SOCKET}")


def _check(values: Mapping[str, Any], problems: list[str]) -> None:
    for key, how in (
        ("volume", "--volume or MOORING_VOLUME"),
        ("store.destination", "--destination or MOORING_DESTINATION, as s3://bucket/prefix or file:///path"),
    ):
        if not values.get(key):
            problems.append(f"{key} is not set: give {how}")
    destination = values.get("store.destination")
    if destination and not re.match(r"(s3://[^/]|file:///)", destination):
        problems.append(f"destination {destination!r} is neither s3://bucket/prefix nor file:///absolute/path")
    volume, directory = values.get("volume"), values.get("checkpoint_directory")
    if volume and directory and not Path(directory).is_relative_to(volume):
        problems.append(f"checkpoint_directory {directory} must lie below the volume {volume}")
    if len(values.get("socket", "").encode()) > SOCKET_PATH_LIMIT_BYTES:
        problems.append(f"socket {values['socket']} is longer than {SOCKET_PATH_LIMIT_BYTES} bytes: give --socket")
    if values.get("transfer.max_concurrency", 1) < 1 or values.get("store.max_connections", 1) < 1:
        problems.append("max_concurrency and max_connections must be 1 or more")
    if values.get("store.kms_key_id") and values.get("store.server_side_encryption") != "aws:kms":
        problems.append("kms_key_id needs server_side_encryption aws:kms")
    if values.get("retention.keep_every_steps") and not values.get("retention.keep_last"):
        problems.append("keep_every_steps needs keep_last: with keep_last 0 everything is kept")
    problems += _impossible_sizes(values)
    if values.get("attempt"):
        try:
            check_token(values["attempt"], "attempt")
        except MooringError as error:
            problems.append(f"{error}: {error.hint}")
    address = values.get("http_address")
    if address and not _is_address(address):
        problems.append(f"http_address {address!r} is not host:port with a port from 1 to 65535, as 0.0.0.0:9090")


def _impossible_sizes(values: Mapping[str, Any]) -> Iterator[str]:
    """Numbers and lengths that are sound by themselves and can never work."""
    destination = values.get("store.destination", "")
    to_s3 = destination.startswith("s3://")
    prefix_bytes = len(destination.removeprefix("s3://").partition("/")[2].strip("/").encode())
    if to_s3 and prefix_bytes >= LONGEST_PREFIX_BYTES:
        yield (
            f"the prefix in destination {destination[:60]!r}… has {prefix_bytes} bytes: give one of less than "
            f"{LONGEST_PREFIX_BYTES}, for a checkpoint's files need the rest of the 1,024 that S3 allows a key"
        )
    part_size_bytes = values.get("transfer.part_size_bytes", TransferSettings().part_size_bytes)
    if to_s3 and part_size_bytes < _S3_PART_LEAST_BYTES:
        yield f"part_size_bytes {part_size_bytes} is less than the 5MiB that S3 wants of a part: give 5MiB or more"
    elif to_s3 and part_size_bytes > _S3_PART_MOST_BYTES:
        yield f"part_size_bytes {part_size_bytes} is more than the 5GiB that S3 takes in one request: give 5GiB or less"
    elif part_size_bytes < 1:
        yield "part_size_bytes must be 1 or more"
    if values.get("disk.eviction_threshold_percent", 0.0) >= 100:
        yield "eviction_threshold_percent must be less than 100: no disk is emptier than empty"
    if values.get("disk.peak_factor", 1.0) < 1:
        yield "peak_factor must be 1 or more: a save needs at least its final size"
    for name in ("connect_timeout_seconds", "read_timeout_seconds"):
        if values.get(f"store.{name}", 1.0) == 0:
            yield f"{name} must be more than 0: no store answers at once"
    defaults = TerminationSettings()
    grace_seconds = values.get("termination.grace_seconds", defaults.grace_seconds)
    reserve_seconds = values.get("termination.commit_reserve_seconds", defaults.commit_reserve_seconds)
    if reserve_seconds >= grace_seconds:
        yield (
            f"commit_reserve_seconds {reserve_seconds:g} leaves nothing of grace_seconds {grace_seconds:g} to upload "
            "in: raise grace_seconds, or lower the reserve"
        )


def _is_address(text: str) -> bool:
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*):(\d{1,5})", text)
    return match is not None and 1 <= int(match[2]) <= 65535


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """What to say of variables that look like ours and are not, a mistyped one perhaps.

    No mistake by itself: in Kubernetes every service called mooring-something sets variables in all pods.
    """
    known = [setting.environment for setting in setting_fields()]
    for name in sorted(environment):
        if name.startswith("MOORING_") and name not in known and not _SERVICE_VARIABLE.fullmatch(name):
            near = difflib.get_close_matches(name, known, 1, _SIMILAR_VARIABLES)
            yield f"the variable {name} is no setting" + (f"; did you mean {near[0]}?" if near else "")


def _build(cls: Any, section: str, values: Mapping[str, Any]) -> Any:
    arguments: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], field.name, values)
            continue
        key = f"{section}.{field.name}" if section else field.name
        if key in values:
            arguments[field.name] = values[key]
    return cls(**arguments)
