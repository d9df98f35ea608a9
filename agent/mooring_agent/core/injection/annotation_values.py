"""What the values of annotations may be: one function for each kind of value.

All take the text without the blanks around it and raise ValueError with what to write instead.
"""

import re
from typing import Final

from mooring_agent.core.errors import MooringError
from mooring_agent.core.injection.quantity import parse_quantity
from mooring_agent.core.injection.spec import CaBundle, CaSource, Claim
from mooring_agent.core.injection.trainer_container import is_at_or_below, plain
from mooring_agent.core.limits import SECONDS
from mooring_agent.core.object_layout import check_token
from mooring_api import names

_OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,251}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,251}[a-z0-9])?){0,20}")
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")
LEAST_MEMORY: Final = "128Mi"
"""Measured: 64Mi ends an agent at its first upload; 96Mi is enough for uploads over TLS beside a hook, and restore."""
_MOST_USER: Final = 2**31 - 1
_NOT_OURS: Final = (
    "/dev",
    "/proc",
    "/sys",
    names.POD_SOCKET_DIRECTORY,
    names.POD_STATE_DIRECTORY,
    names.POD_DESTINATION_PATH,
    names.POD_AUTOLOAD_PATH,
    names.POD_CA_PATH,
    names.POD_CREDENTIALS_PATH,
)


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def destination(text: str) -> tuple[str, Claim | None]:
    if re.fullmatch(r"s3://[^/\s]+(/[^/\s]+)*/?", text):
        return text, None
    if text.startswith("pvc://"):
        name, _, path = text.removeprefix("pvc://").partition("/")
        parts = [part for part in path.split("/") if part]
        if ".." in parts or "." in parts or ":" in path:
            raise ValueError(f"{text!r} is no path in a claim: write it without . and .. and :")
        claim = Claim(name=object_name(name), path="/".join(parts))
        return f"file://{claim.mount_path}", claim
    raise ValueError(f"{text!r} is no destination: write s3://bucket/prefix or pvc://claim/path")


def object_name(text: str) -> str:
    if len(text) > 253 or not _OBJECT_NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no object's name: use small letters, digits, - and .")
    return text


def ca_bundle(text: str) -> CaBundle:
    parts = text.split("/")
    if len(parts) == 2:
        parts.insert(0, CaSource.CONFIG_MAP)
    if len(parts) != 3 or parts[0] not in set(CaSource) or not parts[1] or not _KEY.fullmatch(parts[2]):
        raise ValueError(f"{text!r} names no bundle: write configmap/name/key, secret/name/key, or name/key")
    return CaBundle(source=CaSource(parts[0]), name=object_name(parts[1]), key=parts[2])


def container(text: str) -> str:
    if not text:
        raise ValueError("the name is empty: name a container of the pod, or leave the annotation out")
    return text


def directory(text: str) -> str:
    path = plain(text)
    if not text.startswith("/") or not path or ".." in text.split("/") or ":" in text:
        raise ValueError(f"{text!r} is no directory in the trainer: write an absolute path without .. and :")
    for taken in _NOT_OURS:
        if is_at_or_below(path, taken) or is_at_or_below(taken, path):
            raise ValueError(f"{text!r} collides with {taken}: choose another directory")
    return path


def size(text: str) -> str:
    if parse_quantity(text) < 1:
        raise ValueError(f"{text!r} is less than a byte: write it as 500Gi")
    return text


def is_memory(text: str) -> bool:
    if text.lower() not in ("memory", "disk"):
        raise ValueError(f"{text!r} is neither memory nor disk")
    return text.lower() == "memory"


def seconds(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= SECONDS:
        raise ValueError(f"{text!r} is no number of seconds from 1 to {SECONDS}")
    return int(text)


def amount(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError(f"{text!r} is not more than nothing")
    return text


def memory(text: str) -> str:
    if parse_quantity(text) < parse_quantity(LEAST_MEMORY):
        raise ValueError(f"{text!r} is less than the {LEAST_MEMORY} that the agent needs: write it as 256Mi")
    return text


def user(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > _MOST_USER:
        raise ValueError(f"{text!r} is no numeric user id, as 1000")
    return int(text)


def attempt(text: str) -> str:
    try:
        return check_token(text, "attempt")
    except MooringError as error:
        raise ValueError(f"{error}: {error.hint}") from error
