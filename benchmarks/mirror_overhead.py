"""What `keepstep run --watch` takes from a program that saves nothing: steps per second with it and without.

    python -m benchmarks.mirror_overhead [--rounds 5] [--seconds 15] [--quick]

`benchmarks.training_steps`, the runner and the agent have one core together, so that whatever Keepstep does is taken
from the steps. In each round all ways have their turn, another one first each time, and a ratio is one of the same
round. Writes benchmarks/MIRROR_OVERHEAD.md, unless it is --quick, and exits 1 if the goal is missed. Takes six minutes
on a machine that does nothing else.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.data_path.process import process_cpu_ns

GOAL: Final = 0.98
"""Steps per second, of those without Keepstep."""
REPORT: Final = Path(__file__).with_name("MIRROR_OVERHEAD.md")
WAYS: Final[Mapping[str, Sequence[str] | None]] = {
    "alone": None,
    "keepstep run --watch": (),
    "keepstep run --watch --autoload": ("--autoload",),
}
"""The flags besides --watch; None: without Keepstep. The first one is what the others are compared with."""
_WARM_SECONDS: Final = 3.0
_END_SECONDS: Final = 120.0
_NOTHING_STORED: Final = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`beside_cpu_seconds`: of the runner and the agent, while the steps were counted."""

    steps: int
    seconds: float
    cpu_seconds: float
    beside_cpu_seconds: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirror_overhead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--quick", action="store_true", help="two rounds of 5 s, and no page")
    arguments = parser.parse_args()
    rounds, seconds = (2, 5.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="keepstep-overhead-") as folder:
        turns = compare(Path(folder), rounds=rounds, seconds=seconds)
    text = page(turns, rounds=rounds, seconds=seconds)
    print(text)
    if not arguments.quick:
        REPORT.write_text(text)
    return 0 if all(_median(ratios(turns, way)) >= GOAL for way in list(WAYS)[1:]) else 1


def compare(folder: Path, *, rounds: int, seconds: float) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for number in range(rounds):
        start = number % len(ways)
        for way in [*ways[start:], *ways[:start]]:
            turn = one_turn(folder / f"{number}-{ways.index(way)}", WAYS[way], seconds)
            turns[way].append(turn)
            print(f"{way}: {turn}", file=sys.stderr, flush=True)
    return turns


def one_turn(folder: Path, flags: Sequence[str] | None, seconds: float) -> Turn:
    (folder / "out").mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.training_steps", str(_WARM_SECONDS), str(seconds)]
    if flags is not None:
        run = [sys.executable, "-m", "keepstep_agent", "run", f"--to=file://{folder}/store"]
        run += [f"--volume={folder}/volume", f"--watch={folder}/out", *flags]
        command = [*run, "--", *command]
    core = max(os.sched_getaffinity(0))
    command = ["taskset", "--cpu-list", str(core), *command]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n", (folder / "log").read_text()
        beside = [] if flags is None else _runner_and_agent(process.pid)
        before = sum(map(process_cpu_ns, beside))
        word, steps, took, cpu = process.stdout.readline().split()
        assert word == "end"
        spent = sum(map(process_cpu_ns, beside)) - before
        process.communicate(timeout=_END_SECONDS)
        assert process.returncode == (0 if flags is None else _NOTHING_STORED), (folder / "log").read_text()
    finally:
        process.kill()
        process.wait(_END_SECONDS)
    return Turn(steps=int(steps), seconds=float(took), cpu_seconds=float(cpu), beside_cpu_seconds=spent / 1e9)


def _runner_and_agent(runner: int) -> list[int]:
    children = list(map(int, Path(f"/proc/{runner}/task/{runner}/children").read_text().split()))
    agents = [pid for pid in children if b"\0agent\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(agents) == 1
    return [runner, *agents]


def ratios(turns: Mapping[str, Sequence[Turn]], way: str) -> list[float]:
    """Of steps per second, round by round."""
    alone = next(iter(WAYS))
    return [one.rate / other.rate for one, other in zip(turns[way], turns[alone], strict=True)]


def page(turns: Mapping[str, Sequence[Turn]], *, rounds: int, seconds: float) -> str:
    text = (
        "A small transformer, trained without a save on one core, which the runner and the agent have to share with it "
        f"({os.cpu_count()} cores, {platform.machine()}): {rounds} rounds, in each of which each way has {seconds:g} "
        f"s, after {_WARM_SECONDS:g} s that do not count. Ratios are those of the same round: their median, the least "
        "and the most. How far the steps per second alone are apart from round to round says how far the machine did "
        "other things. The CPU of runner and agent depends on that much less. At the end the machine had "
        f"{os.getloadavg()[0]:.1f} processes to run."
    )
    lines = [
        "# What watching takes from a program",
        "",
        "Made by `make bench` (`benchmarks/mirror_overhead.py`); do not edit.",
        "",
        *textwrap.wrap(text, 118),
        "",
        "| way | steps/s | x alone | CPU ms per step | runner and agent: CPU s per minute | % of the core |",
        "|---|---|---|---|---|---|",
        *(_row(way, turns) for way in turns),
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(_goal(way, turns) for way in list(turns)[1:]),
    ]
    return "\n".join(lines) + "\n"


def _row(way: str, turns: Mapping[str, Sequence[Turn]]) -> str:
    share = _median([one.beside_cpu_seconds / one.seconds for one in turns[way]])
    cells = [
        _spread([one.rate for one in turns[way]], 1),
        _spread(ratios(turns, way), 3),
        _spread([one.cpu_seconds / one.steps * 1e3 for one in turns[way]], 2),
        f"{share * 60:.2f}",
        f"{share:.2%}",
    ]
    return f"| {way} | {' | '.join(cells)} |"


def _goal(way: str, turns: Mapping[str, Sequence[Turn]]) -> str:
    found = _median(ratios(turns, way))
    return f"| {way}: steps/s ≥ {GOAL} x alone | {found:.3f} x | {'yes' if found >= GOAL else 'no'} |"


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{_median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    sys.exit(main())
