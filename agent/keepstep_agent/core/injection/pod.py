"""Reads a pod as the injection sees it: its shape, its quantities, and which container trains.

The API server sends only real pods, but other clients may call the webhook. `shape_problems` checks the shape first;
everything that runs after it relies on that. Null means absent, as in Kubernetes. All findings are reported together.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from keepstep_api.names import AGENT_CONTAINER, ANNOTATION_PREFIX, RESTORE_CONTAINER


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the injection found. `problems` forbid it. Each text says what is wrong, then what to do about it."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


Shape = type | tuple["Shape"] | dict[str, "Shape"]
"""A type; a 1-tuple for a list of that shape; a dict by key for an object, where "*" stands for every other key."""

_NUMBER_OR_TEXT: Final = object
_SECURITY: Final[Shape] = {"runAsUser": int, "runAsGroup": int, "runAsNonRoot": bool, "seLinuxOptions": {"*": str}}
_QUANTITIES: Final[Shape] = {"*": _NUMBER_OR_TEXT}
_RESOURCES: Final[Shape] = {"limits": _QUANTITIES, "requests": _QUANTITIES}
_CONTAINER: Final[Shape] = {
    "name": str,
    "restartPolicy": str,
    "env": ({"name": str, "value": str, "valueFrom": {}},),
    "ports": ({"containerPort": int},),
    "volumeMounts": ({"name": str, "mountPath": str, "subPath": str, "subPathExpr": str, "readOnly": bool},),
    "resources": _RESOURCES,
    "securityContext": _SECURITY,
}
_POD: Final[Shape] = {
    "metadata": {"annotations": {"*": str}, "labels": {"*": str}},
    "spec": {
        "containers": (_CONTAINER,),
        "initContainers": (_CONTAINER,),
        "volumes": (
            {
                "name": str,
                "emptyDir": {"medium": str, "sizeLimit": _NUMBER_OR_TEXT},
                "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
            },
        ),
        "securityContext": _SECURITY,
        "resources": _RESOURCES,
        "terminationGracePeriodSeconds": int,
        "shareProcessNamespace": bool,
        "hostPID": bool,
        "hostNetwork": bool,
        "restartPolicy": str,
        "nodeSelector": {"*": str},
        "os": {"name": str},
    },
}
_WORDS: Final = {str: "a text", int: "a whole number", bool: "true or false"}
_SHOWN: Final = 5


def shape_problems(pod: Any) -> tuple[str, ...]:
    """Return where `pod` is not shaped like a pod; empty if it is."""
    problems = list(_problems(pod, _POD, "the pod"))
    if not problems and not present(present(pod, "spec", {}), "containers", []):
        problems.append("the pod has no containers")
    return tuple(problems[:_SHOWN])


def present(value: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    """Return the value at `key`, or `otherwise` if it is absent or null."""
    found = value.get(key)
    return otherwise if found is None else found


def _problems(value: Any, shape: Shape, path: str) -> Iterator[str]:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path} is not an object"
            return
        for key, inner in value.items():
            expected = shape.get(key, shape.get("*"))
            if expected is not None and (inner is not None or "*" in shape):
                yield from _problems(inner, expected, f"{path}.{key}")
    elif isinstance(shape, tuple):
        if not isinstance(value, list):
            yield f"{path} is not a list"
            return
        for index, inner in enumerate(value):
            yield from _problems(inner, shape[0], f"{path}[{index}]")
    elif not isinstance(value, shape) or (shape is int and isinstance(value, bool)):
        yield f"{path} is not {_WORDS[shape]}"


_SUFFIXES: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
# Two digits of an exponent cover more than any machine has.
_QUANTITY: Final = re.compile(r"([+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30}))(?:[eE]([+-]?\d{1,2})|([a-zA-Z]{0,2}))")


def parse_quantity(value: object) -> Decimal:
    """Parse a Kubernetes quantity, a string or a number in JSON. Raises ValueError."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    match = _QUANTITY.fullmatch(text)
    if not match or (match[3] or "") not in _SUFFIXES:
        raise ValueError(f"{value!r} is not a quantity such as 500m, 2, 256Mi or 10Gi")
    number = Decimal(match[1])
    return number.scaleb(int(match[2])) if match[2] else number * _SUFFIXES[match[3] or ""]


