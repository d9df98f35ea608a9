"""One container's processes: signalled, waited for, and at the end nothing of them left behind."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

from tests.harness.bounds import HANG_SECONDS

_POLL_SECONDS = 0.005
_SWEEPS = 20


class Membership(Protocol):
    """What all of a container's processes have in common, and no other process of this machine has."""

    def holds(self, folder: Path) -> bool:
        """Of the process with this folder in /proc. Raises OSError where that cannot be read."""


class ContainerProcess:
    """`waiter` is our child, whose end is the container's; `pid` is the container's first process.

    The two differ where a namespace had to be made. Signals go by a pidfd: they reach this process or nobody. Asked by
    one thread for its end; signalled by any.
    """

    def __init__(self, waiter: "subprocess.Popen[bytes]", pid: int | None, membership: Membership | None) -> None:
        """`membership` None: the kernel itself ends them all with the first."""
        self._waiter = waiter
        self._membership = membership
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
            self._waiter.wait(HANG_SECONDS)
        if self._waiter.poll() is None:
            self._waiter.kill()
            self._waiter.wait(HANG_SECONDS)
        self._bury()

    def members(self) -> list[int]:
        """Those that are alive, as far as they must be looked for."""
        return members_by(self._membership) if self._membership is not None else []

    def _bury(self) -> None:
        if self._membership is not None:
            # Whoever forks while it is being killed is found the next time.
            for _ in range(_SWEEPS):
                left = members_by(self._membership)
                for pid in left:
                    _kill_member(pid, self._membership)
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
        self._process.communicate(timeout=HANG_SECONDS)


def only_child(pid: int) -> int | None:
    """The process that `pid` has forked; None when there is none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def members_by(membership: Membership) -> list[int]:
    """Processes of this machine that are members; those that go meanwhile or hide are none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if membership.holds(entry):
                    found.append(int(entry.name))
    return found


def _kill_member(pid: int, membership: Membership) -> None:
    """The number may be somebody else's by now: a pidfd holds on to one process while it is looked at again."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if membership.holds(Path(f"/proc/{pid}")):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
