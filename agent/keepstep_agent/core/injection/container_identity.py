"""The user and the cloud identity of the injected containers.

They run as the trainer's user, with fewer privileges than any container of the pod: another user could neither
hard-link the trainer's files nor remove them. They satisfy Pod Security "restricted" whenever the trainer does. If
another webhook gave the trainer a cloud identity, its variables and token mount are copied, because that webhook may
have run first and never seen the injected containers. None of this is a secret by itself.
"""

from collections.abc import Mapping
from typing import Any, Final

from keepstep_agent.core.injection.pod import Container, Findings, mount_above, present, variable
from keepstep_agent.core.injection.spec import Injection
from keepstep_api.names import ANNOTATION_PREFIX

_ANNOTATION = f"{ANNOTATION_PREFIX}run-as-user"


def security_context(
    spec: Mapping[str, Any], trainer: Container, injection: Injection, *, openshift: bool, findings: Findings
) -> dict[str, Any]:
    """The securityContext of restore and agent."""
    # Each field of a container's securityContext replaces that field of the pod's.
    own, of_pod = (present(holder, "securityContext", {}) for holder in (trainer, spec))
    said = {**of_pod, **{key: value for key, value in own.items() if value is not None}}
    user = _user(said, injection, openshift, findings)
    context: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if user is not None:
        context["runAsUser"] = user
    # If the trainer names no group, ours is 0 and the trainer's comes from its image, which is unknown here. The groups
    # may differ: the same user owns the files of both, whatever the umask, and fsGroup and supplementalGroups belong to
    # the pod.
    if said.get("runAsGroup") is not None:
        context["runAsGroup"] = said["runAsGroup"]
    if said.get("runAsNonRoot") or user:
        context["runAsNonRoot"] = True
    elif user == 0 and of_pod.get("runAsNonRoot"):
        # The trainer's container overrides its pod, so ours must as well.
        context["runAsNonRoot"] = False
    if own.get("seLinuxOptions"):
        # With another label than the trainer's, a container could not open its files.
        context["seLinuxOptions"] = own["seLinuxOptions"]
    return context


def _user(said: Mapping[str, Any], injection: Injection, openshift: bool, findings: Findings) -> int | None:
    """Return the user id to run as; None leaves the choice to the image or the cluster."""
    user, wanted = said.get("runAsUser"), injection.run_as_user
    if user is not None:
        if wanted not in (None, user):
            findings.problems.append(
                f"{_ANNOTATION} is {wanted}, and the trainer runs as {user}: they must be the same user; "
                "remove the annotation"
            )
        return int(user)
    if wanted is not None:
        if wanted == 0 and said.get("runAsNonRoot"):
            findings.problems.append(
                f"{_ANNOTATION} is 0, and the trainer has runAsNonRoot: name the user of its image"
            )
        return wanted
    if openshift:
        return None
    hint = f"name the user of its image in the annotation {_ANNOTATION}, or in securityContext.runAsUser"
    if said.get("runAsNonRoot"):
        findings.warnings.append(f"the trainer's user is unknown, and other users cannot reach its agent: {hint}")
        return None
    # Most images that name no user run as root.
    findings.warnings.append(f"the trainer's user is unknown; unless it is root, it cannot reach its agent: {hint}")
    return 0


_TOKEN_FILES: Final = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
_VARIABLES: Final = (
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    *_TOKEN_FILES,
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_STS_REGIONAL_ENDPOINTS",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)


def identity_variables(trainer: Container) -> list[dict[str, Any]]:
    """Return the `env` entries of the trainer's cloud identity; none if it has no such identity."""
    if not any(variable(trainer, name) for name in _TOKEN_FILES):
        return []
    return [dict(entry) for name in _VARIABLES if (entry := variable(trainer, name)) is not None]


def identity_mounts(trainer: Container) -> list[Mapping[str, Any]]:
    """Return the mounts that hold the identity's tokens, each once."""
    mounts: list[Mapping[str, Any]] = []
    for name in _TOKEN_FILES:
        path = present(variable(trainer, name) or {}, "value", "")
        mount = mount_above(present(trainer, "volumeMounts", []), path) if path else None
        if mount is not None and mount not in mounts:
            mounts.append(mount)
    return mounts
