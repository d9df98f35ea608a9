"""What of a pod forbids the injection, and what its author may not have meant.

Owns the rules that need no change to be planned; others are found where the change is made.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mooring_agent.core.injection import job_place, pod_volumes
from mooring_agent.core.injection.checkpoint_place import CheckpointPlace, ephemeral_limit
from mooring_agent.core.injection.pod_shape import present
from mooring_agent.core.injection.spec import Injection
from mooring_agent.core.injection.trainer_container import MESH_PROXIES, OURS, is_at_or_below, others
from mooring_api.names import ANNOTATION_INJECT, ANNOTATION_PREFIX

_IN_OUR_IMAGE: Final = (
    "/bin",
    "/etc",
    "/lib",
    "/lib64",
    "/opt/mooring",
    "/sbin",
    "/usr/bin",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/bin",
    "/usr/local/lib",
    "/usr/sbin",
)
"""What restore and agent start from, see Dockerfile.agent. The trainer's image may have nothing there."""
_OPEN: Final = "or use a bucket with the pod's workload identity, which the trainer has too"


def impossible(spec: Mapping[str, Any], injection: Injection, *, injected: bool) -> Iterator[str]:
    """What forbids it whatever else the pod is. `injected`: it was injected before, so our names in it are ours."""
    of_node = present(spec, "nodeSelector", {})
    if present(spec, "os", {}).get("name") == "windows" or of_node.get("kubernetes.io/os") == "windows":
        yield f"Mooring runs on Linux alone: remove {ANNOTATION_INJECT} from this Windows pod"
    shared = next((key for key in ("shareProcessNamespace", "hostPID") if spec.get(key)), None)
    kept = _kept_from_the_trainer(injection)
    if shared and kept:
        # Of a process that it sees, a trainer of the same user reads every file below /proc/PID/root.
        yield f"with {shared} the trainer could reach {kept} through the agent's processes: remove {shared}, {_OPEN}"
    if injected:
        return
    all_names = (
        (one.get("name"), kind, ours)
        for kind, ours in (("initContainers", OURS), ("containers", OURS), ("volumes", pod_volumes.OURS))
        for one in present(spec, kind, [])
    )
    for name, kind, ours in all_names:
        if name in ours:
            yield f"the pod has {name} in its {kind} already, which is Mooring's name: give yours another"


def _kept_from_the_trainer(injection: Injection) -> str:
    """What agent and restore mount and the trainer does not; empty where that is nothing."""
    if injection.claim:
        return f"the claim {injection.claim.name} of the destination"
    return f"the Secret {injection.credentials}" if injection.credentials else ""


def unfit(place: CheckpointPlace, injection: Injection) -> Iterator[str]:
    """What cannot be in this place."""
    hidden = next((path for path in _IN_OUR_IMAGE if _overlap(path, place.mount_path)), None)
    if hidden:
        yield (
            f"the volume {place.volume} at {place.mount_path} would hide {hidden} of Mooring's own image, in which it "
            f"has the same path: mount it elsewhere, or choose another {ANNOTATION_PREFIX}checkpoint-directory"
        )
    if injection.temporary_files and place.directory == place.mount_path:
        yield (
            f"{ANNOTATION_PREFIX}temporary-files would put them among the checkpoints: "
            f"choose a {ANNOTATION_PREFIX}checkpoint-directory below a volume's mount, or none"
        )


def _overlap(one: str, other: str) -> bool:
    return is_at_or_below(one, other) or is_at_or_below(other, one)


def doubtful(metadata: Mapping[str, Any], spec: Mapping[str, Any], place: CheckpointPlace) -> Iterator[str]:
    """What works, and may not be what the user means."""
    if place.outlives_pod and job_place.is_one_of_many(metadata):
        yield (
            f"checkpoints lie on the volume {place.volume}: pods that run at the same time must not share it; "
            "give each its own, or leave it to Mooring's emptyDir"
        )
    if place.on_node_disk and ephemeral_limit(spec) and not place.outlives_pod:
        yield (
            "checkpoints count against the ephemeral-storage limit of the pod's containers, "
            f"{place.limit_bytes} bytes: beyond it the pod is evicted"
        )
    for proxy in others(spec, "containers"):
        if proxy.get("name") in MESH_PROXIES:
            yield (
                f"{proxy['name']} starts after restore, which then has no network: make it a native sidecar, "
                "or let the destination bypass it"
            )
