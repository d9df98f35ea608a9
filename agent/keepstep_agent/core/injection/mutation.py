"""Turns a pod and what its annotations ask for into a JSON Patch, or into all reasons why there is none.

Owns the order of things in a pod and the rule that nothing the user wrote is lost or changed; only
terminationGracePeriodSeconds is raised. Every step ensures something rather than adds it: a complete pod gets an empty
patch, and a pod from which another webhook took something gets it back. What other webhooks add to the injected
containers stays. What they removed or changed is restored, except for cluster-wide decisions such as image registries
and container sizes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from keepstep_agent import __version__
from keepstep_agent.core.injection import volumes
from keepstep_agent.core.injection.containers import attempt_entry, our_containers
from keepstep_agent.core.injection.json_patch import difference
from keepstep_agent.core.injection.output_directories import output_problems
from keepstep_agent.core.injection.pod import OURS, Container, Findings, find_trainer, others, present, shape_problems
from keepstep_agent.core.injection.pod_fitness import doubtful, impossible, unfit
from keepstep_agent.core.injection.pod_resources import limited_by_others, within_limits
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation, Pod, Refusal
from keepstep_agent.core.injection.trainer_changes import changed_trainer
from keepstep_agent.core.injection.volumes import find_place
from keepstep_api import names

_THE_CLUSTERS: Final = frozenset({"image", "imagePullPolicy", "resources"})
_MERGED: Final = frozenset({"securityContext"})
"""Objects that are merged key by key."""
_NAMED: Final = {"env": "name", "volumeMounts": "mountPath", "ports": "containerPort"}
"""Lists that are merged item by item, and the key that identifies an item."""


def ensured(existing: Mapping[str, Any], wanted: Mapping[str, Any], *, as_before: bool) -> dict[str, Any]:
    """Return `existing` with everything in `wanted`. Idempotent.

    `as_before`: `existing` was made from the same plan as `wanted`, so it keeps what the cluster decided.
    """
    kept = {key for key in _THE_CLUSTERS & existing.keys() if as_before and existing[key]}
    return {
        **existing,
        **({"resources": within_limits(existing["resources"])} if "resources" in kept else {}),
        **{key: _ensured(key, existing.get(key), value) for key, value in wanted.items() if key not in kept},
    }


def _ensured(key: str, existing: Any, wanted: Any) -> Any:
    if key in _MERGED and isinstance(existing, dict):
        return {**existing, **wanted}
    if key in _NAMED and isinstance(existing, list):
        identity = _NAMED[key]
        ours = {item[identity] for item in wanted}
        # Ours come first and in our order: a variable may refer to one before it.
        return [*wanted, *(item for item in existing if item.get(identity) not in ours)]
    return wanted


_KUBERNETES_GRACE_SECONDS: Final = 30
_HASH_LENGTH: Final = 12


def mutate(pod: Pod, injection: Injection, defaults: InjectionDefaults) -> Mutation | Refusal:
    """Return the patch that injects Keepstep into `pod`, or all reasons against it. `pod` is JSON of any shape."""
    problems = shape_problems(pod)
    if problems:
        return Refusal(problems=problems)
    findings = Findings()
    changed = _changed(pod, injection, defaults, findings)
    if findings.problems or changed is None:
        return Refusal(problems=tuple(findings.problems))
    return Mutation(patch=tuple(difference(pod, changed)), warnings=tuple(findings.warnings))


def _changed(pod: Pod, injection: Injection, defaults: InjectionDefaults, findings: Findings) -> dict[str, Any] | None:
    """Return the injected pod; None if `findings` say why there is none."""
    metadata, spec = present(pod, "metadata", {}), pod["spec"]
    made_before = present(metadata, "annotations", {}).get(names.ANNOTATION_INJECTED)
    # The annotation alone proves nothing: anybody can write it, and foreign containers with our names would pass as
    # ours.
    injected = made_before is not None and _has_ours(spec)
    findings.problems += impossible(spec, injection, injected=injected)
    trainer = find_trainer(metadata, spec, injection.container, findings)
    place = None if trainer is None else find_place(spec, trainer, injection, findings)
    if trainer is None or place is None:
        return None
    findings.problems += unfit(place, injection)
    findings.problems += output_problems(trainer, place, injection)
    findings.warnings += doubtful(metadata, spec, place)
    attempt = attempt_entry(metadata, trainer, injection, findings)
    said_seconds: int = present(spec, "terminationGracePeriodSeconds", _KUBERNETES_GRACE_SECONDS)
    grace_seconds = max(said_seconds, injection.grace_seconds)
    shared: dict[str, Any] = {"attempt": attempt, "grace_seconds": grace_seconds, "findings": findings}
    ours = our_containers(pod, trainer, place, injection, defaults, **shared)
    new_trainer = changed_trainer(trainer, place, injection, injected=injected, **shared)
    made = _made(ours)
    new_spec = {
        **spec,
        **_containers(spec, trainer, new_trainer, ours, as_before=made_before == made),
        "volumes": volumes.with_volumes(spec, injection, place),
        "terminationGracePeriodSeconds": grace_seconds,
    }
    agents = (holder.get("resources", {}) for holder in (new_spec["initContainers"][-1], ours[-1]))
    findings.warnings += limited_by_others(*agents)
    annotations = {**present(metadata, "annotations", {}), names.ANNOTATION_INJECTED: made}
    return {**pod, "metadata": {**metadata, "annotations": annotations}, "spec": new_spec}


def _containers(
    spec: Mapping[str, Any],
    trainer: Container,
    new_trainer: dict[str, Any],
    ours: Sequence[dict[str, Any]],
    *,
    as_before: bool,
) -> dict[str, Any]:
    """Return `initContainers` and `containers` with ours.

    Ours are the last init containers: restore needs what the others made, and sidecars end in reverse order, so the
    agent still has the network that another sidecar provides. `as_before`: our containers in the pod were made from
    the same plan, so somebody else made any difference.
    """
    there = {one["name"]: one for one in present(spec, "initContainers", []) if one.get("name") in OURS}
    return {
        "initContainers": [
            *others(spec, "initContainers"),
            *(ensured(there.get(wanted["name"], {}), wanted, as_before=as_before) for wanted in ours),
        ],
        "containers": [new_trainer if one is trainer else one for one in others(spec, "containers")],
    }


def _has_ours(spec: Mapping[str, Any]) -> bool:
    return any(one.get("name") in OURS for key in ("initContainers", "containers") for one in present(spec, key, []))


def _made(ours: Sequence[dict[str, Any]]) -> str:
    """Return the version that injects and a hash of both containers, which shows whether two pods were made alike."""
    made = json.dumps(ours, sort_keys=True)
    return f"{__version__} {hashlib.sha256(made.encode()).hexdigest()[:_HASH_LENGTH]}"
