"""One container of a pod: what it is, how it was started, how often it has ended and why."""

import contextlib
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.harness.bounds import HANG_SECONDS
from tests.podsim.process import ContainerProcess
from tests.podsim.timeline import Timeline, What
from tests.podsim.view import Start

SIGKILLED = 137
_CANNOT_START = 128


class Role(StrEnum):
    """The three ways in which kubelet treats containers."""

    INIT = "init"
    """Runs to its end before the next begins."""
    SIDECAR = "sidecar"
    """A native sidecar: an init container with restartPolicy Always [KEP-753]."""
    REGULAR = "regular"


class RestartPolicy(StrEnum):
    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"

    def restarts(self, exit_code: int) -> bool:
        """Whether a container that ended so is started again.

        [k/k pkg/kubelet/container/helpers.go, ShouldContainerBeRestarted]
        """
        return self is RestartPolicy.ALWAYS or (self is RestartPolicy.ON_FAILURE and exit_code != 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One end of a container, as in its status: reason is Completed, Error, OOMKilled or StartError."""

    exit_code: int
    reason: str


class Container:
    """`restart_policy`: the container's own for sidecars, the pod's for others, where Always is OnFailure for an init
    container [web concepts/workloads/pods/init-containers]. Kubelet's thread starts and reaps; others signal and read.
    """

    def __init__(self, spec: Mapping[str, Any], role: Role, policy: RestartPolicy, start: Start, timeline: Timeline):
        self.spec = spec
        self.name: str = spec["name"]
        self.role = role
        self.start_with = start
        self.endings: list[Ending] = []
        self.process: ContainerProcess | None = None
        self.started = False
        """Whether its startup probe has succeeded since it was started."""
        self.start_count = 0
        self.may_start_at = 0.0
        self._timeline = timeline
        self._ended = threading.Event()
        self._kill_reason = ""
        self.restart_policy = policy
        if role is Role.SIDECAR:
            self.restart_policy = RestartPolicy.ALWAYS
        elif role is Role.INIT and policy is RestartPolicy.ALWAYS:
            self.restart_policy = RestartPolicy.ON_FAILURE

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def last(self) -> Ending | None:
        """Its last end, unless it runs again."""
        return self.endings[-1] if self.endings and not self.running else None

    @property
    def comes_back(self) -> bool:
        """Whether it has ended and is to be started again."""
        return self.last is not None and self.restart_policy.restarts(self.last.exit_code)

    @property
    def pre_stop(self) -> Mapping[str, Any] | None:
        """Its handler, if it has one."""
        hook: Mapping[str, Any] | None = self.spec.get("lifecycle", {}).get("preStop")
        return hook

    def begun(self, process: ContainerProcess) -> None:
        self.process = process
        self.start_count += 1
        self.started = "startupProbe" not in self.spec
        self._kill_reason = ""
        self._ended.clear()
        self._timeline.note(What.STARTED, self.name, f"pid {process.pid}")
        if self.started:
            self._timeline.note(What.READY, self.name)

    def begin_again(self) -> None:
        """It is as it was before its first start."""
        self.endings.clear()
        self.started, self.start_count, self.may_start_at = False, 0, 0.0

    def not_begun(self, problem: str) -> None:
        """The runtime could not start it, say because its program is not in the image."""
        self.start_count += 1
        self._end(Ending(exit_code=_CANNOT_START, reason="StartError"), problem)

    def probe_succeeded(self) -> None:
        self.started = True
        self._timeline.note(What.READY, self.name)

    def reap(self) -> bool:
        """Whether it has ended just now."""
        code = self.process.exit_code() if self.process is not None else None
        if code is None:
            return False
        reason = self._kill_reason or ("Completed" if code == 0 else "Error")
        self._end(Ending(exit_code=code, reason=reason), "")
        return True

    def stop(self, grace_seconds: int) -> None:
        """SIGTERM, and SIGKILL when it runs on for so long; blocks until it has ended."""
        self._timeline.note(What.SIGTERM, self.name, f"{grace_seconds} s")
        self.send(signal.SIGTERM)
        if not self.wait_ended(grace_seconds):
            self.kill("")
            self.wait_ended(HANG_SECONDS)

    def send(self, number: signal.Signals) -> None:
        process = self.process
        if process is not None:
            process.send(number)

    def kill(self, reason: str) -> None:
        """SIGKILL to its first process, and with that to all of it. `reason` as in its status; empty: Error."""
        self._kill_reason = reason
        self._timeline.note(What.SIGKILL, self.name, reason)
        self.send(signal.SIGKILL)

    def wait_ended(self, timeout_seconds: float) -> bool:
        """Whether it does not run, at the latest then."""
        return self._ended.wait(timeout_seconds) or not self.running

    def _end(self, ending: Ending, problem: str) -> None:
        self.process = None
        self.started = False
        self.endings.append(ending)
        self._timeline.note(What.EXITED, self.name, f"{ending.reason} {ending.exit_code} {problem}".rstrip())
        self._ended.set()

    def destroy(self) -> None:
        """Whatever it does: nothing of it is left afterwards."""
        process = self.process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            self.reap()


def back_off_seconds(restarts: int, first: float, longest: float) -> float:
    """How long after its end kubelet starts a container again that has been started again so often already.

    The first time at once, then twice as long each time; 10 s to 300 s on a real node [k/k
    pkg/kubelet/kuberuntime/kuberuntime_manager.go, doBackOff; web concepts/workloads/pods/pod-lifecycle].
    """
    return 0.0 if restarts == 0 else min(longest, first * 2 ** (restarts - 1))
