"""Finds what forbids injecting a pod, what its author may not intend, and the pod's index and attempt in its job.

Index and attempt come from labels: the variables by which launchers identify a rank reach only the trainer's container,
and often only when it starts.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mooring_agent.core.errors import MooringError
from mooring_agent.core.injection import volumes
from mooring_agent.core.injection.pod import MESH_PROXIES, OURS, others, overlap, present
from mooring_agent.core.injection.spec import Injection
from mooring_agent.core.injection.volumes import CheckpointPlace, ephemeral_limit
from mooring_agent.core.stored.object_layout import check_token
from mooring_api.names import ANNOTATION_INJECT, ANNOTATION_PREFIX

_COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_JOBSET: Final = "jobset.sigs.k8s.io/"
_TRAINING: Final = "training.kubeflow.org/"
_LEADER_WORKER: Final = "leaderworkerset.sigs.k8s.io/"
_STATEFUL_SET: Final = "apps.kubernetes.io/"


def node_rank(metadata: Mapping[str, Any]) -> int | None:
    """Return the pod's index in its job; None if nothing tells it. Exactly one pod of a job has 0."""
    labels = present(metadata, "labels", {})
    completion = _index(present(metadata, "annotations", {}), _COMPLETION_INDEX)
    if completion is None:
        completion = _index(labels, _COMPLETION_INDEX)
    # Not job-global-index: it counts a TrainJob's initializers first, and these have no agent.
    job = _index(labels, f"{_JOBSET}job-index")
    if job is not None:
        return job + (completion or 0)
    if completion is not None:
        return completion
    found = (
        _index(labels, f"{_LEADER_WORKER}worker-index"),
        _replica(labels),
        _index(labels, f"{_STATEFUL_SET}pod-index"),
    )
    return next((index for index in found if index is not None), None)


def attempt(metadata: Mapping[str, Any]) -> str:
    """Return an id that is unique to one start of the job and the same on all its pods.

    Empty if no label tells it; the run then has no resume pin.
    """
    labels = present(metadata, "labels", {})
    uid, restart = labels.get(f"{_JOBSET}jobset-uid"), _index(labels, f"{_JOBSET}restart-attempt")
    if not uid or restart is None:
        return ""
    try:
        return check_token(f"{uid}-{restart}", "attempt")
    except MooringError:
        return ""


def _replica(labels: Mapping[str, str]) -> int | None:
    """Return the index by Kubeflow's training operator, whose role label makes worker 0 the master if there is none."""
    index = _index(labels, f"{_TRAINING}replica-index")
    if index is None:
        return None
    kind = labels.get(f"{_TRAINING}replica-type", "").lower()
    if labels.get(f"{_TRAINING}job-role") == "master" or kind in ("master", "chief"):
        return 0
    return index if "mpi" in labels.get(f"{_TRAINING}operator-name", "") else index + 1


def _index(texts: Mapping[str, str], key: str) -> int | None:
    text = texts.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


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
"""Folders that restore and agent need to start, see Dockerfile.agent. The trainer's image may have nothing there."""
_OPEN: Final = "or use a bucket with the pod's workload identity, which the trainer has too"


def impossible(spec: Mapping[str, Any], injection: Injection, *, injected: bool) -> Iterator[str]:
    """Yield what forbids the injection wherever checkpoints go.

    `injected`: the pod was injected before, so containers and volumes with our names are ours.
    """
    of_node = present(spec, "nodeSelector", {})
    if present(spec, "os", {}).get("name") == "windows" or of_node.get("kubernetes.io/os") == "windows":
        yield f"Mooring runs only on Linux: remove {ANNOTATION_INJECT} from this Windows pod"
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
            yield f"the pod already has {name} in its {kind}, a name that Mooring uses: rename yours"


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
            f"the volume {place.volume} at {place.mount_path} would hide {hidden} in Mooring's image: "
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
