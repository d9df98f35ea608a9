"""A process that may use so much memory, page cache included, or so much CPU, and no more."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_PERIOD: Final = 100_000


class NoControlGroup(Exception):  # noqa: N818 - it is an answer
    """Why there can be none here."""


class ControlGroup:
    """A control group below our own; either version of the kernel's interface."""

    def __init__(self, directory: Path, parent: Path) -> None:
        self._directory = directory
        self._parent = parent

    def wrap(self, command: list[str]) -> list[str]:
        """The same command, run inside."""
        enter = f'echo $$ > {shlex.quote(str(self._directory / "cgroup.procs"))} && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What we start meanwhile stays inside; we do not."""
        (self._directory / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._parent / "cgroup.procs").write_text(str(os.getpid()))

    def out_of_memory_kills(self) -> int:
        """How many processes the kernel has killed in it for their memory."""
        for name in ("memory.events", "memory.oom_control"):
            if (self._directory / name).exists():
                words = [line.split() for line in (self._directory / name).read_text().splitlines()]
                return int(dict(words)["oom_kill"])
        raise NoControlGroup("it has no memory controller")


@contextmanager
def memory_control_group(limit_bytes: int) -> Iterator[ControlGroup]:
    """NoControlGroup says why there is none."""
    with _control_group(
        "memory", {"memory.limit_in_bytes": str(limit_bytes)}, {"memory.max": str(limit_bytes)}
    ) as made:
        yield made


@contextmanager
def cpu_control_group(cpus: float) -> Iterator[ControlGroup]:
    """NoControlGroup says why there is none."""
    quota = round(cpus * _PERIOD)
    with _control_group("cpu", {"cpu.cfs_quota_us": str(quota)}, {"cpu.max": f"{quota} {_PERIOD}"}) as made:
        yield made


@contextmanager
def _control_group(controller: str, version_1: dict[str, str], version_2: dict[str, str]) -> Iterator[ControlGroup]:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    of_version_1 = [(names, path) for _, names, path in lines if controller in names.split(",")]
    names, path = of_version_1[0] if of_version_1 else ("", next(path for number, _, path in lines if number == "0"))
    parent = _ROOT / names / path.lstrip("/")
    directory = parent / f"keepstep-{controller}-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        raise NoControlGroup(f"no control group can be made here ({error.strerror})") from error
    try:
        try:
            for name, text in (version_1 if of_version_1 else version_2).items():
                (directory / name).write_text(text)
        except OSError as error:
            raise NoControlGroup(f"the {controller} controller is not ours ({error.strerror})") from error
        yield ControlGroup(directory, parent)
    finally:
        directory.rmdir()
