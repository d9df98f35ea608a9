"""Where checkpoints lie in a pod: on a volume of the user's that is there already, else on an emptyDir of ours.

The volume is mounted whole and once, at the same path in trainer, restore and agent: hard links end at a mount, and a
subPath is one. Owns this choice and what the agent must be told of the volume.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from mooring_agent.core.injection.findings import Findings
from mooring_agent.core.injection.pod_shape import present
from mooring_agent.core.injection.quantity import quantity_or_nothing
from mooring_agent.core.injection.spec import Injection
from mooring_agent.core.injection.trainer_container import Container, is_at_or_below, mount_above, others, plain
from mooring_api.names import ANNOTATION_PREFIX, CHECKPOINT_DIRECTORY, CHECKPOINT_VOLUME, POD_VOLUME_PATH

_READ_ONLY_KINDS: Final = ("configMap", "secret", "downwardAPI", "projected", "image")
_DIRECTORY_ANNOTATION: Final = f"{ANNOTATION_PREFIX}checkpoint-directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlace:
    """`added`: the volume that the pod does not have yet. `limit_bytes`: what the volume may grow to; 0: no limit."""

    volume: str
    mount_path: str
    directory: str
    added: Mapping[str, Any] | None = None
    limit_bytes: int = 0
    on_node_disk: bool = True
    """Kubelet evicts when the node's own disk fills up, and only this volume is on it."""
    outlives_pod: bool = False
    in_memory: bool = False
    """What a container writes there counts as memory of its own."""

    @property
    def mount(self) -> dict[str, Any]:
        return {"name": self.volume, "mountPath": self.mount_path}


def find_place(
    spec: Mapping[str, Any], trainer: Container, injection: Injection, findings: Findings
) -> CheckpointPlace | None:
    """None: there is none, and `findings` say why."""
    directory = injection.checkpoint_directory or f"{POD_VOLUME_PATH}/{CHECKPOINT_DIRECTORY}"
    mount = mount_above(present(trainer, "volumeMounts", []), directory)
    if mount is None or mount.get("name") == CHECKPOINT_VOLUME:
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
    """Where our emptyDir is mounted: the directory itself unless it lies in our usual place."""
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
    """Why checkpoints cannot lie there, and what to do; empty if they can."""
    elsewhere = f"or choose another {_DIRECTORY_ANNOTATION}"
    path = mount["mountPath"]
    if volume is None:
        return f"which the pod does not have: add it to spec.volumes, {elsewhere}"
    if mount.get("subPath") or mount.get("subPathExpr"):
        return f"of which {path} is a subPath, and hard links end there: mount the volume whole, {elsewhere}"
    # A claim, NFS, CSI and others each say it in their own place, by the same name.
    if mount.get("readOnly") or any(isinstance(kind, dict) and kind.get("readOnly") for kind in volume.values()):
        return f"which is read-only at {path}: mount it writable, {elsewhere}"
    if kinds := [kind for kind in _READ_ONLY_KINDS if kind in volume]:
        return f"a {kinds[0]}, to which nobody can write: choose another {_DIRECTORY_ANNOTATION}"
    return ""


def _is_on_disk(empty_dir: Mapping[str, Any]) -> bool:
    return not present(empty_dir, "medium", "")


def _limit_bytes(empty_dir: Mapping[str, Any], spec: Mapping[str, Any]) -> int:
    """What kubelet evicts the pod at: the emptyDir's own limit, or what all containers' limits allow together.

    Everything in an emptyDir on disk counts against the sum of these.
    """
    limits = [quantity_or_nothing(empty_dir.get("sizeLimit"))]
    if _is_on_disk(empty_dir):
        limits.append(ephemeral_limit(spec))
    return int(min((limit for limit in limits if limit > 0), default=Decimal(0)))


def ephemeral_limit(spec: Mapping[str, Any]) -> Decimal:
    """Bytes of ephemeral storage that the user's containers may use together, as kubelet adds them up; 0: as many as
    there are. A limit of one alone is one of the whole pod, also if that one is an init container."""
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
