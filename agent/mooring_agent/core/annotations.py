"""From a pod's annotations to what they ask for, or why nothing is injected, or all that is wrong with them.

Owns the reading of values; which annotations there are is in `annotation_fields`. The agent's settings are checked by
the settings' own parser, so the webhook refuses what the agent would refuse.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from mooring_agent.config import ConfigurationError, load_settings
from mooring_agent.core.annotation_fields import WRITTEN_BY_US, annotation_of, known_keys, settings_annotations
from mooring_agent.core.errors import MooringError
from mooring_agent.core.injection import CaBundle, CaSource, Claim, Injection, InjectionDefaults, Refusal, Sidecar, Skip
from mooring_agent.core.object_layout import check_token
from mooring_agent.core.quantity import parse_quantity
from mooring_agent.core.trainer_container import is_at_or_below, plain
from mooring_api import names
from mooring_api.names import ANNOTATION_INJECT, ANNOTATION_PREFIX

_Value = TypeVar("_Value")

_MIRROR: Final = "kubernetes.io/config.mirror"
_OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,251}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,251}[a-z0-9])?){0,20}")
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_LEAST_MEMORY: Final = "64Mi"
_MOST_SECONDS: Final = 7 * 24 * 3600
_MOST_UNKNOWN: Final = 10
_LONGEST_NAME: Final = 63
_LONGEST_TEXT: Final = 4096
_MOST_USER: Final = 2**31 - 1
_NOT_OURS: Final = (
    "/dev",
    "/proc",
    "/sys",
    names.POD_SOCKET_DIRECTORY,
    names.POD_DESTINATION_PATH,
    names.POD_AUTOLOAD_PATH,
    names.POD_CA_PATH,
    names.POD_CREDENTIALS_PATH,
)


def read_annotations(annotations: Mapping[str, str], defaults: InjectionDefaults) -> Injection | Skip | Refusal:
    """`annotations` are all of the pod's; those of others are none of our business."""
    written = {field.key for field in WRITTEN_BY_US}
    ours = {key: text for key, text in annotations.items() if key.startswith(ANNOTATION_PREFIX) and key not in written}
    if not ours:
        return Skip(reason=f"the pod has no annotation {ANNOTATION_INJECT}")
    if _MIRROR in annotations:
        return Skip(reason="the pod is a static one of its node, which nobody can change", warning=True)
    reader = _Reader({**defaults.annotations, **ours})
    if ANNOTATION_INJECT in ours and not reader.take("inject", _boolean, True):
        return Skip(reason=f"{ANNOTATION_INJECT} is false")
    reader.problems += _unknown(ours)
    if ANNOTATION_INJECT not in ours:
        reason = f'the pod has {min(ours)}, and nothing is injected without {ANNOTATION_INJECT}: "true"'
        # One that is mistyped may be the very one that is missing.
        return Refusal(problems=tuple(reader.problems)) if reader.problems else Skip(reason=reason, warning=True)
    injection = _read(reader, defaults)
    return Refusal(problems=tuple(reader.problems)) if reader.problems else injection


def default_problems(defaults: InjectionDefaults) -> tuple[str, ...]:
    """What is wrong with the admin's own decisions: to be said when the webhook starts, not in every user's pod."""
    least = {ANNOTATION_INJECT: "true", f"{ANNOTATION_PREFIX}destination": "s3://bucket"}
    sizes = {f"{ANNOTATION_PREFIX}cpu": defaults.cpu, f"{ANNOTATION_PREFIX}memory": defaults.memory}
    problems = [f"{key} is not for everybody" for key in sorted(least.keys() & defaults.annotations.keys())]
    asked = read_annotations({**least, **sizes, **defaults.annotations}, replace(defaults, annotations={}))
    return (*problems, *(asked.problems if isinstance(asked, Refusal) else ()))


class _Reader:
    """Takes values one after the other and keeps what is wrong with them."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.unreadable = {key for key, text in texts.items() if not _is_text(text)}
        self.problems = [
            f"{key}: the value is no plain text of one line and at most {_LONGEST_TEXT:,} letters"
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
            f"{ANNOTATION_PREFIX}destination is missing: say where checkpoints go, as s3://bucket/prefix or pvc://claim/path"
        )
    nowhere: tuple[str, Claim | None] = ("", None)
    destination, claim = reader.take("destination", _destination, nowhere)
    grace_seconds = reader.take("grace-seconds", _seconds, defaults.grace_seconds)
    sidecar = Sidecar.NATIVE if defaults.native_sidecars else Sidecar.REGULAR
    injection = Injection(
        destination=destination,
        claim=claim,
        credentials=reader.take("credentials", _object_name, ""),
        ca_bundle=reader.take("ca-bundle", _ca_bundle, None),
        container=reader.take("container", _container, ""),
        checkpoint_directory=reader.take("checkpoint-directory", _directory, ""),
        size_limit=reader.take("size-limit", _size, ""),
        in_memory=reader.take("medium", _is_memory, False),
        grace_seconds=grace_seconds,
        sidecar=reader.take("sidecar", _sidecar, sidecar),
        autoload=reader.take("autoload", _boolean, False),
        temporary_files=reader.take("temporary-files", _boolean, False),
        cpu=reader.take("cpu", _amount, ""),
        memory=reader.take("memory", _memory, ""),
        run_as_user=reader.take("run-as-user", _user, None),
        attempt=reader.take("attempt", _attempt, ""),
        settings=_settings(reader, destination, grace_seconds),
    )
    if injection.sidecar is Sidecar.NATIVE and not defaults.native_sidecars:
        reader.problems.append(
            f"{ANNOTATION_PREFIX}sidecar: this cluster has no native sidecars, which came with Kubernetes 1.29: "
            "say regular, or leave it out"
        )
    return injection


def _settings(reader: _Reader, destination: str, grace_seconds: int) -> Mapping[str, str]:
    """The agent's settings by environment variable, as they were written, once its own parser likes them."""
    readable = reader.texts.keys() - reader.unreadable
    said = {key: setting for key, setting in settings_annotations().items() if key in readable}
    flags: dict[str, Any] = {setting.name: reader.texts[key] for key, setting in said.items()}
    # What was wrong with these has been said.
    flags |= {
        "volume": names.POD_VOLUME_PATH,
        "destination": destination or "s3://bucket",
        "grace_seconds": grace_seconds,
    }
    try:
        load_settings(flags=flags, environment={}, flag_name=annotation_of)
    except ConfigurationError as error:
        reader.problems += error.problems
    return {setting.environment: reader.texts[key].strip() for key, setting in said.items()}


