"""How kubelet ends the containers of a pod: in which order, and with how much of the grace period each.

[k/k pkg/kubelet/kuberuntime/kuberuntime_container.go, killContainer and executePreStopHook;
kuberuntime_termination_order.go]
"""

import math
import threading
import time
from collections.abc import Callable, Sequence

from tests.podsim.container import Container, Role
from tests.podsim.timeline import Timeline, What

MINIMUM_GRACE_SECONDS = 2
"""Whatever is left of the grace period, a container has this long between SIGTERM and SIGKILL."""
EVICTION_GRACE_SECONDS = 1
"""What an eviction at a hard threshold, or for an emptyDir's size, leaves of it [k/k pkg/kubelet/eviction/
eviction_manager.go, immediateEvictionGracePeriodSeconds]; with the minimum above it makes about 2 s for the trainer and
3 s for a native sidecar, as was seen on a real node."""

RunHook = Callable[[Container, float], None]
"""Runs a container's preStop handler, at most so many seconds."""


class TerminationOrder:
    """Whom a container waits for before its SIGTERM: a native sidecar for every regular one and each later sidecar.

    `containers` in the manifest's order, init containers first. Who does not run now is waited for by nobody.
    """

    def __init__(self, containers: Sequence[Container]) -> None:
        self._over = {one.name: threading.Event() for one in containers}
        for one in containers:
            if not one.running:
                self._over[one.name].set()
        regular = [one.name for one in containers if one.role is Role.REGULAR]
        self._before: dict[str, list[str]] = {}
        later: list[str] = []
        for one in reversed([one for one in containers if one.role is Role.SIDECAR]):
            self._before[one.name] = [*regular, *later]
            later = [one.name]

    def wait_for_turn(self, name: str, grace_seconds: float) -> float:
        """How long it took, at most the grace period."""
        began = time.monotonic()
        for other in self._before.get(name, ()):
            if not self._over[other].wait(max(0.0, began + grace_seconds - time.monotonic())):
                break
        return time.monotonic() - began

    def is_over(self, name: str) -> None:
        self._over[name].set()


def kill_container(
    container: Container, grace_seconds: int, order: TerminationOrder, run_hook: RunHook, timeline: Timeline
) -> None:
    """Blocks until it has ended. The hook's time and the waiting count, in whole seconds rounded down."""
    remaining = grace_seconds
    if container.pre_stop is not None and remaining > 0:
        timeline.note(What.PRE_STOP, container.name)
        began = time.monotonic()
        run_hook(container, remaining)
        remaining -= math.floor(time.monotonic() - began)
    if remaining > 0:
        remaining -= math.floor(order.wait_for_turn(container.name, remaining))
    if container.running:
        container.stop(max(remaining, MINIMUM_GRACE_SECONDS))
    order.is_over(container.name)
