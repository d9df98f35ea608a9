"""Starts Python programs by forking a process that has imported their libraries.

To import them takes an agent half a second of processor time, and a trainer three: more than most tests need for all
else. What is forked is a process as any other, with its own signals, files and exit code. Only its command line, and
what it shares of its memory, are those of the process that it was forked from.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CODE: Final = struct.Struct("i")
_LARGEST_REQUEST: Final = 1 << 17
_START_SECONDS: Final = 60.0
# It bounds a hang and judges no speed: to restore ten thousand files takes a minute on a busy machine.
_COMMAND_SECONDS: Final = 240.0


class WarmProcess:
    """As far as tests need it what subprocess.Popen is."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(None if timeout is None else timeout * 1000)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_milliseconds: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(timeout_milliseconds):
            return None
        with self._lock:
            if self.returncode is None:
                (self.returncode,) = _CODE.unpack(os.read(self._status, _CODE.size))
                os.close(self._status)
        return self.returncode


class WarmPython:
    """A Python that has imported `modules`."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(_START_SECONDS)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self._close)

    def start(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        directory: Path | None = None,
    ) -> WarmProcess:
        """Start what `python` would with these words: `-m` and a module, or a file, and its arguments."""
        assert starts_alike(environment), "Python starts before it knows this environment"
        there = str(directory or Path.cwd())
        request = json.dumps({"words": words, "environment": dict(environment), "directory": there}).encode()
        assert len(request) < _LARGEST_REQUEST, "the words and the environment are too long"
        status, told = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._ours, [request], [stdin, stdout, stderr, told])
                (pid,) = _CODE.unpack(self._ours.recv(_CODE.size))
        finally:
            os.close(told)
        return WarmProcess(pid, status)

    def run(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_seconds: float,
        directory: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """As subprocess.run, without input. Raises subprocess.TimeoutExpired."""
        with (
            Path(os.devnull).open("rb") as nothing,
            tempfile.TemporaryFile("w+") as output,
            tempfile.TemporaryFile("w+") as errors,
        ):
            files = {"stdin": nothing.fileno(), "stdout": output.fileno(), "stderr": errors.fileno()}
            process = self.start(words, environment=environment, directory=directory, **files)
            try:
                code = process.wait(timeout_seconds)
            finally:
                process.kill()
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(words, code, output.read(), errors.read())

    def _close(self) -> None:
        self._ours.close()
        self._process.wait(_START_SECONDS)


@functools.cache
def warm_python(*modules: str) -> WarmPython:
    """Return this process's own; it ends with it."""
    return WarmPython(modules)


def warm_mooring() -> WarmPython:
    """Return the one for `-m mooring_agent`: the agent, and the command line."""
    return warm_python(
        "mooring_agent.cli.agent",
        "mooring_agent.cli.destination",
        "mooring_agent.cli.restore",
        "mooring_agent.adapters.s3.store",
        "mooring_agent.runtime.process.app",
    )


def mooring(
    *arguments: object, directory: Path | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command line with `environment` besides this process's own."""
    words = ["-m", "mooring_agent", *map(str, arguments)]
    there = {**os.environ, **environment}
    return warm_mooring().run(words, environment=there, timeout_seconds=_COMMAND_SECONDS, directory=directory)


def starts_alike(environment: Mapping[str, str]) -> bool:
    """Whether nothing in `environment` changes how Python itself starts, which a forked one does not."""
    return all(
        environment.get(name) == os.environ.get(name)
        for name in environment.keys() | os.environ.keys()
        if name.startswith(("PYTHON", "LD_"))
    )


@dataclass(frozen=True, slots=True)
class _Request:
    words: list[str]
    environment: dict[str, str]
    directory: str


def _serve(connection: socket.socket) -> _Request | None:
    """Return twice for each request: here when no more can come, and in the process that is to run it."""
    statuses: dict[int, tuple[int, int]] = {}
    # epoll would have a descriptor of its own, which the forked process would inherit.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in statuses:
                pid, status = statuses.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                os.write(status, _CODE.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                os.close(status)
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, 4)
            if not message:
                return None
            *standard, status = descriptors
            pid = os.fork()
            if not pid:
                connection.detach()
                for number, inherited in enumerate(standard):
                    os.dup2(inherited, number)
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                return _Request(**json.loads(message))
            for inherited in standard:
                os.close(inherited)
            ended = os.pidfd_open(pid)
            statuses[ended] = pid, status
            poll.register(ended, select.POLLIN)
            connection.send(_CODE.pack(pid))


def _run(request: _Request) -> None:
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    first, *rest = request.words
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request.words
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a library has started a thread, which a fork does not take along"
    gc.collect()
    gc.freeze()
    request = _serve(connection)
    if request is not None:
        _run(request)


if __name__ == "__main__":
    main()
