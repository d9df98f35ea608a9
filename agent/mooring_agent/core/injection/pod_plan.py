"""What restore and agent are told and given in one pod: variables, mounts, resources, user.

Owns where each of their variables comes from; how a container is written down is `injected_containers`'s.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooring_agent.core.injection import job_place
from mooring_agent.core.injection.checkpoint_place import CheckpointPlace
from mooring_agent.core.injection.findings import Findings
from mooring_agent.core.injection.injected_containers import POD_SOCKET, Plan
from mooring_agent.core.injection.pod_resources import agent_resources, with_the_trainers_memory
from mooring_agent.core.injection.pod_shape import present
from mooring_agent.core.injection.pod_user import security_context
from mooring_agent.core.injection.pod_volumes import CA_PATH, SOCKET_MOUNT, STATE_MOUNT, store_mounts
from mooring_agent.core.injection.spec import Injection, InjectionDefaults
from mooring_agent.core.injection.trainer_container import Container, others, plain, variable
from mooring_agent.core.injection.workload_identity import identity_mounts, identity_variables
from mooring_api import names

_CLUSTER_EVENTS: Final = "MOORING_CLUSTER_EVENTS"
_FROM_THE_POD: Final = {
    "MOORING_POD_NAME": "metadata.name",
    "MOORING_POD_NAMESPACE": "metadata.namespace",
    "MOORING_POD_UID": "metadata.uid",
}
_EVICTION_THRESHOLD: Final = "MOORING_EVICTION_THRESHOLD_PERCENT"


def plan_of(
    pod: Mapping[str, Any],
    trainer: Container,
    place: CheckpointPlace,
    injection: Injection,
    defaults: InjectionDefaults,
    *,
    attempt: Mapping[str, Any] | None,
    grace_seconds: int,
    findings: Findings,
) -> Plan:
    """`attempt` is an entry of `env`, the trainer's too."""
    metadata, spec = present(pod, "metadata", {}), pod["spec"]
    texts = {
        names.ENV_DESTINATION: injection.destination,
        **_credential_texts(injection),
        names.ENV_VOLUME: place.mount_path,
        names.ENV_CHECKPOINT_DIRECTORY: place.directory,
        names.ENV_SOCKET: POD_SOCKET,
        names.ENV_STATE_DIRECTORY: names.POD_STATE_DIRECTORY,
        "MOORING_GRACE_SECONDS": str(grace_seconds),
        **_place_texts(metadata, place),
        **injection.settings,
    }
    resources = agent_resources(spec, injection, defaults, findings)
    has_identity = not injection.claim and not injection.credentials
    return Plan(
        image=defaults.image,
        image_pull_policy=defaults.image_pull_policy,
        variables=[
            *(identity_variables(trainer) if has_identity else []),
            # Of a variable without text the API server keeps the name alone.
            *({"name": name, "value": text} if text else {"name": name} for name, text in texts.items()),
            *([attempt] if attempt else []),
            *_own_name(spec, injection, findings),
        ],
        mounts=[
            place.mount,
            SOCKET_MOUNT,
            STATE_MOUNT,
            *store_mounts(injection),
            *(_beside(place, identity_mounts(trainer)) if has_identity else []),
        ],
        resources=resources,
        restore_resources=with_the_trainers_memory(resources, trainer) if place.in_memory else resources,
        security_context=security_context(spec, trainer, injection, openshift=defaults.openshift, findings=findings),
        autoload=injection.autoload,
        old_volume=place.outlives_pod,
        serves_metrics=_may_serve_metrics(spec, findings),
    )


def _beside(place: CheckpointPlace, mounts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that are not the checkpoints' own: a path may be mounted once."""
    return [mount for mount in mounts if plain(mount["mountPath"]) != place.mount_path]


def attempt_entry(
    metadata: Mapping[str, Any], trainer: Container, injection: Injection, findings: Findings
) -> Mapping[str, Any] | None:
    """By the annotation, else as the trainer has it already, else by the job's labels."""
    said = injection.attempt
    if not said and (entry := variable(trainer, names.ENV_ATTEMPT)):
        if "$(" in present(entry, "value", ""):
            findings.problems.append(
                f"the trainer's {names.ENV_ATTEMPT} refers to another variable, which the agent does not have: "
                f"use the annotation {names.ANNOTATION_PREFIX}attempt"
            )
        return entry
    text = said or job_place.attempt(metadata)
    return {"name": names.ENV_ATTEMPT, "value": text} if text else None


def _own_name(spec: Mapping[str, Any], injection: Injection, findings: Findings) -> list[dict[str, Any]]:
    """Entries of `env` by which the agent finds its own pod, where it shall tell Kubernetes of checkpoints."""
    if _CLUSTER_EVENTS not in injection.settings:
        return []
    if spec.get("automountServiceAccountToken") is False:
        findings.warnings.append(
            "the agent tells Kubernetes nothing: automountServiceAccountToken is false, and it has no token"
        )
    return [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in _FROM_THE_POD.items()
    ]


def _credential_texts(injection: Injection) -> dict[str, str]:
    if injection.claim:
        return {}
    texts = {}
    if injection.credentials:
        texts["MOORING_S3_CREDENTIALS_DIRECTORY"] = names.POD_CREDENTIALS_PATH
    if injection.ca_bundle:
        texts["MOORING_S3_CA_BUNDLE"] = CA_PATH
    return texts


def _place_texts(metadata: Mapping[str, Any], place: CheckpointPlace) -> dict[str, str]:
    texts = {}
    rank = job_place.node_rank(metadata)
    if rank is not None:
        texts["MOORING_NODE_RANK"] = str(rank)
    if place.limit_bytes:
        texts["MOORING_SIZE_LIMIT_BYTES"] = str(place.limit_bytes)
    if not place.on_node_disk:
        # Kubelet's threshold is for the node's own disk.
        texts[_EVICTION_THRESHOLD] = "0"
    return texts


def _may_serve_metrics(spec: Mapping[str, Any], findings: Findings) -> bool:
    if spec.get("hostNetwork"):
        findings.warnings.append("with hostNetwork the agent serves no metrics: its port would be the node's")
        return False
    containers = [*others(spec, "containers"), *others(spec, "initContainers")]
    ports = (port.get("containerPort") for one in containers for port in present(one, "ports", []))
    if names.POD_METRICS_PORT in ports:
        findings.warnings.append(
            f"the agent serves no metrics: another container of the pod has port {names.POD_METRICS_PORT}"
        )
        return False
    return True
