"""As much of an API server's storage as the webhook's certificates need: versions, conflicts, strategic merge patches.

What a real one refuses is refused here too: a patch of an older version (409), a webhook without rules.
"""

import copy
from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]


class RefusedError(Exception):
    """As a Status tells it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class ObjectShelf:
    """Objects by resource and name. `version` is the last change's."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], Document] = {}
        self.version = 100

    def get(self, resource: str, name: str) -> Document:
        found = self._objects.get((resource, name))
        if found is None:
            raise RefusedError(404, "NotFound", f'{resource} "{name}" not found')
        return copy.deepcopy(found)

    def selected(self, resource: str, *, label: str = "", field: str = "") -> list[Document]:
        """Objects with the one label that `label` names, as `key=value`, or with the name in `field`; all without."""
        found = [one["metadata"] for (kind, _), one in self._objects.items() if kind == resource]
        if not field and not label:
            chosen = found
        elif field:
            chosen = [one for one in found if f"metadata.name={one['name']}" == field]
        else:
            key, _, value = label.partition("=")
            chosen = [one for one in found if one.get("labels", {}).get(key) == value]
        return [self.get(resource, one["name"]) for one in chosen]

    def create(self, resource: str, content: Mapping[str, Any]) -> Document:
        name = content["metadata"]["name"]
        if (resource, name) in self._objects:
            raise RefusedError(409, "AlreadyExists", f'{resource} "{name}" already exists')
        return self._put(resource, name, copy.deepcopy(dict(content)))

    def patch(self, resource: str, name: str, patch: Mapping[str, Any]) -> Document:
        found = self.get(resource, name)
        expected = patch.get("metadata", {}).get("resourceVersion")
        if expected is not None and expected != found["metadata"]["resourceVersion"]:
            raise RefusedError(409, "Conflict", f'{resource} "{name}" has been modified')
        return self._put(resource, name, _merged(found, patch))

    def delete(self, resource: str, name: str) -> None:
        self.get(resource, name)
        del self._objects[resource, name]

    def _put(self, resource: str, name: str, content: Document) -> Document:
        _check(resource, content)
        before = self._objects.get((resource, name))
        version = None if before is None else before["metadata"]["resourceVersion"]
        content.setdefault("metadata", {})["resourceVersion"] = version
        # Like the real one: what changes nothing makes no version.
        if content != before:
            self.version += 1
            content["metadata"] |= {"name": name, "resourceVersion": str(self.version)}
            self._objects[resource, name] = content
        return copy.deepcopy(content)


def _merged(found: Document, patch: Mapping[str, Any]) -> Document:
    merged = dict(found)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif name == "webhooks":
            by_name = {one["name"]: one for one in merged.get(name) or []}
            for one in value:
                by_name[one["name"]] = _merged(by_name.get(one["name"], {}), one)
            merged[name] = list(by_name.values())
        elif isinstance(value, Mapping):
            merged[name] = _merged(merged.get(name) or {}, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _check(resource: str, content: Document) -> None:
    if resource == "mutatingwebhookconfigurations":
        for webhook in content["webhooks"]:
            if "rules" not in webhook:
                raise RefusedError(422, "Invalid", f"webhooks[{webhook['name']}].rules: required")
