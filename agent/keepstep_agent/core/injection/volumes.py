"""Chooses where checkpoints are in a pod, and adds the volumes.

Checkpoints go to a volume that the user already mounts, or else to an emptyDir that the injection adds. The volume is
mounted whole, at the same path in trainer, restore and agent: hard links do not cross mounts, and a subPath is a mount
of its own. `output_directories` adds such mounts, for the trainer alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from keepstep_agent.core.injection.pod import (
    Container,
    Findings,
    is_at_or_below,
    mount_above,
    others,
    plain,
    present,
    quantity_or_nothing,
)
from keepstep_agent.core.injection.spec import CaBundle, CaSource, Injection
from keepstep_api import names
from keepstep_api.names import ANNOTATION_PREFIX, CHECKPOINT_DIRECTORY, CHECKPOINT_VOLUME, POD_VOLUME_PATH

_READ_ONLY_KINDS: Final = ("configMap", "secret", "downwardAPI", "projected", "image")
_DIRECTORY_ANNOTATION: Final = f"{ANNOTATION_PREFIX}checkpoint-directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlace:
    """Where checkpoints go in a pod.

    `added` is the volume if the pod does not have it yet. `limit_bytes` is what the volume may grow to; 0: no limit.
    """

    volume: str
    mount_path: str
    directory: str
    added: Mapping[str, Any] | None = None
    limit_bytes: int = 0
    on_node_disk: bool = True
    """The volume is on the node's own disk, and kubelet evicts the pod when that fills up."""
    outlives_pod: bool = False
    in_memory: bool = False
    """What a container writes there counts as its own memory."""

    @property
    def mount(self) -> dict[str, Any]:
        return {"name": self.volume, "mountPath": self.mount_path}


def find_place(
    spec: Mapping[str, Any], trainer: Container, injection: Injection, findings: Findings
) -> CheckpointPlace | None:
    """Return where checkpoints go; None if `findings` say why there is no such place."""
    directory = injection.checkpoint_directory or f"{POD_VOLUME_PATH}/{CHECKPOINT_DIRECTORY}"
    mount = mount_above(present(trainer, "volumeMounts", []), directory)
    if mount is None or (mount.get("name") == CHECKPOINT_VOLUME and not mount.get("subPath")):
        path = plain(mount["mountPath"]) if mount else _own_path(directory)
        return _own_place(spec, trainer, injection, directory, path)
    name = present(mount, "name", "")
    volume = next((one for one in present(spec, "volumes", []) if one.get("name") == name), None)
    problem = _unfit(mount, volume)
    if problem or volume is None:
        findings.problems.append(f"checkpoints in {directory} would lie on the volume {name}, {problem}")
        return None
    if injection.size_limit or injection.in_memory:
        findings.warnings.append(
            f"{directory} lies on the pod's own volume {name}: {ANNOTATION_PREFIX}size-limit and "
            f"{ANNOTATION_PREFIX}medium do nothing, its size is set there"
        )
    empty_dir = volume.get("emptyDir")
    temporary = empty_dir is not None or "ephemeral" in volume
    return CheckpointPlace(
        volume=name,
        mount_path=plain(mount["mountPath"]),
        directory=directory,
        limit_bytes=_limit_bytes(empty_dir, spec) if empty_dir is not None else 0,
        on_node_disk=_is_on_disk(empty_dir) if empty_dir is not None else "hostPath" in volume,
        outlives_pod=not temporary,
        in_memory=empty_dir is not None and not _is_on_disk(empty_dir),
    )


def _own_path(directory: str) -> str:
    """Return where our emptyDir is mounted: at the directory itself, unless that lies below our usual mount path."""
    return POD_VOLUME_PATH if is_at_or_below(directory, POD_VOLUME_PATH) else directory


def _own_place(
    spec: Mapping[str, Any], trainer: Container, injection: Injection, directory: str, path: str
) -> CheckpointPlace:
    empty_dir: dict[str, Any] = {}
    if injection.in_memory:
        empty_dir["medium"] = "Memory"
    if injection.size_limit:
        empty_dir["sizeLimit"] = injection.size_limit
    return CheckpointPlace(
        volume=CHECKPOINT_VOLUME,
        mount_path=path,
        directory=directory,
        added={"name": CHECKPOINT_VOLUME, "emptyDir": empty_dir},
        limit_bytes=_limit_bytes(empty_dir, spec),
        on_node_disk=_is_on_disk(empty_dir),
        in_memory=not _is_on_disk(empty_dir),
    )


def _unfit(mount: Mapping[str, Any], volume: Mapping[str, Any] | None) -> str:
    """Return why checkpoints cannot be on this volume, and what to do; empty if they can."""
    elsewhere = f"or choose another {_DIRECTORY_ANNOTATION}"
    path = mount["mountPath"]
    if volume is None:
        return f"which the pod does not have: add it to spec.volumes, {elsewhere}"
    if mount.get("subPath") or mount.get("subPathExpr"):
        return f"of which {path} is a subPath, and hard links end there: mount the volume whole, {elsewhere}"
    # A claim, NFS, CSI and other sources each have their own `readOnly` field.
    if mount.get("readOnly") or any(isinstance(kind, dict) and kind.get("readOnly") for kind in volume.values()):
        return f"which is read-only at {path}: mount it writable, {elsewhere}"
    if kinds := [kind for kind in _READ_ONLY_KINDS if kind in volume]:
        return f"a {kinds[0]}, to which nobody can write: choose another {_DIRECTORY_ANNOTATION}"
    return ""


