"""The two injected containers, restore and agent: their manifests, variables, mounts, resources and user."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from keepstep_agent.core.injection import job_identity
from keepstep_agent.core.injection.container_identity import identity_mounts, identity_variables, security_context
from keepstep_agent.core.injection.output_directories import watch_texts
from keepstep_agent.core.injection.pod import Container, Findings, others, plain, present, variable
from keepstep_agent.core.injection.pod_fitness import covers
from keepstep_agent.core.injection.pod_resources import agent_resources, with_the_trainers_memory
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults
from keepstep_agent.core.injection.volumes import (
    AUTOLOAD_MOUNT,
    CA_PATH,
    SOCKET_MOUNT,
    STATE_MOUNT,
    CheckpointPlace,
    store_mounts,
)
from keepstep_agent.core.settings.table import environment_variable
from keepstep_api import names

POD_SOCKET: Final = f"{names.POD_SOCKET_DIRECTORY}/{names.SOCKET}"


_CLUSTER_EVENTS: Final = environment_variable("cluster.cluster_events")
_PRIORITY_BOOST: Final = environment_variable("cluster.priority_boost")
_FROM_THE_POD: Final = {
    environment_variable("cluster.pod_name"): "metadata.name",
    environment_variable("cluster.pod_namespace"): "metadata.namespace",
    environment_variable("cluster.pod_uid"): "metadata.uid",
}
AGENT_FILES: Final = {environment_variable("store.aws_files"): "false"}
"""Variables that keep restore and agent from files that somebody else may have put where libraries look for them."""
_EVICTION_THRESHOLD: Final = environment_variable("disk.eviction_threshold_percent")


def our_containers(
    pod: Mapping[str, Any],
    trainer: Container,
    place: CheckpointPlace,
    injection: Injection,
    defaults: InjectionDefaults,
    *,
    attempt: Mapping[str, Any] | None,
    grace_seconds: int,
    findings: Findings,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return restore and agent, in the order of their start. `attempt` is an entry of `env`, the same as the trainer's.

    Restore is an ordinary init container: the trainer starts once it has succeeded. The agent is a sidecar, an init
    container that Kubernetes ends after the trainer; it is the last one.
    """
    metadata, spec = present(pod, "metadata", {}), pod["spec"]
    texts = {
        names.ENV_DESTINATION: injection.destination,
        **_credential_texts(injection),
        names.ENV_VOLUME: place.mount_path,
        names.ENV_CHECKPOINT_DIRECTORY: place.directory,
        names.ENV_SOCKET: POD_SOCKET,
        names.ENV_STATE_DIRECTORY: names.POD_STATE_DIRECTORY,
        **AGENT_FILES,
        environment_variable("termination.grace_seconds"): str(grace_seconds),
        **_place_texts(metadata, place),
        **watch_texts(place, injection),
        **injection.settings,
    }
    resources = agent_resources(spec, injection, defaults, findings)
    has_identity = not injection.claim and not injection.credentials
    tokens = _beside(place, identity_mounts(trainer)) if has_identity else []
    for mount in tokens:
        if covered := covers(present(mount, "name", ""), plain(mount["mountPath"])):
            findings.problems.append(f"{covered}, and the trainer's identity lies on it: mount it elsewhere")
    shared: dict[str, Any] = {
        "image": defaults.image,
        "imagePullPolicy": defaults.image_pull_policy,
        # `kubectl describe pod` then says why restore failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": [
            *(identity_variables(trainer) if has_identity else []),
            # The API server drops an empty value and keeps the name alone.
            *({"name": name, "value": text} if text else {"name": name} for name, text in texts.items()),
            *([dict(attempt)] if attempt else []),
            *_own_name(metadata, spec, injection, findings),
        ],
        "volumeMounts": [
            place.mount,
            SOCKET_MOUNT,
            STATE_MOUNT,
            *store_mounts(injection),
            *tokens,
        ],
        "securityContext": security_context(spec, trainer, injection, openshift=defaults.openshift, findings=findings),
    }
    restore = {"name": names.RESTORE_CONTAINER, **shared, "args": ["restore"]}
    agent = {"name": names.AGENT_CONTAINER, **shared, "args": ["agent"]}
    if resources:
        restore["resources"] = with_the_trainers_memory(resources, trainer) if place.in_memory else resources
        agent["resources"] = resources
    if injection.autoload:
        # Restore copies the files that the trainer's Python loads.
        restore["args"] += ["--autoload-to", names.POD_AUTOLOAD_PATH]
        restore["volumeMounts"] = [*shared["volumeMounts"], AUTOLOAD_MOUNT]
    if place.outlives_pod:
        # Another pod may have used the volume before: a termination notice found on it is not this pod's.
        agent["args"].append("--fresh")
    if _may_serve_metrics(spec, findings):
        # Without a host it listens on every address of the pod, which may have only IPv6 ones.
        address = {"name": environment_variable("http_address"), "value": f":{names.POD_METRICS_PORT}"}
        agent["env"] = [*shared["env"], address]
        agent["ports"] = [{"name": "keepstep-metrics", "containerPort": names.POD_METRICS_PORT, "protocol": "TCP"}]
    # A sidecar gets SIGTERM only after the trainer has ended; the preStop hook tells the agent earlier.
    agent["lifecycle"] = {"preStop": {"exec": {"command": ["keepstep", "terminating"]}}}
    agent["restartPolicy"] = "Always"
    # The trainer starts when the agent answers on its socket. The probe does not ask the store.
    agent["startupProbe"] = {
        "exec": {"command": ["keepstep", "ready"]},
        "periodSeconds": 2,
        "timeoutSeconds": 10,
        "successThreshold": 1,
        "failureThreshold": 150,
    }
    return restore, agent


