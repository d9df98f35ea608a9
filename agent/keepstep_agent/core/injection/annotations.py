"""Parses a pod's annotations: what they ask for, why nothing is injected, or everything that is wrong with them.

The known annotations and their parsers are in `annotation_table`. `core.settings` checks the agent's settings.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from keepstep_agent.core.injection import annotation_table as values
from keepstep_agent.core.injection.annotation_table import (
    WRITTEN_BY_US,
    known_keys,
    settings_annotations,
)
from keepstep_agent.core.injection.spec import Claim, Injection, InjectionDefaults, Refusal, Skip
from keepstep_agent.core.settings.checks import setting_problems
from keepstep_agent.core.settings.table import RawSetting, read_values, setting_field, setting_fields, with_paths
from keepstep_api import names
from keepstep_api.names import ANNOTATION_INJECT, ANNOTATION_PREFIX

_Value = TypeVar("_Value")

_MIRROR: Final = "kubernetes.io/config.mirror"
_MOST_UNKNOWN: Final = 10
_LONGEST_NAME: Final = 63
_LONGEST_TEXT: Final = 4096


def read_annotations(annotations: Mapping[str, str], defaults: InjectionDefaults) -> Injection | Skip | Refusal:
    """Parse all annotations of a pod. Annotations with another prefix are ignored."""
    written = {field.key for field in WRITTEN_BY_US}
    ours = {key: text for key, text in annotations.items() if key.startswith(ANNOTATION_PREFIX) and key not in written}
    if not ours:
        return Skip(reason=f"the pod has no annotation {ANNOTATION_INJECT}")
    if _MIRROR in annotations:
        return Skip(reason="the pod is a static pod of its node and cannot be changed", warning=True)
    reader = _Reader({**defaults.annotations, **ours})
    if ANNOTATION_INJECT in ours and not reader.take("inject", values.boolean, True):
        return Skip(reason=f"{ANNOTATION_INJECT} is false")
    reader.problems += _unknown(ours)
    if ANNOTATION_INJECT not in ours:
        reason = f'the pod has {min(ours)}, and nothing is injected without {ANNOTATION_INJECT}: "true"'
        # A mistyped annotation may be the missing `inject` itself.
        return Refusal(problems=tuple(reader.problems)) if reader.problems else Skip(reason=reason, warning=True)
    injection = _read(reader, defaults)
    return Refusal(problems=tuple(reader.problems)) if reader.problems else injection


def default_problems(defaults: InjectionDefaults) -> tuple[str, ...]:
    """Return what is wrong with the admin's defaults, so that it is reported once, when the webhook starts."""
    least = {ANNOTATION_INJECT: "true", f"{ANNOTATION_PREFIX}destination": "s3://bucket"}
    sizes = {f"{ANNOTATION_PREFIX}memory": defaults.memory}
    if defaults.cpu:
        sizes[f"{ANNOTATION_PREFIX}cpu"] = defaults.cpu
    problems = [f"{key} cannot be a default for all pods" for key in sorted(least.keys() & defaults.annotations.keys())]
    asked = read_annotations({**least, **sizes, **defaults.annotations}, replace(defaults, annotations={}))
    return (*problems, *(asked.problems if isinstance(asked, Refusal) else ()))


class _Reader:
    """Parses one annotation at a time and collects the problems."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.unreadable = {key for key, text in texts.items() if not _is_text(text)}
        self.problems = [
            f"{key}: the value must be one line of plain text with at most {_LONGEST_TEXT:,} characters"
            for key in sorted(self.unreadable)
        ]

    def take(self, name: str, read: Callable[[str], _Value], otherwise: _Value) -> _Value:
        key = ANNOTATION_PREFIX + name
        if key not in self.texts or key in self.unreadable:
            return otherwise
        try:
            return read(self.texts[key].strip())
        except ValueError as error:
            self.problems.append(f"{key}: {error}")
            return otherwise


def _read(reader: _Reader, defaults: InjectionDefaults) -> Injection:
    if ANNOTATION_PREFIX + "destination" not in reader.texts:
        reader.problems.append(
            f"{ANNOTATION_PREFIX}destination is missing: set it to s3://bucket/prefix or pvc://claim/path"
        )
    nowhere: tuple[str, Claim | None] = ("", None)
    destination, claim = reader.take("destination", values.destination, nowhere)
    grace_seconds = reader.take("grace-seconds", values.seconds, defaults.grace_seconds)
    return Injection(
        destination=destination,
        claim=claim,
        credentials=reader.take("credentials", values.object_name, ""),
        ca_bundle=reader.take("ca-bundle", values.ca_bundle, None),
        container=reader.take("container", values.container, ""),
        checkpoint_directory=reader.take("checkpoint-directory", values.directory, ""),
        output=reader.take("output", values.output_directories, ()),
        watch=reader.take("watch", values.is_watched, True),
        size_limit=reader.take("size-limit", values.size, ""),
        in_memory=reader.take("medium", values.is_memory, False),
        grace_seconds=grace_seconds,
        autoload=reader.take("autoload", values.boolean, False),
        asynchronous_saves=reader.take("asynchronous-saves", values.boolean, None),
        temporary_files=reader.take("temporary-files", values.boolean, False),
        cpu=reader.take("cpu", values.amount, ""),
        memory=reader.take("memory", values.memory, ""),
        run_as_user=reader.take("run-as-user", values.user, None),
        attempt=reader.take("attempt", values.attempt, ""),
        settings=_settings(reader, destination, grace_seconds),
    )


def _settings(reader: _Reader, destination: str, grace_seconds: int) -> Mapping[str, str]:
    """Return the agent's settings by environment variable, as they were written.

    The agent's own parser and checks add their problems to `reader`.
    """
    readable = reader.texts.keys() - reader.unreadable
    said = {key: setting for key, setting in settings_annotations().items() if key in readable}
    raw: dict[str, Any] = {setting.name: reader.texts[key] for key, setting in said.items()}
    # Problems of these are reported already, so they get values that pass the checks.
    raw |= {
        "volume": names.POD_VOLUME_PATH,
        "destination": destination or "s3://bucket",
        "grace_seconds": grace_seconds,
    }
    found, problems = read_values(
        RawSetting(setting=setting, origin=setting.annotation, raw=raw[setting.name])
        for setting in setting_fields()
        if setting.name in raw
    )
    reader.problems += [*problems, *setting_problems(with_paths(found), lambda key: setting_field(key).annotation)]
    return {setting.environment: reader.texts[key].strip() for key, setting in said.items()}


def _unknown(ours: Mapping[str, str]) -> Iterator[str]:
    known = {key.removeprefix(ANNOTATION_PREFIX): key for key in known_keys()}
    unknown = [name for key in ours if (name := key.removeprefix(ANNOTATION_PREFIX)) not in known]
    # The prefix is left out because all share it. Number and length are bounded: a client may send many long names.
    for name in unknown[:_MOST_UNKNOWN]:
        near = difflib.get_close_matches(name[:_LONGEST_NAME], known, 1)
        hint = f"did you mean {known[near[0]]}?" if near else "see docs/annotations.md"
        yield f"there is no annotation {ANNOTATION_PREFIX}{name[:_LONGEST_NAME]}: {hint}"


def _is_text(text: str) -> bool:
    """Whether a value is one line of text that can be encoded and is short enough to quote in a message.

    JSON can escape half a surrogate pair, which has no encoding.
    """
    if len(text) > _LONGEST_TEXT:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return not any(ord(character) < 0x20 for character in text.strip())
