"""As whom a container runs: user, groups, capabilities, and whether it may write to its root."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.podsim.errors import ContainerConfigError
from tests.podsim.images import Image

# What containerd leaves to root unless told otherwise [containerd pkg/oci/spec.go, defaultUnixCaps].
_DEFAULT_CAPABILITIES = (
    *("audit_write", "chown", "dac_override", "fowner", "fsetid", "kill", "mknod", "net_bind_service", "net_raw"),
    *("setfcap", "setgid", "setpcap", "setuid", "sys_chroot"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """`capabilities`: those that root in this container may have; other users have none."""

    user: int
    group: int
    other_groups: tuple[int, ...]
    capabilities: tuple[str, ...]
    may_gain_privileges: bool
    read_only_root: bool


def identity_of(spec: Mapping[str, Any], container: Mapping[str, Any], image: Image) -> Identity:
    """The container's securityContext counts before the pod's, and that before the image.

    [web tasks/configure-pod-container/security-context] Raises ContainerConfigError where runAsNonRoot forbids it.
    """
    of_pod, own = spec.get("securityContext", {}), container.get("securityContext", {})
    said = {**of_pod, **own}
    user = said.get("runAsUser", image.user)
    if said.get("runAsNonRoot") and user == 0:
        raise ContainerConfigError("container has runAsNonRoot and image will run as root")
    supplemental = [*of_pod.get("supplementalGroups", ())]
    if "fsGroup" in of_pod:
        supplemental.append(of_pod["fsGroup"])
    return Identity(
        user=user,
        group=said.get("runAsGroup", 0),
        other_groups=tuple(supplemental),
        capabilities=_capabilities(own.get("capabilities", {})),
        may_gain_privileges=own.get("allowPrivilegeEscalation", True),
        read_only_root=own.get("readOnlyRootFilesystem", False),
    )


def _capabilities(said: Mapping[str, Any]) -> tuple[str, ...]:
    dropped = {name.lower() for name in said.get("drop", ())}
    added = {name.lower() for name in said.get("add", ())}
    kept = set() if "all" in dropped else set(_DEFAULT_CAPABILITIES) - dropped
    return tuple(sorted(kept | added))
