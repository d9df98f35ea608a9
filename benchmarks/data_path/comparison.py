"""Rounds in which every tool makes the same transfer once, one after the other."""

import filecmp
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from benchmarks.data_path.process import Measurement, ToolError
from benchmarks.data_path.tools import Job, Tool
from benchmarks.data_path.workplace import Workplace

MODES: Final[Mapping[str, tuple[bool, bool]]] = {
    "upload-http": (True, False),
    "upload-tls": (True, True),
    "download-http": (False, False),
    "download-tls": (False, True),
}
"""(upload, secure) by name."""
KEEPSTEP: Final = "keepstep"
LIMITS: Final = "limits"
"""How the names of all C limits begin."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What one tool did in one mode."""

    tool: str
    version: str
    size_bytes: int
    measurements: list[Measurement] = field(default_factory=list)
    failure: str = ""

    def figures(self, of: Callable[[Measurement], float]) -> list[float]:
        return [of(measurement) for measurement in self.measurements]

    @property
    def rates(self) -> list[float]:
        """GB/s."""
        return self.figures(lambda measurement: self.size_bytes / 1e9 / measurement.wall_seconds)

    @property
    def costs(self) -> list[float]:
        """CPU seconds per GB."""
        return self.figures(lambda measurement: measurement.cpu_seconds / (self.size_bytes / 1e9))

    @property
    def main_thread_costs(self) -> list[float]:
        """CPU seconds per GB of the first thread alone."""
        return self.figures(lambda measurement: measurement.main_thread_cpu_seconds / (self.size_bytes / 1e9))

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def cost(self) -> float:
        return median(self.costs)

    @property
    def main_thread_cost(self) -> float:
        return median(self.main_thread_costs)

    @property
    def check(self) -> str:
        return self.measurements[-1].counts.check()


def compare(
    workplace: Workplace,
    tools: Sequence[Tool],
    *,
    mode: str,
    rounds: int,
    say: Callable[[str], None],
    hopeless_after: int = 2,
) -> list[Result]:
    """A tool that fails is measured no more, and its failure is kept.

    Nor is a peer that after so many rounds is hopeless, see there: most of the hours would be its.
    """
    upload, secure = MODES[mode]
    sizes = {path.name: path.stat().st_size for path in workplace.sources.iterdir()}
    size_bytes = sum(sizes.values())
    able = [tool for tool in tools if tool.can(upload=upload, secure=secure)]
    results = {tool.name: Result(tool=tool.name, version=tool.version, size_bytes=size_bytes) for tool in able}
    for number in range(rounds):
        # The next round starts with another one: who follows whom is nobody's luck.
        start = number % max(1, len(able))
        for tool in [*able[start:], *able[:start]]:
            result = results[tool.name]
            if result.failure or (number >= hopeless_after and _is_hopeless(result, list(results.values()))):
                continue
            try:
                with workplace.job(upload=upload, secure=secure) as job:
                    measurement = tool.run(job)
                    _check(job, tool, compare_bytes=number == 0)
            except (ToolError, AssertionError) as failure:
                result.failure = str(failure)
                say(f"{mode} {tool.name}: FAILED {failure}")
                continue
            result.measurements.append(measurement)
            say(
                f"{mode} round {number + 1} {tool.name}: {result.rates[-1]:.2f} GB/s, "
                f"{result.costs[-1]:.3f} CPU s/GB, "
                f"{result.main_thread_costs[-1]:.3f} of its main thread"
            )
    return list(results.values())


def _is_hopeless(result: Result, results: Sequence[Result]) -> bool:
    """Less than half as fast as the fastest peer and more than twice as expensive as the cheapest: never the best."""
    rivals = [row for row in measured(results) if is_peer(row.tool)]
    return (
        result in rivals
        and result.rate < max(row.rate for row in rivals) / 2
        and result.cost > min(row.cost for row in rivals) * 2
    )


def is_peer(tool: str) -> bool:
    return not tool.startswith(KEEPSTEP) and not tool.startswith(LIMITS)


def _check(job: Job, tool: Tool, *, compare_bytes: bool) -> None:
    """What was downloaded is what was asked for. (Uploads: the server knows sizes; it keeps no bytes.)"""
    if job.upload:
        sizes = job.server.sizes(f"{job.prefix}/")
        expected = {path.name: path.stat().st_size for path in job.sources.iterdir()}
        if not tool.name.startswith(LIMITS):
            assert _holds(sizes, expected), f"{tool.name} stored {sizes}"
        return
    for path in job.sources.iterdir():
        copy = job.destination / path.name
        assert copy.stat().st_size == path.stat().st_size, f"{tool.name}: {copy.name} has another size"
        assert not compare_bytes or filecmp.cmp(path, copy, shallow=False), f"{tool.name}: {copy.name} differs"


def _holds(sizes: Mapping[str, int], expected: Mapping[str, int]) -> bool:
    """Keepstep may pack small files into larger objects, so all that must be there is the sum."""
    return sum(sizes.values()) >= sum(expected.values())


def measured(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result.measurements]


def only(tools: Sequence[Tool], names: str) -> list[Tool]:
    """Those whose name begins with one of `names` (separated by commas); empty: all."""
    wanted = [name for name in names.split(",") if name]
    return [tool for tool in tools if not wanted or any(tool.name.startswith(name) for name in wanted)]


def source_sizes(gibibytes: float, files: int = 4) -> dict[str, int]:
    size_bytes = int(gibibytes * (1 << 30)) // files
    return {f"f{number}.bin": size_bytes for number in range(files)}
