"""Chooses requests and limits of restore and agent that keep the pod's QoS class.

Kubernetes derives a pod's class from the CPU and memory of all its containers, including ours: Guaranteed if all
requests equal the limits, BestEffort if there are none, else Burstable.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

from keepstep_agent.core.injection.pod import Container, Findings, others, present, quantity_or_nothing
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults
from keepstep_agent.core.injection.volumes import ephemeral_limit
from keepstep_api.names import ANNOTATION_PREFIX

REQUESTED_CPU: Final = "250m"
GUARANTEED_CPU: Final = "500m"
_EPHEMERAL_STORAGE: Final = "128Mi"
"""For logs: our containers write nothing else outside volumes."""
_COUNTED: Final = ("cpu", "memory")


class QosClass(StrEnum):
    """Kubernetes' own names."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


def qos_class(spec: Mapping[str, Any]) -> QosClass:
    """Return the QoS class of the user's containers [k/k pkg/apis/core/v1/helper/qos, ComputePodQOS]."""
    requests, limits = dict.fromkeys(_COUNTED, Decimal(0)), dict.fromkeys(_COUNTED, Decimal(0))
    all_limited = True
    for container in (*others(spec, "containers"), *others(spec, "initContainers")):
        for name, request, limit in _said(container):
            requests[name] += request
            limits[name] += limit
            all_limited &= limit > 0
    if not any(requests.values()) and not any(limits.values()):
        return QosClass.BEST_EFFORT
    return QosClass.GUARANTEED if all_limited and requests == limits else QosClass.BURSTABLE


def _said(container: Container) -> Iterator[tuple[str, Decimal, Decimal]]:
    """Yield name, request and limit of CPU and memory; 0 for none. A missing request equals the limit."""
    resources = present(container, "resources", {})
    requests, limits = present(resources, "requests", {}), present(resources, "limits", {})
    for name in _COUNTED:
        yield (
            name,
            quantity_or_nothing(present(requests, name, limits.get(name))),
            quantity_or_nothing(limits.get(name)),
        )


def agent_resources(
    spec: Mapping[str, Any], injection: Injection, defaults: InjectionDefaults, findings: Findings
) -> dict[str, Any]:
    """Return the agent's requests and limits; empty for none. An amount that is asked for is both request and limit."""
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    of_pod = present(spec, "resources", {})
    if any(present(of_pod, key, {}) for key in ("requests", "limits")):
        # The API server derives the pod's requests from its limits and its containers. Afterwards nobody can tell
        # which of them the user wrote.
        findings.warnings.append(
            "the pod has resources of its own: the agent takes its share of them, without a request or limit of its own"
        )
    else:
        asked = {"cpu": injection.cpu, "memory": injection.memory}
        match qos_class(spec):
            case QosClass.BEST_EFFORT:
                limits = {name: amount for name, amount in asked.items() if amount}
                requests = dict(limits)
            case QosClass.GUARANTEED:
                cpu = injection.cpu or defaults.cpu or GUARANTEED_CPU
                limits = {"cpu": cpu, "memory": injection.memory or defaults.memory}
                requests = dict(limits)
            case QosClass.BURSTABLE:
                # A CPU limit would slow the drain, on a node that may be idle by then.
                cpu = injection.cpu or defaults.cpu
                limits = {**({"cpu": cpu} if cpu else {}), "memory": injection.memory or defaults.memory}
                requests = {"cpu": cpu or REQUESTED_CPU, "memory": limits["memory"]}
    if ephemeral_limit(spec):
        # If no container has such a limit, ours would become the whole pod's, including the checkpoints.
        requests["ephemeral-storage"] = limits["ephemeral-storage"] = _EPHEMERAL_STORAGE
    return {key: amounts for key, amounts in (("requests", requests), ("limits", limits)) if amounts}


def within_limits(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources with no request above its limit, which the API server would refuse.

    After the first review, a LimitRange of the namespace gives a container the limits that it does not have itself,
    whatever it requests. Nothing in the pod shows such limits before.
    """
    limits, requests = present(resources, "limits", {}), present(resources, "requests", {})
    above = [
        name
        for name, amount in requests.items()
        if limits.get(name) is not None and quantity_or_nothing(amount) > quantity_or_nothing(limits[name])
    ]
    return {**resources, "requests": {**requests, **{name: limits[name] for name in above}}} if above else {**resources}


def limited_by_others(resources: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if the agent's `resources` have a CPU limit that the `wanted` ones leave out."""
    cpu = present(resources, "limits", {}).get("cpu")
    if cpu is not None and "cpu" in wanted.get("requests", {}) and "cpu" not in wanted.get("limits", {}):
        yield (
            f"a LimitRange or another webhook limits the agent's CPU to {cpu}, which may slow its uploads: "
            f"{ANNOTATION_PREFIX}cpu sets its request and limit"
        )


def with_the_trainers_memory(resources: Mapping[str, Any], trainer: Container) -> Mapping[str, Any]:
    """Return restore's resources, with the trainer's memory where that is more, and no memory limit if it has none.

    A checkpoint in an emptyDir in memory counts as restore's memory until restore ends. It ends before the trainer
    begins, so the pod as a whole needs no more memory.
    """
    if "memory" not in resources.get("limits", {}):
        return resources
    of_trainer = present(trainer, "resources", {})
    limit = present(of_trainer, "limits", {}).get("memory")
    request = present(of_trainer, "requests", {}).get("memory", limit)
    changed = {}
    for key, amount in (("requests", request), ("limits", limit)):
        amounts = dict(resources[key])
        if quantity_or_nothing(amount) > quantity_or_nothing(amounts["memory"]):
            amounts["memory"] = amount
        elif key == "limits" and amount is None:
            del amounts["memory"]
        changed[key] = amounts
    return changed
