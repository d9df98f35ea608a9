"""Makes sure that a container of ours is as it must be, and leaves what others added to it.

Other webhooks add to our containers what they add to all: that stays. What they took away or changed comes back.
"""

from collections.abc import Mapping
from typing import Any, Final

_MERGED: Final = frozenset({"resources", "limits", "requests", "securityContext"})
"""Objects of which every key counts by itself."""
_NAMED: Final = {"env": "name", "volumeMounts": "mountPath", "ports": "containerPort"}
"""Lists of which every item counts by itself, and what tells one item from another."""


def ensured(existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`existing` with all that is in `wanted`; once more changes nothing more."""
    return {**existing, **{key: _ensured(key, existing.get(key), value) for key, value in wanted.items()}}


def _ensured(key: str, existing: Any, wanted: Any) -> Any:
    if key in _MERGED and isinstance(existing, dict):
        return ensured(existing, wanted)
    if key in _NAMED and isinstance(existing, list):
        identity = _NAMED[key]
        ours = {item[identity] for item in wanted}
        # Ours first and in our order: a variable may refer to one before it.
        return [*wanted, *(item for item in existing if item.get(identity) not in ours)]
    return wanted
