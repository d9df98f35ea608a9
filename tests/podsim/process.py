"""One container's processes: signalled, waited for, and at the end nothing of them left behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.005
_SWEEPS = 20


class ContainerProcess:
    """`waiter` is our child, whose end is the container's; `pid` is the container's first process.

    The two differ where a namespace had to be made. Signals go by a pidfd: they reach this process or nobody. Asked by
    one thread for its end; signalled by any.
    """

    def __init__(
        self, waiter: "subprocess.Popen[bytes]", pid: int | None, members: Callable[[], Iterable[int]]
    ) -> None:
        self._waiter = waiter
        self.members = members
        self.pid = pid
        self._pidfd: int | None = None
        if pid is not None:
            # It may be over already.
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(pid)

    def exit_code(self) -> int | None:
        """As a container runtime gives it: 137 after SIGKILL. None while it runs.

        With its first process the container ends: what else runs in it is killed.
        """
        code = self._waiter.poll()
        if code is None:
            return None
        self._bury()
        return code if code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        pidfd = self._pidfd
        if pidfd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, number)

    def kill(self) -> None:
        """SIGKILL to all of it, and wait for the end."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._waiter.wait(_SETTLE_SECONDS)
        if self._waiter.poll() is None:
            self._waiter.kill()
            self._waiter.wait(_SETTLE_SECONDS)
        self._bury()

    def _bury(self) -> None:
        # Whoever forks while it is being killed is found the next time.
        for _ in range(_SWEEPS):
            left = list(self.members())
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(_POLL_SECONDS)
        if self._pidfd is not None:
            pidfd, self._pidfd = self._pidfd, None
            os.close(pidfd)


class Execution:
    """A command that somebody else runs in a container: a probe, a hook, a test. `output` is what it said so far."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.output = b""

    def wait(self, timeout_seconds: float) -> int | None:
        """Its exit code; None when it takes longer, and goes on."""
        try:
            self.output, _ = self._process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """End it; idempotent."""
        if self._process.poll() is None:
            inner = only_child(self._process.pid)
            for pid in (inner, self._process.pid):
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._process.communicate(timeout=_SETTLE_SECONDS)


def only_child(pid: int) -> int | None:
    """The process that `pid` has forked; None when there is none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def processes_where(holds: Callable[[Path], bool]) -> list[int]:
    """Processes whose folder in /proc satisfies `holds`; those that go meanwhile or hide do not."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if holds(entry):
                    found.append(int(entry.name))
    return found
