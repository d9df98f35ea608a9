"""A process that may use so much memory and no more, page cache included."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_V1: Final = Path("/sys/fs/cgroup/memory")
_V2: Final = Path("/sys/fs/cgroup")


class NoControlGroup(Exception):  # noqa: N818 - it is an answer
    """Why there can be none here."""


class ControlGroup:
    """A memory control group below our own; either version of the kernel's interface."""

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


@contextmanager
def control_group(limit_bytes: int) -> Iterator[ControlGroup]:
    """NoControlGroup says why there is none."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    version_1 = next((path for _, controllers, path in lines if controllers == "memory"), None)
    root = _V1 if version_1 is not None else _V2
    path = version_1 if version_1 is not None else next(path for number, _, path in lines if number == "0")
    parent = root / path.lstrip("/")
    directory = parent / f"mooring-benchmark-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        raise NoControlGroup(f"no control group can be made here ({error.strerror})") from error
    try:
        limit = directory / ("memory.limit_in_bytes" if version_1 is not None else "memory.max")
        try:
            limit.write_text(str(limit_bytes))
        except OSError as error:
            raise NoControlGroup(f"the memory controller is not ours ({error.strerror})") from error
        yield ControlGroup(directory, parent)
    finally:
        directory.rmdir()
