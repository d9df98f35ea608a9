"""What a pod's own labels say of its place in a job: which node it is, and which start of the job this is.

The variables by which launchers tell a rank reach the trainer's container alone, and often only when it starts.
"""

from collections.abc import Mapping
from typing import Any, Final

from mooring_agent.core.errors import MooringError
from mooring_agent.core.injection.pod_shape import present
from mooring_agent.core.object_layout import check_token

_COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_JOBSET: Final = "jobset.sigs.k8s.io/"
_TRAINING: Final = "training.kubeflow.org/"
_LEADER_WORKER: Final = "leaderworkerset.sigs.k8s.io/"
_STATEFUL_SET: Final = "apps.kubernetes.io/"


def node_rank(metadata: Mapping[str, Any]) -> int | None:
    """0 in exactly one pod of the job, which is what matters; None where nothing says it."""
    labels = present(metadata, "labels", {})
    completion = _index(present(metadata, "annotations", {}), _COMPLETION_INDEX)
    if completion is None:
        completion = _index(labels, _COMPLETION_INDEX)
    # Not job-global-index: of a TrainJob's initializers, which come first, none has an agent.
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
    """Unique to one start of the job and the same on all its pods. Empty where nothing says it: no pin then."""
    labels = present(metadata, "labels", {})
    uid, restart = labels.get(f"{_JOBSET}jobset-uid"), _index(labels, f"{_JOBSET}restart-attempt")
    if not uid or restart is None:
        return ""
    try:
        return check_token(f"{uid}-{restart}", "attempt")
    except MooringError:
        return ""


def is_one_of_many(metadata: Mapping[str, Any]) -> bool:
    """Whether there may be other pods like this one at the same time."""
    return node_rank(metadata) is not None


def _replica(labels: Mapping[str, str]) -> int | None:
    """Of Kubeflow's training operator. Where there is no master, it calls the first worker so by its role."""
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