def quantity_or_nothing(value: object) -> Decimal:
    """Parse a quantity; 0 if there is none, or if it is invalid: the API server will refuse it."""
    try:
        return parse_quantity(value)
    except ValueError:
        return Decimal(0)


Container = Mapping[str, Any]

OURS: Final = frozenset({RESTORE_CONTAINER, AGENT_CONTAINER})
MESH_PROXIES: Final = frozenset({"istio-proxy", "linkerd-proxy"})
"""Containers that a service mesh's webhook adds to a pod, perhaps before ours runs."""
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
_LISTED: Final = 20
USUAL_NAMES: Final = ("node", "trainer", "pytorch")
"""Names that Kubeflow Trainer, its PyTorchJob, and users give to the container that trains."""


def find_trainer(
    metadata: Mapping[str, Any], spec: Mapping[str, Any], wanted: str, findings: Findings
) -> Container | None:
    """Return the container that trains; None if `findings` say why there is none.

    It is the `wanted` one, else the only one, else the only one with a usual name, else kubectl's default container.
    """
    containers = {container.get("name") or "": container for container in others(spec, "containers")}
    if wanted:
        if wanted not in containers:
            findings.problems.append(
                f"{ANNOTATION_PREFIX}container: the pod has no container {wanted}: name one of {_listed(containers)}"
            )
        return containers.get(wanted)
    candidates = [name for name in containers if name not in MESH_PROXIES]
    chosen = present(metadata, "annotations", {}).get(_DEFAULT_CONTAINER)
    for found in (
        candidates,
        [name for name in candidates if name in USUAL_NAMES],
        [name for name in candidates if name == chosen],
    ):
        if len(found) == 1:
            return containers[found[0]]
    findings.problems.append(
        f"cannot tell which container trains ({_listed(containers)}): name it in {ANNOTATION_PREFIX}container"
    )
    return None


def _listed(containers: Iterable[str]) -> str:
    return ", ".join([*containers][:_LISTED]) or "none"


def others(spec: Mapping[str, Any], key: str) -> Iterator[Container]:
    """Return the containers at `key` that are not ours, in their order."""
    return (container for container in present(spec, key, []) if container.get("name") not in OURS)


def variable(container: Container, name: str) -> Mapping[str, Any] | None:
    """Return the entry of `env` that takes effect: the last of that name."""
    found = [entry for entry in present(container, "env", []) if entry.get("name") == name]
    return found[-1] if found else None


def value_of(container: Container, name: str) -> str | None:
    """Return a variable's text if the pod holds it; None if it is absent or comes from another object."""
    entry = variable(container, name)
    return None if entry is None or entry.get("valueFrom") else present(entry, "value", "")


SYSTEM_FOLDERS: Final = (
    "/bin",
    "/etc",
    "/lib",
    "/lib64",
    "/sbin",
    "/usr/bin",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/bin",
    "/usr/local/lib",
    "/usr/sbin",
    "/usr/share",
)
"""Folders from which programs of any image start, ours and the trainer's: no volume may hide them."""


def mount_above(mounts: Iterable[Mapping[str, Any]], path: str) -> Mapping[str, Any] | None:
    """Return the mount on which `path` lies: the nearest one at or above it."""
    above = [mount for mount in mounts if is_at_or_below(path, present(mount, "mountPath", ""))]
    return max(above, key=lambda mount: len(plain(mount["mountPath"])), default=None)


def is_at_or_below(path: str, folder: str) -> bool:
    """Whether `path` lies in `folder`; both are absolute. Nothing counts as below the root, which is the image's."""
    return bool(plain(folder)) and f"{plain(path)}/".startswith(f"{plain(folder)}/")


def overlap(one: str, other: str) -> bool:
    """Whether one of the two folders lies in the other, or they are the same."""
    return is_at_or_below(one, other) or is_at_or_below(other, one)


def plain(path: str) -> str:
    """Return the path without `.`, repeated slashes and the last slash; empty for the root."""
    return "".join(f"/{part}" for part in path.split("/") if part not in ("", "."))


def last_name(path: str) -> str:
    """Return the last name of a plain path."""
    return path.rpartition("/")[2]
