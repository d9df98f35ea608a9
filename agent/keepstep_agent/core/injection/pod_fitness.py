"""Finds what forbids injecting a pod, and what its author may not intend."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from keepstep_agent.core.injection import volumes
from keepstep_agent.core.injection.job_identity import node_rank
from keepstep_agent.core.injection.pod import MESH_PROXIES, OURS, SYSTEM_FOLDERS, others, overlap, present
from keepstep_agent.core.injection.spec import Injection
from keepstep_agent.core.injection.volumes import CheckpointPlace, ephemeral_limit
from keepstep_agent.core.settings.table import environment_variable, setting_fields
from keepstep_api.names import ANNOTATION_INJECT, ANNOTATION_PREFIX, CA_BUNDLE_VOLUME

IN_OUR_IMAGE: Final = (*SYSTEM_FOLDERS, "/opt/keepstep")
"""Folders from which restore and agent read programs, libraries, certificates and configuration, and their HOME, see
Dockerfile.agent. The trainer's image may have nothing there."""
_TOKENS: Final = ("/run/secrets", "/var/run/secrets")
"""Where the API server mounts the service account's token."""
_OPEN: Final = "or use a bucket with the pod's workload identity, which the trainer has too"
_PUBLIC_BUNDLE: Final = f"or put the certificates into a ConfigMap, as {ANNOTATION_PREFIX}ca-bundle: configmap/name/key"
_EVENT_URL: Final = environment_variable("events.event_url")
_URL_WITH_PASSWORD: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#]*@")


def impossible(spec: Mapping[str, Any], injection: Injection, *, injected: bool) -> Iterator[str]:
    """Yield what forbids the injection wherever checkpoints go.

    `injected`: the pod was injected before, so containers and volumes with our names are ours.
    """
    of_node = present(spec, "nodeSelector", {})
    if present(spec, "os", {}).get("name") == "windows" or of_node.get("kubernetes.io/os") == "windows":
        yield f"Keepstep runs only on Linux: remove {ANNOTATION_INJECT} from this Windows pod"
    shared = next((key for key in ("shareProcessNamespace", "hostPID") if spec.get(key)), None)
    if shared:
        # A trainer that sees the agent's processes, and runs as the same user, can read their files in /proc/PID/root
        # and their variables in /proc/PID/environ.
        for secret, instead in _kept_from_the_trainer(injection):
            problem = f"with {shared} the trainer could reach {secret} through the agent's processes"
            yield f"{problem}: remove {shared}, {instead}"
    if injected:
        return
    all_names = (
        (one.get("name"), kind, ours)
        for kind, ours in (("initContainers", OURS), ("containers", OURS), ("volumes", volumes.OURS))
        for one in present(spec, kind, [])
    )
    for name, kind, ours in all_names:
        if name in ours:
            yield f"the pod already has {name} in its {kind}, a name that Keepstep uses: rename yours"


def _kept_from_the_trainer(injection: Injection) -> Iterator[tuple[str, str]]:
    """Yield what agent and restore have in volumes and variables and the trainer must not, and what to do instead."""
    for volume in volumes.store_volumes(injection):
        if claim := volume.get("persistentVolumeClaim"):
            yield f"the claim {claim['claimName']} of the destination", _OPEN
        if secret := volume.get("secret"):
            is_bundle = volume["name"] == CA_BUNDLE_VOLUME
            yield f"the Secret {secret['secretName']}", _PUBLIC_BUNDLE if is_bundle else _OPEN
    for setting in setting_fields():
        text = injection.settings.get(setting.environment, "")
        # Receivers' URLs have their tokens anywhere, others have at most a password.
        if text and (setting.environment == _EVENT_URL or _URL_WITH_PASSWORD.match(text)):
            yield f"the secret in {setting.annotation}", "or leave that annotation out"


def unfit(place: CheckpointPlace, injection: Injection) -> Iterator[str]:
    """Yield why checkpoints, or temporary files, cannot be in this place."""
    elsewhere = f"mount it elsewhere, or choose another {ANNOTATION_PREFIX}checkpoint-directory"
    if covered := covers(place.volume, place.mount_path):
        yield f"{covered}: {elsewhere}"
    elif any(overlap(path, place.mount_path) for path in _TOKENS):
        yield f"the volume {place.volume} at {place.mount_path} would lie over service account tokens: {elsewhere}"
    if injection.temporary_files and place.directory == place.mount_path:
        yield (
            f"{ANNOTATION_PREFIX}temporary-files would mix temporary files with checkpoints: "
            f"choose a {ANNOTATION_PREFIX}checkpoint-directory below a volume's mount, or leave that annotation out"
        )


def covers(volume: str, mount_path: str) -> str:
    """Say what of the agent's own a volume that the trainer writes would lie over; empty if nothing."""
    hidden = next((path for path in IN_OUR_IMAGE if overlap(path, mount_path)), None)
    if hidden:
        return f"the volume {volume} at {mount_path} would hide {hidden} in Keepstep's image"
    taken = next((path for path in volumes.OUR_MOUNTS if overlap(path, mount_path)), None)
    return f"the volume {volume} at {mount_path} collides with {taken}, where Keepstep mounts its own" if taken else ""


def doubtful(metadata: Mapping[str, Any], spec: Mapping[str, Any], place: CheckpointPlace) -> Iterator[str]:
    """Yield what works but may not be what the user intends."""
    if place.outlives_pod and node_rank(metadata) is not None:
        yield (
            f"checkpoints lie on the volume {place.volume}: pods that run at the same time must not share it; "
            "give each its own, or leave it to Keepstep's emptyDir"
        )
    if place.on_node_disk and ephemeral_limit(spec) and not place.outlives_pod:
        yield (
            "checkpoints count against the ephemeral-storage limit of the pod's containers, "
            f"{place.limit_bytes} bytes: beyond it the pod is evicted"
        )
    for proxy in others(spec, "containers"):
        if proxy.get("name") in MESH_PROXIES:
            yield (
                f"{proxy['name']} starts after restore, which then has no network: make it a native sidecar, "
                "or let the destination bypass it"
            )
