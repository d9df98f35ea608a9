"""Whether a value is shaped like a pod, as far as the injection looks into it.

The API server sends real pods only. What else calls the webhook gets an answer too, so everything behind this check
may take the shape for granted. Null is the same as nothing, as Kubernetes has it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

Shape = type | tuple["Shape"] | dict[str, "Shape"]
"""A type; (of,) for a list; {} by key for an object, where "*" is every other key."""

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
    """What of `pod` is not shaped like a pod; nothing for a pod."""
    problems = list(_problems(pod, _POD, "the pod"))
    if not problems and not present(present(pod, "spec", {}), "containers", []):
        problems.append("the pod has no containers")
    return tuple(problems[:_SHOWN])


def present(value: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    """What is at `key`, and `otherwise` where nothing or null is."""
    found = value.get(key)
    return otherwise if found is None else found


def _problems(value: Any, shape: Shape, path: str) -> Iterator[str]:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path} is no object"
            return
        for key, inner in value.items():
            expected = shape.get(key, shape.get("*"))
            if expected is not None and (inner is not None or "*" in shape):
                yield from _problems(inner, expected, f"{path}.{key}")
    elif isinstance(shape, tuple):
        if not isinstance(value, list):
            yield f"{path} is no list"
            return
        for index, inner in enumerate(value):
            yield from _problems(inner, shape[0], f"{path}[{index}]")
    elif not isinstance(value, shape) or (shape is int and isinstance(value, bool)):
        yield f"{path} is not {_WORDS[shape]}"
