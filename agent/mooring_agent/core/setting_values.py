"""From what somebody wrote for a setting to its value, and back to text where a child process shall read it.

It does not know where anything was written: `origin` is only for the problem's line.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, get_origin
from urllib.parse import quote, unquote

from mooring_agent.core.limits import largest_setting
from mooring_agent.core.setting_fields import SettingField
from mooring_api.names import AGENT_STATE_DIRECTORY, CHECKPOINT_DIRECTORY, SOCKET, STATE_DIRECTORY

_UNITS: Final = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SHOWN_CHARACTERS: Final = 40
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_CHOICES: Final = {
    "addressing": ("auto", "path", "virtual"),
    "io_priority": ("inherit", *map(str, range(8)), "idle"),
    "log_format": ("json", "console"),
    "notices": ("off", "auto", "aws", "gcp", "azure"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What was written for one setting, and what a problem calls the place where it was."""

    setting: SettingField
    origin: str
    raw: Any


def read_values(said: Iterable[Said]) -> tuple[dict[str, Any], list[str]]:
    """The values by the settings' keys, and what is wrong with those that have none."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for one in said:
        try:
            values[one.setting.key] = _value(one.setting, one.raw)
        except ValueError as error:
            problems.append(f"{one.origin}: {error}")
    return values, problems


def with_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Besides, what follows from the volume where nothing, or nothing but an empty text, was said."""
    volume = values.get("volume")
    if not volume:
        return dict(values)
    places = {
        "checkpoint_directory": f"{volume}/{CHECKPOINT_DIRECTORY}",
        "socket": f"{volume}/{STATE_DIRECTORY}/{SOCKET}",
        "state_directory": f"{volume}/{STATE_DIRECTORY}/{AGENT_STATE_DIRECTORY}",
    }
    return {**values, **{name: values.get(name) or place for name, place in places.items()}}


def _value(setting: SettingField, raw: Any) -> Any:
    if get_origin(setting.value_type) is tuple:
        return _tags(raw)
    text = _text(raw).strip()
    if setting.value_type is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError(f"{text!r} is neither true nor false")
        return text.lower() in _TRUE
    if setting.value_type is int and ("_bytes" in setting.name):
        return _within_limit(setting, parse_bytes(text), text)
    if setting.value_type in (int, float):
        try:
            number = setting.value_type(text)
        except ValueError:
            raise ValueError(f"{text[:_SHOWN_CHARACTERS]!r} is not a number") from None
        # NaN is neither; and what has no bounds is no number here.
        if not 0 <= number < math.inf:
            raise ValueError(f"{text[:_SHOWN_CHARACTERS]} must be 0 or more")
        return _within_limit(setting, number, text)
    choices = _CHOICES.get(setting.name)
    if choices and text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}")
    return text


def _within_limit(setting: SettingField, number: float, text: str) -> float:
    most = largest_setting(setting.name)
    if number > most:
        raise ValueError(f"{text[:_SHOWN_CHARACTERS]} must be {most} or less")
    return number


def _text(raw: Any) -> str:
    """One value as the file writes it: a true there is no True."""
    if isinstance(raw, list | dict):
        raise ValueError("one value is wanted, not a list or a table")
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def parse_bytes(text: str) -> int:
    """`64MiB`, `5 GB` or plain bytes. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,25}(?:\.[0-9]{1,25})?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(
            f"{text[:_SHOWN_CHARACTERS]!r} is not a size; "
            "write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB or GB"
        )
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


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
