"""Starts Python programs by forking a process that has imported their libraries.

To import them takes an agent half a second of processor time, and a trainer three: more than most tests need for all
else. What is forked is a process as any other, with its own signals, files and exit code. Only its command line, and
what it shares of its memory, are those of the process that it was forked from.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from tests.harness.bounds import HANG_SECONDS

TRAINER_ENVIRONMENT: Final = {
    # Dozens of trainers on two cores: with two threads each, they mostly wait for their other half.
    "OMP_NUM_THREADS": "1",
    # DeepSpeed alone would load the whole compiler, seconds of it, and nobody compiles.
    "TORCHDYNAMO_DISABLE": "1",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    # Else pyarrow, which Hugging Face's datasets import, starts a thread at once.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""What libraries of trainers look at when they are imported, before they know the environment of the program."""

_CODE: Final = struct.Struct("i")
_LARGEST_REQUEST: Final = 1 << 17


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
            # It may have been waited for, and we not told yet.
            with contextlib.suppress(ProcessLookupError):
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
    """A Python that is forked for every program; it ends with the process that made it."""

    def __init__(self, connection: socket.socket, wait: Callable[[], object]) -> None:
        self._connection = connection
        self._connection.settimeout(HANG_SECONDS)
        self._wait = wait
        self._lock = threading.Lock()
        atexit.register(self._close)

    @classmethod
    def importing(cls, modules: Sequence[str]) -> Self:
        """Start one that has imported these."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return cls(ours, lambda: process.wait(HANG_SECONDS))

    @classmethod
    def fork(cls) -> Self:
        """Fork one from this process, which has no threads yet."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            ours.close()
            _serve_and_run(theirs)
            sys.exit()
        theirs.close()
        return cls(ours, lambda: os.waitpid(pid, 0))

    def start(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        files: Sequence[int],
        directory: Path | None = None,
        new_session: bool = False,
    ) -> WarmProcess:
        """Start what `python` would with these words: `-u` or not, `-m` and a module, or a file, and its arguments.

        `files`: the descriptors of its standard input, output and error.
        """
        assert starts_alike(environment), "Python starts before it knows this environment"
        there = str(directory or Path.cwd())
        asked = _Request(words=words, environment=dict(environment), directory=there, new_session=new_session)
        request = json.dumps(asdict(asked)).encode()
        assert len(request) < _LARGEST_REQUEST, "the words and the environment are too long"
        status, told = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._connection, [request], [*files, told])
                (pid,) = _CODE.unpack(self._connection.recv(_CODE.size))
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
        """As subprocess.run, without input."""
        with (
            Path(os.devnull).open("rb") as nothing,
            tempfile.TemporaryFile("w+") as output,
            tempfile.TemporaryFile("w+") as errors,
        ):
            files = [nothing.fileno(), output.fileno(), errors.fileno()]
            process = self.start(words, environment=environment, files=files, directory=directory)
            try:
                code = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                process.kill()
            output.seek(0)
            errors.seek(0)
            assert code is not None, f"{words} does not end:\n{output.read()}\n{errors.read()}"
            return subprocess.CompletedProcess(words, code, output.read(), errors.read())

    def _close(self) -> None:
        self._connection.close()
        self._wait()


@functools.cache
def warm_python(*modules: str) -> WarmPython:
    """Return this process's own; it ends with it."""
    return WarmPython.importing(modules)


def warm_keepstep() -> WarmPython:
    """Return the one for `-m keepstep_agent`: the agent, and the command line."""
    return warm_python(
        "keepstep_agent.cli.agent",
        "keepstep_agent.cli.destination.checkpoints",
        "keepstep_agent.cli.restore",
        "keepstep_agent.adapters.s3.store",
        "keepstep_agent.runtime.process.app",
    )


def warm_torchrun(*libraries: str) -> WarmPython:
    """Return the one for `-m tests.harness.warm_torchrun`, whose ranks import these."""
    return warm_python("torch.distributed.run", *libraries)


def keepstep(
    *arguments: object, directory: Path | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command line with `environment` besides this process's own."""
    words = ["-m", "keepstep_agent", *map(str, arguments)]
    there = {**os.environ, **environment}
    return warm_keepstep().run(words, environment=there, timeout_seconds=HANG_SECONDS, directory=directory)


def starts_alike(environment: Mapping[str, str]) -> bool:
    """Whether nothing in `environment` changes how Python itself starts, which a forked one does not."""
    return all(
        environment.get(name) == os.environ.get(name)
        for name in environment.keys() | os.environ.keys()
        if name.startswith(("PYTHON", "LD_"))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    new_session: bool


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


def _serve_and_run(connection: socket.socket) -> None:
    request = _serve(connection)
    if request is not None:
        _run(request)


def _run(request: _Request) -> None:
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    if request.new_session:
        os.setsid()
    first, *rest = request.words
    if first == "-u":
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True)
        first, *rest = rest
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
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
    _serve_and_run(connection)


if __name__ == "__main__":
    main()