def _unknown(ours: Mapping[str, str]) -> Iterator[str]:
    known = {key.removeprefix(ANNOTATION_PREFIX): key for key in known_keys()}
    unknown = [name for key in ours if (name := key.removeprefix(ANNOTATION_PREFIX)) not in known]
    # Compared without what is the same in all of them; and few, for a stranger may send many, and long ones.
    for name in unknown[:_MOST_UNKNOWN]:
        near = difflib.get_close_matches(name[:_LONGEST_NAME], known, 1)
        hint = f"did you mean {known[near[0]]}?" if near else "see docs/annotations.md"
        yield f"there is no annotation {ANNOTATION_PREFIX}{name[:_LONGEST_NAME]}: {hint}"


def _is_text(text: str) -> bool:
    """JSON can escape half a character, of which nothing can be made; and what is too long would fill every message."""
    if len(text) > _LONGEST_TEXT:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return not any(ord(character) < 0x20 for character in text.strip())


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _destination(text: str) -> tuple[str, Claim | None]:
    if re.fullmatch(r"s3://[^/\s]+(/[^/\s]+)*/?", text):
        return text, None
    if text.startswith("pvc://"):
        name, _, path = text.removeprefix("pvc://").partition("/")
        parts = [part for part in path.split("/") if part]
        if ".." in parts or "." in parts:
            raise ValueError(f"{text!r} may lead out of the claim: write the path without . and ..")
        place = "/".join((names.POD_DESTINATION_PATH, *parts))
        return f"file://{place}", Claim(name=_object_name(name), path="/".join(parts))
    raise ValueError(f"{text!r} is no destination: write s3://bucket/prefix or pvc://claim/path")


def _object_name(text: str) -> str:
    if len(text) > 253 or not _OBJECT_NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no object's name: use small letters, digits, - and .")
    return text


def _ca_bundle(text: str) -> CaBundle:
    parts = text.split("/")
    if len(parts) == 2:
        parts.insert(0, CaSource.CONFIG_MAP)
    if len(parts) != 3 or parts[0] not in set(CaSource) or not parts[1] or not _KEY.fullmatch(parts[2]):
        raise ValueError(f"{text!r} names no bundle: write configmap/name/key, secret/name/key, or name/key")
    return CaBundle(source=CaSource(parts[0]), name=_object_name(parts[1]), key=parts[2])


def _container(text: str) -> str:
    if not text:
        raise ValueError("the name is empty: name a container of the pod, or leave the annotation out")
    return text


def _directory(text: str) -> str:
    path = plain(text)
    if not text.startswith("/") or not path or ".." in text.split("/") or ":" in text:
        raise ValueError(f"{text!r} is no directory in the trainer: write an absolute path without .. and :")
    for taken in _NOT_OURS:
        if is_at_or_below(path, taken) or is_at_or_below(taken, path):
            raise ValueError(f"{text!r} collides with {taken}: choose another directory")
    return path


def _size(text: str) -> str:
    if parse_quantity(text) < 1:
        raise ValueError(f"{text!r} is less than a byte: write it as 500Gi")
    return text


def _is_memory(text: str) -> bool:
    if text.lower() not in ("memory", "disk"):
        raise ValueError(f"{text!r} is neither memory nor disk")
    return text.lower() == "memory"


def _seconds(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= _MOST_SECONDS:
        raise ValueError(f"{text!r} is no number of seconds from 1 to {_MOST_SECONDS}")
    return int(text)


def _sidecar(text: str) -> Sidecar:
    if text.lower() not in set(Sidecar):
        raise ValueError(f"{text!r} is neither {' nor '.join(Sidecar)}")
    return Sidecar(text.lower())


def _amount(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError(f"{text!r} is not more than nothing")
    return text


def _memory(text: str) -> str:
    if parse_quantity(text) < parse_quantity(_LEAST_MEMORY):
        raise ValueError(f"{text!r} is less than the {_LEAST_MEMORY} that the agent needs: write it as 256Mi")
    return text


def _user(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > _MOST_USER:
        raise ValueError(f"{text!r} is no numeric user id, as 1000")
    return int(text)


def _attempt(text: str) -> str:
    try:
        return check_token(text, "attempt")
    except MooringError as error:
        raise ValueError(f"{error}: {error.hint}") from error
