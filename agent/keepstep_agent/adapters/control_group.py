"""Reads how much CPU and memory the control groups allow this process, and derives the upload rate from it.

Also reads which start of the machine it runs in.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

_TLS_CPU_SECONDS_PER_GB: Final = 1.18
"""Measured: benchmarks/RESULTS.md, upload-tls."""
_GB: Final = 1e9
_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_OURS: Final = Path("/proc/self/cgroup")
_NO_LIMIT_FROM_BYTES: Final = 2**60
"""Version 1 of the interface reports a number near 2^63 for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """Seconds of CPU time that may be used per second."""

    cpus: float

    @property
    def upload_bytes_per_second(self) -> float:
        """The highest upload rate over TLS, which costs more CPU than everything else together."""
        return self.cpus / _TLS_CPU_SECONDS_PER_GB * _GB

    def __str__(self) -> str:
        amount = f"{self.cpus:g}" if self.cpus >= 1 else f"{self.cpus * 1000:.0f}m"
        return f"CPU limit {amount}: at most about {self.upload_bytes_per_second / _GB:.2g} GB/s over TLS"


def cpu_limit(*, ours: Path = _OURS, control_groups: Path = _CONTROL_GROUPS) -> CpuLimit | None:
    """Return the lowest CPU limit from our own group up to the root; None if there is none or it cannot be read."""
    groups = _groups("cpu", ours, control_groups)
    limits = [limit for group in groups if (limit := _cpus_of(group)) is not None]
    return CpuLimit(cpus=min(limits)) if limits else None


@cache
def memory_limit_bytes(*, ours: Path = _OURS, control_groups: Path = _CONTROL_GROUPS) -> int | None:
    """As `cpu_limit`, for memory. Read once, because a process keeps its limit."""
    groups = _groups("memory", ours, control_groups)
    limits = [limit for group in groups if (limit := _memory_of(group)) is not None]
    return min(limits, default=None)


def boot_id(*, file: Path = _BOOT_ID) -> str:
    """Return what tells this start of the machine from all others; empty if the kernel does not say."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _groups(controller: str, ours: Path, control_groups: Path) -> Iterator[Path]:
    """Yield our own group and those above it, in both versions of the kernel's interface.

    Some may not exist, because a container sees its own group as the root.
    """
    try:
        lines = [line.split(":", 2) for line in ours.read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if number == "0" or controller in controllers.split(","):
            root = control_groups / controllers
            for place in (PurePosixPath(path), *PurePosixPath(path).parents):
                yield root / str(place).lstrip("/")


def _memory_of(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (group / name).read_text().strip()
            return int(text) if text != "max" and int(text) < _NO_LIMIT_FROM_BYTES else None
        except (OSError, ValueError):
            continue
    return None


def _cpus_of(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