def _is_on_disk(empty_dir: Mapping[str, Any]) -> bool:
    return not present(empty_dir, "medium", "")


def _limit_bytes(empty_dir: Mapping[str, Any], spec: Mapping[str, Any]) -> int:
    """Return the size at which kubelet evicts the pod; 0: no limit.

    It is the smaller of the emptyDir's own limit and, for an emptyDir on disk, the ephemeral-storage limit of all
    containers together: everything in such an emptyDir counts against it.
    """
    limits = [quantity_or_nothing(empty_dir.get("sizeLimit"))]
    if _is_on_disk(empty_dir):
        limits.append(ephemeral_limit(spec))
    return int(min((limit for limit in limits if limit > 0), default=Decimal(0)))


def ephemeral_limit(spec: Mapping[str, Any]) -> Decimal:
    """Return how many bytes of ephemeral storage the user's containers may use together; 0: no limit.

    It adds up as kubelet does. A limit of a single container, even of an init container, limits the whole pod.
    """
    together = sum(map(_own_limit, others(spec, "containers")), Decimal(0))
    sidecars, at_start = Decimal(0), Decimal(0)
    for container in others(spec, "initContainers"):
        own = _own_limit(container)
        if container.get("restartPolicy") == "Always":
            sidecars += own
            own = Decimal(0)
        at_start = max(at_start, sidecars + own)
    return max(together + sidecars, at_start)


def _own_limit(container: Container) -> Decimal:
    limits: Mapping[str, Any] = present(present(container, "resources", {}), "limits", {})
    return quantity_or_nothing(limits.get("ephemeral-storage"))


_SOCKET_LIMIT: Final = "1Mi"
_STATE_LIMIT: Final = "1Gi"
"""Far more than the few MiB of a journal, because the pod is evicted beyond it."""
_AUTOLOAD_LIMIT: Final = "64Mi"
"""Three times what `keepstep restore --autoload-to` copies, gRPC included: the pod is evicted beyond it."""
_CA_FILE: Final = "ca.crt"
_MODE: Final = 0o644
"""Kubernetes' own default. We write out what the API server would add, or the next review would see a difference."""
CA_PATH: Final = f"{names.POD_CA_PATH}/{_CA_FILE}"
SOCKET_MOUNT: Final[Mapping[str, Any]] = {"name": names.SOCKET_VOLUME, "mountPath": names.POD_SOCKET_DIRECTORY}
STATE_MOUNT: Final[Mapping[str, Any]] = {"name": names.STATE_VOLUME, "mountPath": names.POD_STATE_DIRECTORY}
"""For restore and agent only. They trust what is stored there, so the trainer must not mount it."""
AUTOLOAD_MOUNT: Final[Mapping[str, Any]] = {"name": names.AUTOLOAD_VOLUME, "mountPath": names.POD_AUTOLOAD_PATH}
OUR_MOUNTS: Final = (
    names.POD_SOCKET_DIRECTORY,
    # The same in most images, where /var/run is a link.
    f"/var{names.POD_SOCKET_DIRECTORY}",
    names.POD_STATE_DIRECTORY,
    names.POD_DESTINATION_PATH,
    names.POD_AUTOLOAD_PATH,
    names.POD_CA_PATH,
    names.POD_CREDENTIALS_PATH,
)
"""Where restore and agent mount volumes of their own. A volume of the trainer at or above one of them could be used to
replace it, and inside one it would be among the agent's own files."""
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
    """Return the pod's volumes with ours after them. A volume of ours that is there but differs is replaced."""
    wanted = {volume["name"]: volume for volume in _volumes(injection, place)}
    kept = []
    for there in present(spec, "volumes", []):
        volume = wanted.pop(there.get("name") or "", there)
        kept.append(there if _measured(there) == _measured(volume) else volume)
    return [*kept, *wanted.values()]


def _measured(volume: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the volume with its size limit as a number, to compare it: the API server writes 1024Gi as 1Ti."""
    empty_dir = present(volume, "emptyDir", {})
    if empty_dir.get("sizeLimit") is None:
        return volume
    return {**volume, "emptyDir": {**empty_dir, "sizeLimit": quantity_or_nothing(empty_dir["sizeLimit"])}}


def store_mounts(injection: Injection) -> Sequence[Mapping[str, Any]]:
    """Return the mounts by which restore and agent reach the destination. The trainer does not get them."""
    if claim := injection.claim:
        # Only the path, which kubelet creates: the rest of the claim belongs to other runs.
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
    # On disk even if checkpoints are in memory: there it would count against the agent's memory limit.
    yield {"name": names.STATE_VOLUME, "emptyDir": {"sizeLimit": _STATE_LIMIT}}
    if injection.autoload:
        yield {"name": names.AUTOLOAD_VOLUME, "emptyDir": {"sizeLimit": _AUTOLOAD_LIMIT}}
    yield from store_volumes(injection)


def store_volumes(injection: Injection) -> Iterator[dict[str, Any]]:
    """Yield the volumes by which restore and agent reach the destination."""
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
