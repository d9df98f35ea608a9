"""What of a pod's manifest the simulator plays. The rest is refused, but for what changes nothing on one node."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.podsim.container import Role
from tests.podsim.errors import UnsupportedError

_POD = {
    *("containers", "hostNetwork", "initContainers", "restartPolicy", "securityContext", "serviceAccountName"),
    *("terminationGracePeriodSeconds", "volumes"),
}
# Read by the scheduler, the API server or the runtime, before or beside what is played here.
_POD_ELSEWHERE = {
    *("affinity", "automountServiceAccountToken", "dnsConfig", "dnsPolicy", "enableServiceLinks", "hostname"),
    *("imagePullSecrets", "nodeName", "nodeSelector", "os", "overhead", "preemptionPolicy", "priority"),
    *("priorityClassName", "readinessGates", "resourceClaims", "runtimeClassName", "schedulerName"),
    *("schedulingGates", "serviceAccount", "subdomain", "tolerations", "topologySpreadConstraints"),
}
_CONTAINER = {
    *("args", "command", "env", "envFrom", "image", "lifecycle", "name", "restartPolicy", "securityContext"),
    *("startupProbe", "volumeMounts", "workingDir"),
}
_CONTAINER_ELSEWHERE = {
    *("imagePullPolicy", "ports", "readinessProbe", "resources", "stdin", "terminationMessagePath"),
    *("terminationMessagePolicy", "tty"),
}


def containers_of(pod: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Role]]:
    """In the order in which kubelet looks at them. Raises UnsupportedError."""
    spec = pod["spec"]
    _refuse("the pod", spec.keys() - _POD - _POD_ELSEWHERE)
    for container in spec.get("initContainers", ()):
        restarts = container.get("restartPolicy")
        if restarts not in (None, "Always"):
            raise UnsupportedError(f"restartPolicy {restarts} of init container {container['name']}")
        yield _checked(container), Role.SIDECAR if restarts else Role.INIT
    for container in spec["containers"]:
        if "restartPolicy" in container:
            raise UnsupportedError(f"restartPolicy of container {container['name']}")
        yield _checked(container), Role.REGULAR


def _checked(container: Mapping[str, Any]) -> Mapping[str, Any]:
    where = f"container {container['name']}"
    _refuse(where, container.keys() - _CONTAINER - _CONTAINER_ELSEWHERE)
    lifecycle = container.get("lifecycle", {})
    _refuse(where, lifecycle.keys() - {"preStop"})
    _refuse(where, lifecycle.get("preStop", {}).keys() - {"exec"})
    return container


def _refuse(where: str, fields: set[str]) -> None:
    if fields:
        raise UnsupportedError(f"the simulator does not play {', '.join(sorted(fields))} of {where}")
