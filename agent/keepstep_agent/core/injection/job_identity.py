"""What the labels of a pod say of its job: which job it is, and which of the job's pods this one is.

All of it comes from labels, annotations and owners: the variables by which launchers identify a rank reach only the
trainer's container, and often only when it starts. Nothing depends on it: where it is missing, or the same for two
starts of a job, restore finds out by what was committed since (`core.policies.restore_choice.may_join`).
"""

from collections.abc import Mapping
from typing import Any, Final

from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.injection.pod import present
from keepstep_agent.core.stored.object_layout import check_token

_JOB: Final = "batch.kubernetes.io/"
_COMPLETION_INDEX: Final = f"{_JOB}job-completion-index"
_JOBSET: Final = "jobset.sigs.k8s.io/"
_TRAINING: Final = "training.kubeflow.org/"
_LEADER_WORKER: Final = "leaderworkerset.sigs.k8s.io/"
_STATEFUL_SET: Final = "apps.kubernetes.io/"
_WORKLOAD: Final = "kueue.x-k8s.io/workload"


def node_rank(metadata: Mapping[str, Any]) -> int | None:
    """Return the pod's index in its job; None if nothing tells it.

    All pods of a job have different ones, and one has 0; of a JobSet these are the pods of one replicated job. Their
    order is not always that of the trainer's ranks.
    """
    labels = present(metadata, "labels", {})
    completion = _completion(metadata)
    # Not job-global-index: it counts a TrainJob's initializers first, and these have no agent.
    job = _index(labels, f"{_JOBSET}job-index")
    if job is not None:
        # Nothing says how many pods each job has, so the first pods of all jobs come first.
        return job + (completion or 0) * (_index(labels, f"{_JOBSET}replicatedjob-replicas") or 1)
    if completion is not None:
        return completion
    found = (
        _group_and_worker(labels)[1],
        _replica(labels),
        _index(labels, f"{_STATEFUL_SET}pod-index"),
    )
    return next((index for index in found if index is not None), None)


def place(metadata: Mapping[str, Any]) -> str:
    """Return a word that tells this pod from all others of its job, and that its replacement has too.

    Empty if nothing tells it.
    """
    labels = present(metadata, "labels", {})
    completion = _completion(metadata)
    found: tuple[tuple[str | int | None, ...], ...] = (
        (labels.get(f"{_JOBSET}replicatedjob-name"), _index(labels, f"{_JOBSET}job-index"), completion or 0),
        (completion,),
        _group_and_worker(labels),
        (labels.get(f"{_TRAINING}replica-type"), _index(labels, f"{_TRAINING}replica-index")),
        (_index(labels, f"{_STATEFUL_SET}pod-index"),),
    )
    return _first_word(found)


def attempt(metadata: Mapping[str, Any]) -> str:
    """Return an id of the job that all its pods have. It changes with each start as far as the launcher counts them.

    Empty if nothing tells it, or which of the job's pods this is; the pods then have no resume pin.
    """
    if not place(metadata):
        return ""
    labels = present(metadata, "labels", {})
    # Not what counts the restarts of one Job of a set, or of one index of a Job: the job's other pods go on. A JobSet
    # that is suspended and resumed keeps its restart count. Newer ones count these starts as well.
    executed = _index(present(metadata, "annotations", {}), f"{_JOBSET}execution-attempt")
    jobset = (labels.get(f"{_JOBSET}jobset-uid"), _index(labels, f"{_JOBSET}restart-attempt"))
    found: tuple[tuple[str | int | None, ...], ...] = (
        jobset if executed is None else (*jobset, executed),
        (labels.get(f"{_JOB}controller-uid"),),
        (labels.get(f"{_LEADER_WORKER}name"), "group", _group_and_worker(labels)[0]),
        (_owner(metadata),),
    )
    return _first_word(found)


def workload_name(metadata: Mapping[str, Any]) -> str:
    """Return the name of the Workload by which Kueue admitted the pod; empty if Kueue did not write it there.

    By topology it always does, and newer releases for all jobs; of a TrainJob nothing else in the pod leads to it.
    """
    return _first_word(tuple((present(metadata, kind, {}).get(_WORKLOAD),) for kind in ("annotations", "labels")))


def job_uid(metadata: Mapping[str, Any]) -> str:
    """Return the uid of the job that a queue would know, such as a JobSet's; empty if nothing tells it."""
    labels = present(metadata, "labels", {})
    found = (labels.get(f"{_JOBSET}jobset-uid"), labels.get(f"{_JOB}controller-uid"), _owner(metadata))
    return _first_word(tuple((uid,) for uid in found))


def _first_word(found: tuple[tuple[str | int | None, ...], ...]) -> str:
    """Return the first of the tuples of which all parts are there, as one word that can be part of a key."""
    for parts in found:
        if all(part not in (None, "") for part in parts):
            try:
                return check_token("-".join(map(str, parts)), "job")
            except KeepstepError:
                continue
    return ""


def _owner(metadata: Mapping[str, Any]) -> str:
    owners = present(metadata, "ownerReferences", [])
    return next((str(owner.get("uid", "")) for owner in owners if owner.get("controller")), "")


def _completion(metadata: Mapping[str, Any]) -> int | None:
    index = _index(present(metadata, "annotations", {}), _COMPLETION_INDEX)
    return _index(present(metadata, "labels", {}), _COMPLETION_INDEX) if index is None else index


def _replica(labels: Mapping[str, str]) -> int | None:
    """Return the index by Kubeflow's training operator, whose role label makes worker 0 the master if there is none."""
    index = _index(labels, f"{_TRAINING}replica-index")
    if index is None:
        return None
    kind = labels.get(f"{_TRAINING}replica-type", "").lower()
    if labels.get(f"{_TRAINING}job-role") == "master" or kind in ("master", "chief"):
        return 0
    return index if "mpi" in labels.get(f"{_TRAINING}operator-name", "") else index + 1


def _group_and_worker(labels: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the group of a LeaderWorkerSet and the pod's number in it.

    A webhook of LeaderWorkerSet writes the group of a leader and the number of a worker, perhaps after ours was called.
    Both are then the pod's index in its StatefulSet.
    """
    group, worker = (_index(labels, f"{_LEADER_WORKER}{name}-index") for name in ("group", "worker"))
    if f"{_LEADER_WORKER}name" in labels:
        ordinal = _index(labels, f"{_STATEFUL_SET}pod-index")
        worker = ordinal if worker is None else worker
        group = ordinal if group is None and worker == 0 else group
    return group, worker


def _index(texts: Mapping[str, str], key: str) -> int | None:
    text = texts.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
