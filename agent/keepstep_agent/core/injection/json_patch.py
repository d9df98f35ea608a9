"""Computes the difference of two JSON values as a JSON Patch (RFC 6902) that people can read.

List items with the same `mountPath` or `name` count as the same item, so an inserted item is one `add`, and a change
within an item is an operation inside it. The time grows with the sum of the lists' lengths, not with their product,
because a webhook compares untrusted input.
"""

from collections.abc import Iterator
from typing import Any, Final

Operation = dict[str, Any]
"""Has `op`, `path` and, unless it removes, `value`."""

_IDENTITIES: Final = ("mountPath", "name")


def difference(before: Any, after: Any, path: str = "") -> Iterator[Operation]:
    """Yield the operations that turn `before` into `after`, in the order in which they apply."""
    if before is after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_objects(before, after, path)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_lists(before, after, path)
    elif before != after or type(before) is not type(after):
        yield {"op": "replace", "path": path, "value": after}


def _of_objects(before: dict[str, Any], after: dict[str, Any], path: str) -> Iterator[Operation]:
    for key in before:
        if key not in after:
            yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in after.items():
        inner = f"{path}/{_escaped(key)}"
        if key in before:
            yield from difference(before[key], value, inner)
        else:
            yield {"op": "add", "path": inner, "value": value}


def _of_lists(before: list[Any], after: list[Any], path: str) -> Iterator[Operation]:
    """Compare two lists in one pass. Items whose order changed are removed and added again."""
    kept = set(map(_identity, after))
    at = 0
    for index, value in enumerate(after):
        while at < len(before) and _identity(before[at]) not in kept:
            yield {"op": "remove", "path": f"{path}/{index}"}
            at += 1
        if at < len(before) and _identity(before[at]) == _identity(value):
            yield from difference(before[at], value, f"{path}/{index}")
            at += 1
        else:
            yield {"op": "add", "path": f"{path}/{index}", "value": value}
    for _ in before[at:]:
        yield {"op": "remove", "path": f"{path}/{len(after)}"}


def _identity(value: Any) -> str:
    if isinstance(value, dict):
        for key in _IDENTITIES:
            if isinstance(value.get(key), str):
                return f"{key} {value[key]}"
    return repr(value)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
