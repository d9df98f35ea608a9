"""What every mutated pod keeps, whatever it is: the user's own, all of it, in its place."""

from typing import Any, Final

from keepstep_agent.core.injection.pod import parse_quantity
from keepstep_api.names import (
    ANNOTATION_INJECTED,
    CREDENTIALS_VOLUME,
    DESTINATION_VOLUME,
    POD_AUTOLOAD_PATH,
    STATE_VOLUME,
)

OURS: Final = ("keepstep-restore", "keepstep-agent")
_ADDED_TO_LISTS: Final = ("env", "volumeMounts", "volumes", "containers", "initContainers")


def assert_nothing_of_the_users_is_lost(before: Any, after: Any, where: str = "") -> None:
    """Objects have what they had, lists that we add to have it in its order, and everything else is what it was."""
    if where == "spec.terminationGracePeriodSeconds":
        assert after >= before, where
        return
    if where == f"metadata.annotations.{ANNOTATION_INJECTED}":
        return
    if isinstance(before, dict):
        assert isinstance(after, dict), where
        if before.get("name") == "PYTHONPATH" and ".env[" in where:
            assert after in (before, {**before, "value": _before(before.get("value", ""))}), where
            return
        for key, value in before.items():
            # Null is nothing to Kubernetes.
            if value is not None:
                inner = f"{where}.{key}".lstrip(".")
                assert key in after, inner
                assert_nothing_of_the_users_is_lost(value, after[key], inner)
    elif isinstance(before, list) and where.rpartition(".")[2] in _ADDED_TO_LISTS:
        _assert_in_order(before, after, where)
    else:
        assert (type(before), before) == (type(after), after), where


def _before(users: str) -> str:
    return f"{POD_AUTOLOAD_PATH}:{users}" if users else POD_AUTOLOAD_PATH


def _assert_in_order(before: list[Any], after: list[Any], where: str) -> None:
    left = iter(enumerate(after))
    for item in before:
        for index, candidate in left:
            if _is_the_same(item, candidate):
                assert_nothing_of_the_users_is_lost(item, candidate, f"{where}[{index}]")
                break
        else:
            raise AssertionError(f"{where} has lost {item}, or its place")


def _is_the_same(one: Any, other: Any) -> bool:
    """By what tells items of a list apart."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return bool(one == other)
    return all(one.get(key) == other.get(key) for key in ("name", "mountPath"))


def assert_a_cluster_takes_it(pod: Any) -> None:
    """What the API server checks and no schema says, of a pod whose user kept to it."""
    spec = pod["spec"]
    volumes = [volume["name"] for volume in spec.get("volumes") or []]
    assert len(volumes) == len(set(volumes))
    starting, running = spec.get("initContainers") or [], spec["containers"]
    names = [container["name"] for container in [*starting, *running]]
    assert len(names) == len(set(names))
    for container in [*starting, *running]:
        mounts = container.get("volumeMounts") or []
        paths = [mount["mountPath"].rstrip("/") for mount in mounts]
        assert len(paths) == len(set(paths)), container["name"]
        assert {mount["name"] for mount in mounts} <= set(volumes), container["name"]
        for entry in container.get("env") or []:
            assert not (entry.get("value") and entry.get("valueFrom")), entry
    for container in starting:
        if container.get("restartPolicy") != "Always":
            assert not {"lifecycle", "startupProbe", "livenessProbe", "readinessProbe"} & container.keys()
    assert not (spec.get("hostPID") and spec.get("shareProcessNamespace"))


def assert_nobody_else_has_what_is_the_agents(pod: Any) -> None:
    """What it believes, its credentials, and the claim that it writes to."""
    private = {STATE_VOLUME, CREDENTIALS_VOLUME, DESTINATION_VOLUME}
    for container in _containers(pod["spec"]):
        mounted = {mount["name"] for mount in container.get("volumeMounts") or []}
        assert STATE_VOLUME in mounted if container["name"] in OURS else not private & mounted, container["name"]


def class_of(pod: Any) -> str:
    """As Kubernetes finds a pod's class [k/k pkg/apis/core/v1/helper/qos, ComputePodQOS]."""
    spec = pod["spec"]
    holders = [spec] if any((spec.get("resources") or {}).values()) else [*_containers(spec)]
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    guaranteed = True
    for holder in holders:
        resources = holder.get("resources") or {}
        limited = _counted(resources.get("limits"))
        for found, amounts in ((requests, limited | _counted(resources.get("requests"))), (limits, limited)):
            for name, amount in amounts.items():
                found[name] = found.get(name, 0) + amount
        guaranteed = guaranteed and limited.keys() == {"cpu", "memory"}
    if not requests and not limits:
        return "BestEffort"
    return "Guaranteed" if guaranteed and requests == limits else "Burstable"


def _containers(spec: Any) -> list[Any]:
    return [*(spec.get("initContainers") or []), *spec["containers"]]


def _counted(amounts: Any) -> dict[str, Any]:
    numbers = {name: parse_quantity(amount) for name, amount in (amounts or {}).items() if name in ("cpu", "memory")}
    return {name: number for name, number in numbers.items() if number}


def assert_ours_are_last(pod: Any) -> None:
    """Restore before the agent, both behind everybody else's."""
    starting = [container["name"] for container in pod["spec"]["initContainers"]]
    running = [container["name"] for container in pod["spec"]["containers"]]
    assert starting[-2:] == list(OURS)
    assert pod["spec"]["initContainers"][-1]["restartPolicy"] == "Always"
    assert not set(OURS) & set(running)
