"""The volumes that the injection adds to a pod, and where our own containers have them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mooring_agent.core.injection.checkpoint_place import CheckpointPlace
from mooring_agent.core.injection.pod_shape import present
from mooring_agent.core.injection.quantity import quantity_or_nothing
from mooring_agent.core.injection.spec import CaBundle, CaSource, Injection
from mooring_api import names

_SOCKET_LIMIT: Final = "1Mi"
_STATE_LIMIT: Final = "1Gi"
"""A journal is some MiB, and beyond its limit the pod is evicted: so this is far more than it ever is."""
_AUTOLOAD_LIMIT: Final = "16Mi"
_CA_FILE: Final = "ca.crt"
_MODE: Final = 0o644
"""Kubernetes' own default. What the API server would add to ours is in it already, or the next review would differ."""
CA_PATH: Final = f"{names.POD_CA_PATH}/{_CA_FILE}"
SOCKET_MOUNT: Final[Mapping[str, Any]] = {"name": names.SOCKET_VOLUME, "mountPath": names.POD_SOCKET_DIRECTORY}
STATE_MOUNT: Final[Mapping[str, Any]] = {"name": names.STATE_VOLUME, "mountPath": names.POD_STATE_DIRECTORY}
"""Of restore and agent: what is kept there is believed, so the trainer must not have it."""
AUTOLOAD_MOUNT: Final[Mapping[str, Any]] = {"name": names.AUTOLOAD_VOLUME, "mountPath": names.POD_AUTOLOAD_PATH}
OURS: Final = frozenset(
    {
        names.CHECKPOINT_VOLUME,
        names.SOCKET_VOLUME,
        names.STATE_VOLUME,
        names.AUTOLOAD_VOLUME,
        names.DESTINATION_VOLUME,
        names.CREDENTIALS_VOLUME,
        names.CA_BUNDLE_VOLUME,
    }
)


def with_volumes(spec: Mapping[str, Any], injection: Injection, place: CheckpointPlace) -> list[Any]:
    """The pod's volumes with ours behind them; one of ours that is there is as it must be."""
    wanted = {volume["name"]: volume for volume in _volumes(injection, place)}
    kept = []
    for there in present(spec, "volumes", []):
        volume = wanted.pop(there.get("name") or "", there)
        kept.append(there if _measured(there) == _measured(volume) else volume)
    return [*kept, *wanted.values()]


def _measured(volume: Mapping[str, Any]) -> Mapping[str, Any]:
    """With its size as a number: the API server writes 1024Gi as 1Ti."""
    empty_dir = present(volume, "emptyDir", {})
    if empty_dir.get("sizeLimit") is None:
        return volume
    return {**volume, "emptyDir": {**empty_dir, "sizeLimit": quantity_or_nothing(empty_dir["sizeLimit"])}}


def store_mounts(injection: Injection) -> Sequence[Mapping[str, Any]]:
    """What restore and agent mount to reach the destination, and the trainer does not."""
    if claim := injection.claim:
        # The path alone, which kubelet makes: the rest of the claim is other runs'.
        part = {"subPath": claim.path} if claim.path else {}
        return [{"name": names.DESTINATION_VOLUME, "mountPath": claim.mount_path, **part}]
    mounts = []
    if injection.credentials:
        mounts.append({"name": names.CREDENTIALS_VOLUME, "mountPath": names.POD_CREDENTIALS_PATH, "readOnly": True})
    if injection.ca_bundle:
        mounts.append({"name": names.CA_BUNDLE_VOLUME, "mountPath": names.POD_CA_PATH, "readOnly": True})
    return mounts


def _volumes(injection: Injection, place: CheckpointPlace) -> Iterator[dict[str, Any]]:
    if place.added:
        yield dict(place.added)
    yield {"name": names.SOCKET_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": _SOCKET_LIMIT}}
    # On disk also where checkpoints are in memory: it would count against the agent's own limit there.
    yield {"name": names.STATE_VOLUME, "emptyDir": {"sizeLimit": _STATE_LIMIT}}
    if injection.autoload:
        yield {"name": names.AUTOLOAD_VOLUME, "emptyDir": {"sizeLimit": _AUTOLOAD_LIMIT}}
    if injection.claim:
        yield {
            "name": names.DESTINATION_VOLUME,
            "persistentVolumeClaim": {"claimName": injection.claim.name},
        }
        return
    if injection.credentials:
        yield {"name": names.CREDENTIALS_VOLUME, "secret": {"secretName": injection.credentials, "defaultMode": _MODE}}
    if injection.ca_bundle:
        yield {"name": names.CA_BUNDLE_VOLUME, **_ca_source(injection.ca_bundle)}


def _ca_source(bundle: CaBundle) -> dict[str, Any]:
    items = [{"key": bundle.key, "path": _CA_FILE}]
    if bundle.source is CaSource.SECRET:
        return {"secret": {"secretName": bundle.name, "items": items, "defaultMode": _MODE}}
    return {"configMap": {"name": bundle.name, "items": items, "defaultMode": _MODE}}
