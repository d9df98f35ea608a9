"""Finds what forbids injecting a pod, and what its author may not intend."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from keepstep_agent.core.injection import volumes
from keepstep_agent.core.injection.job_identity import node_rank
from keepstep_agent.core.injection.pod import MESH_PROXIES, OURS, others, overlap, present
from keepstep_agent.core.injection.spec import Injection
from keepstep_agent.core.injection.volumes import CheckpointPlace, ephemeral_limit
from keepstep_api.names import ANNOTATION_INJECT, ANNOTATION_PREFIX

_IN_OUR_IMAGE: Final = (
    "/bin",
    "/etc",
    "/lib",
    "/lib64",
    "/opt/keepstep",
    "/sbin",
    "/usr/bin",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/bin",
    "/usr/local/lib",
    "/usr/sbin",
)
"""Folders that restore and agent need to start, see Dockerfile.agent. The trainer's image may have nothing there."""
_OPEN: Final = "or use a bucket with the pod's workload identity, which the trainer has too"


def impossible(spec: Mapping[str, Any], injection: Injection, *, injected: bool) -> Iterator[str]:
    """Yield what forbids the injection wherever checkpoints go.

    `injected`: the pod was injected before, so containers and volumes with our names are ours.
    """
    of_node = present(spec, "nodeSelector", {})
    if present(spec, "os", {}).get("name") == "windows" or of_node.get("kubernetes.io/os") == "windows":
        yield f"Keepstep runs only on Linux: remove {ANNOTATION_INJECT} from this Windows pod"
    shared = next((key for key in ("shareProcessNamespace", "hostPID") if spec.get(key)), None)
    kept = _kept_from_the_trainer(injection)
    if shared and kept:
        # A trainer that sees the agent's processes, and runs as the same user, can read their files in /proc/PID/root.
        yield f"with {shared} the trainer could reach {kept} through the agent's processes: remove {shared}, {_OPEN}"
    if injected:
        return
    all_names = (
        (one.get("name"), kind, ours)
        for kind, ours in (("initContainers", OURS), ("containers", OURS), ("volumes", volumes.OURS))
        for one in present(spec, kind, [])
    )
    for name, kind, ours in all_names:
        if name in ours:
            yield f"the pod already has {name} in its {kind}, a name that Keepstep uses: rename yours"


def _kept_from_the_trainer(injection: Injection) -> str:
    """Name what agent and restore mount and the trainer must not reach; empty if there is nothing."""
    if injection.claim:
        return f"the claim {injection.claim.name} of the destination"
    return f"the Secret {injection.credentials}" if injection.credentials else ""


def unfit(place: CheckpointPlace, injection: Injection) -> Iterator[str]:
    """Yield why checkpoints, or temporary files, cannot be in this place."""
    hidden = next((path for path in _IN_OUR_IMAGE if overlap(path, place.mount_path)), None)
    if hidden:
        yield (
            f"the volume {place.volume} at {place.mount_path} would hide {hidden} in Keepstep's image: "
            f"mount it elsewhere, or choose another {ANNOTATION_PREFIX}checkpoint-directory"
        )
    if injection.temporary_files and place.directory == place.mount_path:
        yield (
            f"{ANNOTATION_PREFIX}temporary-files would mix temporary files with checkpoints: "
            f"choose a {ANNOTATION_PREFIX}checkpoint-directory below a volume's mount, or leave that annotation out"
        )


def doubtful(metadata: Mapping[str, Any], spec: Mapping[str, Any], place: CheckpointPlace) -> Iterator[str]:
    """Yield what works but may not be what the user intends."""
    if place.outlives_pod and node_rank(metadata) is not None:
        yield (
            f"checkpoints lie on the volume {place.volume}: pods that run at the same time must not share it; "
            "give each its own, or leave it to Keepstep's emptyDir"
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
