"""Containers with namespaces of their own, for root: mounts as a container has them, and its own process numbers.

A container's root is an empty tmpfs with the system's directories and the image's in it, read-only, and its volumes
mounted whole. Its first process is process 1, which hears no signal that it has no handler for and whose end ends all
others. The network is this machine's, and nothing limits memory.
"""

import functools
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS
from tests.podsim.identity import Identity
from tests.podsim.process import ContainerProcess, Execution, only_child
from tests.podsim.view import Start

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/sys")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_PROGRAMS = ("unshare", "nsenter", "setpriv", "setsid", "chroot", "env", "mount")
_POLL_SECONDS = 0.002
_LOG_TAIL = 1000
# Should the thread that started it be gone, the process goes too.
_WITH_US = ("setpriv", "--pdeathsig=KILL")
_OWN_MOUNTS = ("unshare", "--mount", "--propagation=private")
_OWN_PROCESSES = ("--pid", "--fork", "--kill-child")
# Runs the first process of a new namespace and ends as it did; `unshare --fork` hides by which signal that was.
_FIRST_PROCESS = 'exec 3>&2 2>/dev/null; sh -euc "$1" 2>&3 3>&-; exit $?'


@functools.cache
def missing_namespaces() -> str:
    """Why there are none here; empty text where there are."""
    if os.geteuid() != 0:
        return "only root can give containers namespaces of their own"
    absent = [name for name in _PROGRAMS if not shutil.which(name)]
    if absent:
        return f"not installed: {', '.join(absent)}"
    trial = [*_OWN_MOUNTS, *_OWN_PROCESSES, "--mount-proc", "true"]
    result = subprocess.run(trial, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    return f"this machine gives root no namespaces: {result.stderr.strip()}" if result.returncode else ""


class NamespaceView:
    """The view of one pod."""

    def start(self, start: Start) -> ContainerProcess:
        ready = start.root.with_suffix(".ready")
        ready.unlink(missing_ok=True)
        start.root.mkdir(parents=True, exist_ok=True)
        script = "\n".join(_script(start, ready))
        command = [*_WITH_US, *_OWN_MOUNTS, "unshare", "--pid", "sh", "-c", _FIRST_PROCESS, "sh", script]
        with start.log.open("ab") as log:
            waiter = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        _wait_for(ready.exists, waiter, start)
        # In a process namespace of its own all of them end with the first.
        return ContainerProcess(waiter, only_child(waiter.pid), None)

    def execute(self, start: Start, process: ContainerProcess, words: Sequence[str]) -> Execution:
        enter = ["nsenter", "--mount", "--pid", "--root", f"--target={process.pid}", "--"]
        with start.log.open("ab") as log:
            return Execution(
                subprocess.Popen(
                    [*enter, *_as_container(start, words)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            )


def _wait_for(ready: Callable[[], bool], waiter: "subprocess.Popen[bytes]", start: Start) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not ready():
        if waiter.poll() is not None or time.monotonic() > deadline:
            waiter.kill()
            waiter.wait(HANG_SECONDS)
            if ready():
                return
            said = start.log.read_text(errors="replace")[-_LOG_TAIL:]
            raise OSError(f"container {start.name} was not made ({waiter.returncode}): {said}")
        time.sleep(_POLL_SECONDS)


def _script(start: Start, ready: Path) -> Iterator[str]:
    """Lines of shell that make the container's root, say so by the file `ready`, and become its program."""
    root = shlex.quote(str(start.root))
    yield f"mount -t tmpfs -o mode=0755 tmpfs {root}"
    yield f"cd {root}"
    yield "mkdir proc dev run var root tmp && chmod 1777 tmp"
    yield "mount -t proc proc proc"
    yield "mount -t tmpfs -o mode=0755 tmpfs dev && mkdir dev/shm && ln -s /proc/self/fd dev/fd"
    yield "mount -t tmpfs -o mode=1777,size=64m tmpfs dev/shm"
    for device in _DEVICES:
        yield f": > dev/{device} && mount --bind /dev/{device} dev/{device}"
    for place in _contents(start.image.paths):
        if place.is_symlink():
            yield f"ln -s {shlex.quote(str(place.readlink()))} {_inside(place)}"
        else:
            yield _bind(place, str(place), read_only=True)
    for mount in start.mounts:
        yield _bind(mount.source, mount.target, read_only=mount.read_only)
    if start.identity.read_only_root:
        yield f"mount -o remount,bind,ro {root}"
    yield f": > {shlex.quote(str(ready))}"
    yield f"exec chroot {root} {shlex.join(_as_container(start, start.words))}"


def _contents(paths: Sequence[Path]) -> list[Path]:
    """The system's directories and the image's, without those that lie in another of them."""
    system = [Path(name) for name in _SYSTEM if Path(name).exists()]
    kept = list(system)
    for path in sorted(paths):
        if not any(path.is_relative_to(other) for other in kept if not other.is_symlink()):
            kept.append(path)
    return kept


def _bind(source: Path, target: str, *, read_only: bool) -> str:
    inside = _inside(Path(target))
    options = " -o ro" if read_only else ""
    return f"mkdir -p {inside} && mount --bind{options} {shlex.quote(str(source))} {inside}"


def _inside(target: Path) -> str:
    return shlex.quote(str(target).lstrip("/"))


def _as_container(start: Start, words: Sequence[str]) -> list[str]:
    """A command line that runs `words` as this container's user with this container's environment and nothing else."""
    environment = {**start.image.environment, **start.environment}
    return [
        *_as(start.identity),
        "setsid",
        "env",
        "-i",
        f"--chdir={start.working_directory or '/'}",
        *(f"{name}={value}" for name, value in environment.items()),
        *start.image.here(words),
    ]


def _as(identity: Identity) -> list[str]:
    groups = ",".join(map(str, identity.other_groups))
    return [
        "setpriv",
        f"--reuid={identity.user}",
        f"--regid={identity.group}",
        f"--groups={groups}" if groups else "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=" + ",".join(["-all", *(f"+{name}" for name in identity.capabilities)]),
        *([] if identity.may_gain_privileges else ["--no-new-privs"]),
        "--pdeathsig=KILL",
    ]
