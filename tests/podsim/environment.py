"""The environment of one container, as kubelet puts it together from its manifest."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.podsim.errors import ContainerConfigError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """What a pod refers to by name: the texts of Secrets and ConfigMaps, and the directories of claims."""

    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    config_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def texts(self, kind: str, name: str, *, optional: bool) -> Mapping[str, str] | None:
        """`kind` is secret or configMap. Raises ContainerConfigError where there is none and there must be one."""
        found = (self.secrets if kind == "secret" else self.config_maps).get(name)
        if found is None and not optional:
            raise ContainerConfigError(f"{kind} {name!r} not found")
        return found


def environment_of(container: Mapping[str, Any], pod: Mapping[str, Any], objects: Objects) -> dict[str, str]:
    """Only what the manifest says; the image's own is beneath it. A later entry hides an earlier one of its name.

    `pod` is the manifest with its name and uid. Raises ContainerConfigError (k/k kubelet_pods.go,
    makeEnvironmentVariables).
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found.update(_all_of(source, objects))
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            text = _value_from(entry["valueFrom"], pod, objects)
            if text is not None:
                found[entry["name"]] = text
        else:
            found[entry["name"]] = expand(entry.get("value", ""), found)
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` of a variable that is known by now; `$$(NAME)` is the text `$(NAME)`.

    [k/k third_party/forked/golang/expansion]
    """

    def replace(match: "re.Match[str]") -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$\(|\$\(([^)]*)\)", replace, text)


def expand_all(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    return [expand(word, variables) for word in words]


def _all_of(source: Mapping[str, Any], objects: Objects) -> Iterator[tuple[str, str]]:
    for key, kind in (("secretRef", "secret"), ("configMapRef", "configMap")):
        if key in source:
            texts = objects.texts(kind, source[key]["name"], optional=source[key].get("optional", False)) or {}
            yield from ((source.get("prefix", "") + name, text) for name, text in texts.items())


def _value_from(source: Mapping[str, Any], pod: Mapping[str, Any], objects: Objects) -> str | None:
    """None: an optional key that is not there, whose variable is then not set."""
    match source:
        case {"fieldRef": {"fieldPath": str(path)}}:
            return field_of(pod, path)
        case {"secretKeyRef": reference}:
            kind = "secret"
        case {"configMapKeyRef": reference}:
            kind = "configMap"
        case _:
            raise UnsupportedError(f"the simulator reads no variable from {sorted(source)}")
    optional = reference.get("optional", False)
    texts = objects.texts(kind, reference["name"], optional=optional) or {}
    text = texts.get(reference["key"])
    if text is None and not optional:
        raise ContainerConfigError(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
    return text


def field_of(pod: Mapping[str, Any], path: str) -> str:
    """A field of the downward API. A label or annotation that is not there is empty text, never an error."""
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        texts: Mapping[str, str] = pod["metadata"].get(found[1], {})
        return texts.get(found[2], "")
    known = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"].get("namespace", "default"),
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": "podsim",
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }
    if path not in known:
        raise UnsupportedError(f"the simulator has no field {path}")
    return str(known[path])
