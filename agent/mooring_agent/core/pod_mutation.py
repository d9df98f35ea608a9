"""From a pod and what its annotations ask for to a JSON Patch, or to all reasons why it cannot be.

Owns the order of things in a pod and the rule that nothing the user wrote is lost or changed: only
terminationGracePeriodSeconds is raised. Every step makes sure of something rather than adds it, so a pod that has
everything gets an empty patch, and one from which another webhook took something gets it back.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mooring_agent import __version__
from mooring_agent.core import job_place, pod_volumes
from mooring_agent.core.checkpoint_place import CheckpointPlace, ephemeral_limit, find_place
from mooring_agent.core.ensure import ensured
from mooring_agent.core.findings import Findings
from mooring_agent.core.injected_containers import POD_SOCKET, Plan, agent_container, restore_container
from mooring_agent.core.injection import Injection, InjectionDefaults, Mutation, Pod, Refusal, Sidecar
from mooring_agent.core.json_patch import difference
from mooring_agent.core.pod_plan import attempt_entry, plan_of
from mooring_agent.core.pod_shape import present, shape_problems
from mooring_agent.core.trainer_changes import changed_trainer, trainer_variables
from mooring_agent.core.trainer_container import OURS, Container, find_trainer, others
from mooring_api import names

_KUBERNETES_GRACE_SECONDS: Final = 30
_HASH_LENGTH: Final = 12


def mutate(pod: Pod, injection: Injection, defaults: InjectionDefaults) -> Mutation | Refusal:
    """`pod` as JSON, of any shape. The patch is the whole difference and applies to `pod`."""
    problems = shape_problems(pod)
    if problems:
        return Refusal(problems=problems)
    findings = Findings()
    changed = _changed(pod, injection, defaults, findings)
    if findings.problems or changed is None:
        return Refusal(problems=tuple(findings.problems))
    return Mutation(patch=tuple(difference(pod, changed)), warnings=tuple(findings.warnings))


def _changed(pod: Pod, injection: Injection, defaults: InjectionDefaults, findings: Findings) -> dict[str, Any] | None:
    """The pod with everything; None where `findings` say why not."""
    metadata, spec = present(pod, "metadata", {}), pod["spec"]
    injected = names.ANNOTATION_INJECTED in present(metadata, "annotations", {})
    findings.problems += _impossible(spec, injection, injected=injected)
    trainer = find_trainer(spec, injection.container, findings)
    place = trainer and find_place(spec, trainer, injection, findings)
    if not trainer or not place:
        return None
    if injection.temporary_files and place.directory == place.mount_path:
        findings.problems.append(
            f"{names.ANNOTATION_PREFIX}temporary-files would put them among the checkpoints: "
            f"choose a {names.ANNOTATION_PREFIX}checkpoint-directory below a volume's mount, or none"
        )
    findings.warnings += _doubtful(metadata, spec, place)
    attempt = attempt_entry(metadata, trainer, injection, findings)
    said_seconds: int = present(spec, "terminationGracePeriodSeconds", _KUBERNETES_GRACE_SECONDS)
    grace_seconds = max(said_seconds, injection.grace_seconds)
    plan = plan_of(
        pod,
        trainer,
        place,
        injection,
        defaults,
        attempt=attempt,
        grace_seconds=grace_seconds,
        findings=findings,
    )
    mounts = [place.mount, pod_volumes.SOCKET_MOUNT]
    if injection.autoload:
        mounts.append({**pod_volumes.AUTOLOAD_MOUNT, "readOnly": True})
    new_trainer = changed_trainer(
        trainer,
        variables=trainer_variables(
            place,
            socket=POD_SOCKET,
            attempt=attempt,
            grace_seconds=grace_seconds,
            temporary_files=injection.temporary_files,
        ),
        mounts=mounts,
        python_path=names.POD_AUTOLOAD_PATH if injection.autoload else "",
        injected=injected,
        findings=findings,
    )
    new_spec = {
        **spec,
        **_containers(spec, trainer, new_trainer, plan),
        "volumes": pod_volumes.with_volumes(spec, injection, place),
        "terminationGracePeriodSeconds": grace_seconds,
    }
    if _watches_processes(spec, injection):
        new_spec["shareProcessNamespace"] = True
    annotations = {**present(metadata, "annotations", {}), names.ANNOTATION_INJECTED: _injected(plan)}
    return {**pod, "metadata": {**metadata, "annotations": annotations}, "spec": new_spec}


def _containers(spec: Mapping[str, Any], trainer: Container, new_trainer: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Both lists. Ours are last: restore needs what the user's and others' init containers made, and a native sidecar
    is ended in reverse order, so that the agent still has the network that another one gives it."""
    lists = {
        "initContainers": [restore_container(plan)],
        "containers": [],
    }
    where = "initContainers" if plan.sidecar is Sidecar.NATIVE else "containers"
    lists[where].append(agent_container(plan))
    changed = {}
    for key, wanted in lists.items():
        there = {one["name"]: one for one in present(spec, key, []) if one.get("name") in OURS}
        users = [new_trainer if one is trainer else one for one in others(spec, key)]
        changed[key] = [*users, *(ensured(there.get(one["name"], {}), one) for one in wanted)]
    return changed


def _injected(plan: Plan) -> str:
    """The version that injected, and a hash of what: whoever looks at a pod sees whether two were made alike."""
    made = json.dumps([restore_container(plan), agent_container(plan)], sort_keys=True)
    return f"{__version__} {hashlib.sha256(made.encode()).hexdigest()[:_HASH_LENGTH]}"


def _watches_processes(spec: Mapping[str, Any], injection: Injection) -> bool:
    """A regular sidecar ends when it sees no process of the trainer; a pod that never ends needs none to end."""
    return injection.sidecar is Sidecar.REGULAR and present(spec, "restartPolicy", "Always") != "Always"


def _impossible(spec: Mapping[str, Any], injection: Injection, *, injected: bool) -> Iterator[str]:
    """What forbids the injection whatever else the pod is."""
    of_node = present(spec, "nodeSelector", {})
    if present(spec, "os", {}).get("name") == "windows" or of_node.get("kubernetes.io/os") == "windows":
        yield f"Mooring runs on Linux alone: remove {names.ANNOTATION_INJECT} from this Windows pod"
    if _watches_processes(spec, injection):
        if spec.get("hostPID"):
            yield "a regular sidecar cannot tell who is the trainer with hostPID: use the native one, or no hostPID"
        elif spec.get("shareProcessNamespace") is False:
            yield "a regular sidecar must see the trainer's processes: remove shareProcessNamespace: false"
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


def _doubtful(metadata: Mapping[str, Any], spec: Mapping[str, Any], place: CheckpointPlace) -> Iterator[str]:
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
