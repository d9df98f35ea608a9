"""One pod on a simulated node: kubelet's part, played with real processes and real signals in real time.

Its rules are kubelet's [k/k pkg/kubelet/kuberuntime/kuberuntime_manager.go, computePodActions and SyncPod; KEP-753];
those with a module of their own are told there. One thread starts and reaps the containers for as long as the pod is
there, and each container that is being ended has a thread that waits for it. A real kubelet looks about once a second
where this one looks all the time.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.harness.bounds import HANG_SECONDS
from tests.podsim.container import Container, Role, back_off_seconds
from tests.podsim.environment import Objects
from tests.podsim.phase import Phase, phase_of
from tests.podsim.probe import StartupProbe
from tests.podsim.process import Execution
from tests.podsim.termination import EVICTION_GRACE_SECONDS, TerminationOrder, kill_container
from tests.podsim.timeline import Timeline, What
from tests.podsim.view import View
from tests.podsim.volumes import Volumes

_TICK_SECONDS = 0.02
_POLL_SECONDS = 0.01
_LAST_LINES = 20


class Pod:
    """Made by `Node.run`. Use it as a context: at its end nothing of the pod is left."""

    def __init__(
        self,
        *,
        name: str,
        containers: list[Container],
        volumes: Volumes,
        make_view: Callable[[], View],
        spec: Mapping[str, Any],
        timeline: Timeline,
        back_off: tuple[float, float],
    ) -> None:
        self.name = name
        self.timeline = timeline
        self.reason = ""
        """Why it failed, as in its status: Evicted, NodeLost or empty."""
        self.grace_seconds: int = spec.get("terminationGracePeriodSeconds", 30)
        self._containers = {one.name: one for one in containers}
        self._policy = next(one.restart_policy for one in containers if one.role is Role.REGULAR)
        self._volumes = volumes
        self._make_view = make_view
        self._view: View | None = None
        self._back_off = back_off
        self._kills: list[threading.Thread] = []
        self._requests: list[int] = []
        self._probes: dict[str, threading.Event] = {}
        self._executions: list[Execution] = []
        self._final: Phase | None = None
        self._problem: BaseException | None = None
        self._closing = threading.Event()
        self._restarting = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"kubelet {name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive(), f"{self.name} does not end:\n{self.timeline}"
        if kind is None and self._problem is not None:
            raise self._problem

    # What a test sees.

    @property
    def phase(self) -> Phase:
        return self._final or phase_of(list(self._containers.values()), self._policy, is_terminal=False)

    @property
    def ended(self) -> bool:
        """No container runs, and none will."""
        return self._final is not None

    def container(self, name: str) -> Container:
        return self._containers[name]

    def volume(self, name: str) -> Path:
        """Where it lies on this machine."""
        return self._volumes.path(name)

    def log(self, name: str) -> str:
        """What a container has said in all its lives."""
        log = self._containers[name].start_with.log
        return log.read_text(errors="replace") if log.exists() else ""

    def wait(self, holds: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        """AssertionError, with the pod's history, when it does not come true in time or before the pod has ended."""
        ended = False

        def settled() -> bool:
            nonlocal ended
            assert not ended, f"ended before: {what}\n{self._history()}"
            ended = self.ended
            return holds()

        self._poll(settled, timeout_seconds, what)

    def _poll(self, holds: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not holds():
            if self._problem is not None:
                raise AssertionError(f"the simulator failed before {what}") from self._problem
            assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {what}\n{self._history()}"
            time.sleep(_POLL_SECONDS)

    def _history(self) -> str:
        logs = [f"{name} said at last:\n{_last_lines(self.log(name))}" for name in self._containers]
        return "\n".join([str(self.timeline), *logs])

    def wait_started(self, name: str, timeout_seconds: float) -> None:
        self.wait(lambda: self._containers[name].started, timeout_seconds, f"{name} is started")

    def wait_ended(self, timeout_seconds: float) -> Phase:
        self.wait(lambda: self.ended, timeout_seconds, f"{self.name} ends")
        return self.phase

    def execute(self, name: str, words: list[str], timeout_seconds: float) -> tuple[int | None, str]:
        """`kubectl exec`: exit code and standard output."""
        execution = self._execute(self._containers[name], words)
        try:
            code = execution.wait(timeout_seconds)
        finally:
            execution.kill()
        return code, execution.output.decode(errors="replace")

    # What befalls it.

    def see_objects(self, objects: Objects) -> None:
        """Kubelet brings the pod's volumes up to date. Variables of containers that run stay as they are."""
        self._volumes.write_again(objects)

    def delete(self, grace_seconds: int | None = None) -> None:
        """As by `kubectl delete`, drain or preemption; without a grace period of its own the pod's counts."""
        self.timeline.note(What.DELETED)
        self._requests.append(self.grace_seconds if grace_seconds is None else grace_seconds)

    def evict(self) -> None:
        """At a hard threshold, or because an emptyDir is over its sizeLimit: the pod fails, with hardly any grace."""
        self.timeline.note(What.EVICTED)
        self.reason = "Evicted"
        self._requests.append(EVICTION_GRACE_SECONDS)

    def out_of_memory(self, name: str) -> None:
        """The kernel kills all of one container [memory.oom.group; k/k pkg/kubelet/cm, since 1.28]."""
        self._containers[name].kill("OOMKilled")

    def crash(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """A container's program dies by itself, or is told something by somebody else than kubelet."""
        self._containers[name].send(number)

    def restart_in_place(self) -> None:
        """All containers get SIGTERM at once, without preStop, and SIGKILL 2 s later; then init containers run again.

        Pod and volumes stay [KEP-5532, RestartAllContainers; as seen on a real node].
        """
        self.timeline.note(What.RESTARTED)
        self._restarting.set()

    def lose(self) -> None:
        """The node is gone: every process at once and without a word, and the node's disk with them."""
        self.timeline.note(What.NODE_LOST)
        self.reason, self._final = "NodeLost", Phase.UNKNOWN
        for container in self._containers.values():
            container.send(signal.SIGKILL)
        self._poll(lambda: not any(one.running for one in self._containers.values()), HANG_SECONDS, "all are killed")
        self._volumes.wipe()

    # Kubelet's thread.

    def _live(self) -> None:
        try:
            self._view = self._make_view()
            while not self._closing.wait(_TICK_SECONDS):
                self._tick()
        except BaseException as error:
            self._problem = error
        finally:
            self._close()

    def _close(self) -> None:
        for over in self._probes.values():
            over.set()
        for container in self._containers.values():
            container.destroy()
        for thread in self._kills:
            thread.join(HANG_SECONDS)
        for execution in self._executions:
            with contextlib.suppress(Exception):
                execution.kill()
        self._volumes.wipe()

    def _tick(self) -> None:
        for container in self._containers.values():
            if container.reap():
                self._has_ended(container)
        if self._final is not None:
            return
        if self._restarting.is_set():
            self._begin_again()
            return
        while self._requests:
            self._end_all(self._requests.pop(0))
        if not self._kills:
            self._advance()
        elif not any(thread.is_alive() for thread in self._kills):
            self._finish()

    def _begin_again(self) -> None:
        if any(one.running for one in self._containers.values()):
            if not self._kills:
                self._kill_all(0)
        elif not any(thread.is_alive() for thread in self._kills):
            for container in self._containers.values():
                container.begin_again()
            self._kills.clear()
            self._restarting.clear()

    def _advance(self) -> None:
        """What is to be started now, and whether all is over."""
        regular = [one for one in self._containers.values() if one.role is Role.REGULAR]
        initialized = any(one.start_count for one in regular)
        for container in self._containers.values():
            if container.role is Role.REGULAR or (initialized and container.role is Role.INIT):
                continue
            if container.last is None or container.comes_back:
                self._start_when_due(container)
            elif container.last.exit_code:
                # Never: the pod has failed before it began.
                self._end_all(self.grace_seconds)
                return
            in_the_way = container.role is Role.INIT and (container.last is None or container.last.exit_code)
            if not initialized and (in_the_way or (container.role is Role.SIDECAR and not container.started)):
                return
        for container in regular:
            if container.last is None or container.comes_back:
                self._start_when_due(container)
        if all(one.last is not None and not one.comes_back for one in regular):
            # Sidecars get a whole grace period of their own now, and their preStop [KillPod in computePodActions].
            self._end_all(self.grace_seconds)

    def _start_when_due(self, container: Container) -> None:
        if container.running or time.monotonic() < container.may_start_at:
            return
        assert self._view is not None
        try:
            process = self._view.start(container.start_with)
        except OSError as error:
            container.not_begun(str(error))
            self._has_ended(container)
        else:
            container.begun(process)
            self._probe(container)

    def _has_ended(self, container: Container) -> None:
        if container.name in self._probes:
            self._probes.pop(container.name).set()
        container.may_start_at = time.monotonic() + back_off_seconds(container.start_count - 1, *self._back_off)

    def _probe(self, container: Container) -> None:
        if "startupProbe" not in container.spec:
            return
        over = self._probes[container.name] = threading.Event()
        probe = StartupProbe(
            container.spec["startupProbe"], lambda words, seconds: self._run(container, words, seconds)
        )

        def ask() -> None:
            answer = probe.succeeds(over)
            if answer:
                container.probe_succeeded()
            elif answer is False:
                self.timeline.note(What.PROBE_FAILED, container.name)
                self._kill(container, self.grace_seconds, TerminationOrder([container]))

        threading.Thread(target=ask, name=f"probe {container.name}", daemon=True).start()

    def _end_all(self, grace_seconds: int) -> None:
        """Again where it is being done already, as kubelet does when a deletion shortens the grace period."""
        self._kill_all(grace_seconds)
        if not self._kills:
            self._finish()

    def _kill_all(self, grace_seconds: int) -> None:
        order = TerminationOrder(list(self._containers.values()))
        running = [one for one in self._containers.values() if one.running]
        for container in running:
            thread = threading.Thread(
                target=self._kill, args=(container, grace_seconds, order), name=f"end {container.name}", daemon=True
            )
            thread.start()
            self._kills.append(thread)

    def _finish(self) -> None:
        phase = phase_of(list(self._containers.values()), self._policy, is_terminal=True)
        phase = Phase.FAILED if self.reason else phase
        self._volumes.wipe()
        self.timeline.note(What.ENDED, detail=f"{phase} {self.reason}".rstrip())
        self._final = phase

    # Other threads.

    def _kill(self, container: Container, grace_seconds: int, order: TerminationOrder) -> None:
        kill_container(container, grace_seconds, order, self._run_hook, self.timeline)

    def _run_hook(self, container: Container, seconds: float) -> None:
        hook = container.pre_stop
        assert hook is not None
        self._run(container, hook["exec"]["command"], seconds)

    def _run(self, container: Container, words: list[str], seconds: float) -> int | None:
        """Exit code; None when it takes longer, and is left to the container's end."""
        if not container.running:
            return None
        execution = self._execute(container, words)
        code = execution.wait(seconds)
        if code is None:
            self._executions.append(execution)
        return code

    def _execute(self, container: Container, words: list[str]) -> Execution:
        process = container.process
        assert process is not None, f"{container.name} does not run"
        assert self._view is not None
        return self._view.execute(container.start_with, process, words)


def _last_lines(log: str) -> str:
    return "\n".join(log.splitlines()[-_LAST_LINES:])
