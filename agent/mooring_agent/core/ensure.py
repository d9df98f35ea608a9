"""Makes sure that a container of ours is as it must be, and leaves what others added to it.

Other webhooks add to our containers what they add to all: that stays. What they took away or changed comes back, but
for what a cluster decides for everybody: where images come from, and how containers are sized.
"""

from collections.abc import Mapping
from typing import Any, Final

_THE_CLUSTERS: Final = frozenset({"image", "imagePullPolicy", "resources"})
_MERGED: Final = frozenset({"securityContext"})
"""Objects of which every key counts by itself."""
_NAMED: Final = {"env": "name", "volumeMounts": "mountPath", "ports": "containerPort"}
"""Lists of which every item counts by itself, and what tells one item from another."""


def ensured(existing: Mapping[str, Any], wanted: Mapping[str, Any], *, as_before: bool) -> dict[str, Any]:
    """`existing` with all that is in `wanted`; once more changes nothing more.

    `as_before`: `existing` was made as `wanted` is, so what the cluster decides is not taken back from it.
    """
    kept = {key for key in _THE_CLUSTERS & existing.keys() if as_before and existing[key]}
    return {
        **existing,
        **{key: _ensured(key, existing.get(key), value) for key, value in wanted.items() if key not in kept},
    }


def _ensured(key: str, existing: Any, wanted: Any) -> Any:
    if key in _MERGED and isinstance(existing, dict):
        return {**existing, **wanted}
    if key in _NAMED and isinstance(existing, list):
        identity = _NAMED[key]
        ours = {item[identity] for item in wanted}
        # Ours first and in our order: a variable may refer to one before it.
        return [*wanted, *(item for item in existing if item.get(identity) not in ours)]
    return wanted
