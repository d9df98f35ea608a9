"""The two containers that the injection adds: restore before the trainer, and the agent beside it.

Owns their manifests; where things are and what was asked for comes in a `Plan`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mooring_api import names

POD_SOCKET: Final = f"{names.POD_SOCKET_DIRECTORY}/{names.SOCKET}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What both containers are made from. `variables` and `mounts` are those of both."""

    image: str
    image_pull_policy: str
    variables: Sequence[Mapping[str, Any]]
    mounts: Sequence[Mapping[str, Any]]
    resources: Mapping[str, Any]
    restore_resources: Mapping[str, Any]
    security_context: Mapping[str, Any]
    autoload: bool
    """Restore puts the files there that the trainer's Python loads."""
    old_volume: bool
    """The volume may have been another pod's before: a notice found on it is not this pod's."""
    serves_metrics: bool


def restore_container(plan: Plan) -> dict[str, Any]:
    """An ordinary init container: the trainer starts when it has ended well."""
    args, mounts = ["restore"], [*plan.mounts]
    if plan.autoload:
        args += ["--autoload-to", names.POD_AUTOLOAD_PATH]
        mounts.append({"name": names.AUTOLOAD_VOLUME, "mountPath": names.POD_AUTOLOAD_PATH})
    return {"name": names.RESTORE_CONTAINER, **_shared(plan, args, plan.variables, mounts, plan.restore_resources)}


def agent_container(plan: Plan) -> dict[str, Any]:
    """A sidecar: an init container that Kubernetes ends after the trainer. The last of them."""
    args, variables = ["agent"], [*plan.variables]
    if plan.old_volume:
        args.append("--fresh")
    if plan.serves_metrics:
        # Without a host: every address of the pod, which may have IPv6 ones alone.
        variables.append({"name": "MOORING_HTTP_ADDRESS", "value": f":{names.POD_METRICS_PORT}"})
    container = {"name": names.AGENT_CONTAINER, **_shared(plan, args, variables, plan.mounts, plan.resources)}
    if plan.serves_metrics:
        container["ports"] = [{"name": "mooring-metrics", "containerPort": names.POD_METRICS_PORT, "protocol": "TCP"}]
    # SIGTERM comes to a sidecar after the trainer's end only; this is the first the agent hears of the pod's.
    container["lifecycle"] = {"preStop": {"exec": {"command": ["mooring", "terminating"]}}}
    container["restartPolicy"] = "Always"
    # The trainer starts when the agent answers on its socket. The store is not asked.
    container["startupProbe"] = {
        "exec": {"command": ["mooring", "ready"]},
        "periodSeconds": 2,
        "timeoutSeconds": 10,
        "successThreshold": 1,
        "failureThreshold": 150,
    }
    return container


def _shared(
    plan: Plan,
    args: list[str],
    variables: Sequence[Mapping[str, Any]],
    mounts: Sequence[Mapping[str, Any]],
    resources: Mapping[str, Any],
) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "image": plan.image,
        "imagePullPolicy": plan.image_pull_policy,
        "args": args,
        # `kubectl describe pod` then says why restore failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": [dict(variable) for variable in variables],
        "volumeMounts": [dict(mount) for mount in mounts],
        "securityContext": dict(plan.security_context),
    }
    if resources:
        shared["resources"] = resources
    return shared
