"""A startup probe: kubelet asks until the container says that it is up, or has failed to too often."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tests.podsim.errors import UnsupportedError

# The API server's defaults [k/k pkg/apis/core/v1/defaults.go, SetDefaults_Probe].
_PERIOD_SECONDS = 10
_TIMEOUT_SECONDS = 1
_FAILURES = 3


class StartupProbe:
    """Of one container's one start. `ask` runs the command, for at most so many seconds; 0 is yes, None is too late."""

    def __init__(self, spec: Mapping[str, Any], ask: Callable[[list[str], float], int | None]) -> None:
        if "exec" not in spec:
            raise UnsupportedError("the simulator plays startup probes by exec alone")
        self._command: list[str] = spec["exec"]["command"]
        self._delay_seconds: float = spec.get("initialDelaySeconds", 0)
        self._period_seconds: float = spec.get("periodSeconds", _PERIOD_SECONDS)
        self._timeout_seconds: float = spec.get("timeoutSeconds", _TIMEOUT_SECONDS)
        self._failures: int = spec.get("failureThreshold", _FAILURES)
        self._ask = ask

    def succeeds(self, over: threading.Event) -> bool | None:
        """Blocks. False when it failed so often that kubelet kills the container; None when `over` was set before."""
        if over.wait(self._delay_seconds):
            return None
        for _ in range(self._failures):
            if self._ask(self._command, self._timeout_seconds) == 0:
                return True
            if over.wait(self._period_seconds):
                return None
        return False
