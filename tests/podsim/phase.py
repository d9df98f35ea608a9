"""The phase of a pod, from the states of its containers [k/k pkg/kubelet/kubelet_pods.go, getPhase]."""

from collections.abc import Sequence
from enum import StrEnum

from tests.podsim.container import Container, RestartPolicy, Role


class Phase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"
    """Its node is gone, so nobody can say."""


def phase_of(containers: Sequence[Container], policy: RestartPolicy, *, is_terminal: bool) -> Phase:
    """A native sidecar that runs keeps the pod running, and its exit code counts for nothing; a regular one counts.

    `is_terminal`: the pod is being ended, so no container will be started again whatever the policy says.
    """
    init = [one for one in containers if one.role is Role.INIT]
    sidecars = [one for one in containers if one.role is Role.SIDECAR]
    regular = [one for one in containers if one.role is Role.REGULAR]
    if policy is RestartPolicy.NEVER and any(one.last is not None and one.last.exit_code for one in init):
        return Phase.FAILED
    initialized = all(one.last is not None and one.last.exit_code == 0 for one in init) and all(
        one.started or one.endings for one in sidecars
    )
    if (not initialized and not any(one.start_count for one in regular)) or not all(one.start_count for one in regular):
        return Phase.FAILED if is_terminal else Phase.PENDING
    if any(one.running for one in [*sidecars, *regular]):
        return Phase.RUNNING
    failed = any(one.last is not None and one.last.exit_code for one in regular)
    if not failed and (is_terminal or policy is not RestartPolicy.ALWAYS):
        return Phase.SUCCEEDED
    return Phase.FAILED if is_terminal or policy is RestartPolicy.NEVER else Phase.RUNNING