def _beside(place: CheckpointPlace, mounts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `mounts` without the one at the checkpoints' path: a path may be mounted only once."""
    return [mount for mount in mounts if plain(mount["mountPath"]) != place.mount_path]


def attempt_entry(
    metadata: Mapping[str, Any], trainer: Container, injection: Injection, findings: Findings
) -> Mapping[str, Any] | None:
    """Return the attempt's `env` entry: from the annotation, else the trainer's own, else from the job's labels."""
    said = injection.attempt
    if not said and (entry := variable(trainer, names.ENV_ATTEMPT)):
        if "$(" in present(entry, "value", ""):
            findings.problems.append(
                f"the trainer's {names.ENV_ATTEMPT} refers to another variable, which the agent does not have: "
                f"use the annotation {names.ANNOTATION_PREFIX}attempt"
            )
        return entry
    text = said or job_identity.attempt(metadata)
    return {"name": names.ENV_ATTEMPT, "value": text} if text else None


def _own_name(
    metadata: Mapping[str, Any], spec: Mapping[str, Any], injection: Injection, findings: Findings
) -> list[dict[str, Any]]:
    """Return the `env` entries that identify the agent's pod, if it is to report checkpoints to Kubernetes."""
    if _CLUSTER_EVENTS not in injection.settings:
        return []
    if spec.get("automountServiceAccountToken") is False:
        findings.warnings.append(
            "the agent reports nothing to Kubernetes: it has no token, because automountServiceAccountToken is false"
        )
    entries: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in _FROM_THE_POD.items()
    ]
    if _PRIORITY_BOOST in injection.settings:
        known = {
            environment_variable("cluster.workload_name"): job_identity.workload_name(metadata),
            environment_variable("cluster.job_uid"): job_identity.job_uid(metadata),
        }
        entries += [{"name": name, "value": text} for name, text in known.items() if text]
    return entries


def _credential_texts(injection: Injection) -> dict[str, str]:
    if injection.claim:
        return {}
    texts = {}
    if injection.credentials:
        texts[environment_variable("store.credentials_directory")] = names.POD_CREDENTIALS_PATH
    if injection.ca_bundle:
        texts[environment_variable("store.ca_bundle")] = CA_PATH
    return texts


def _place_texts(metadata: Mapping[str, Any], place: CheckpointPlace) -> dict[str, str]:
    texts = {}
    rank = job_identity.node_rank(metadata)
    if rank is not None:
        texts[environment_variable("node_rank")] = str(rank)
    if own_place := job_identity.place(metadata):
        texts[environment_variable("place")] = own_place
    if place.limit_bytes:
        texts[environment_variable("disk.size_limit_bytes")] = str(place.limit_bytes)
    if not place.on_node_disk:
        # Kubelet's eviction threshold applies to the node's own disk only.
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
