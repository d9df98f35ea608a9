"""The page and the plot of `benchmarks.framework_saves`, and the goals."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot

ALONE: Final = "alone"
KEEPSTEP: Final = "keepstep"
SAVE_EVERY: Final = 20
Runs: TypeAlias = dict[tuple[str, int, str], list[dict[str, Any]]]
"""(framework, ranks, way) -> what `program.py` printed, by round."""

STALL_GOAL: Final = 0.1
"""How long training may wait for a save at most, as a part of the framework's own time for it."""
IN_FLIGHT_GOAL: Final = 1.1
"""How much longer a step may take while a checkpoint is written."""
TOTAL_GOAL: Final = 1.03
"""How much longer a training may take, with a save every 20 steps, than its steps beside saves say."""
_FIRST_STEPS: Final = 2
"""Of a run, in which it makes its memory."""
_REPORT: Final = Path(__file__).parents[1] / "FRAMEWORK_SAVES.md"
_PLOT: Final = _REPORT.with_name("framework_saves.png")
_HEAD: Final = """# What a save costs in a framework

`python -m benchmarks.framework_saves`: 1 GiB of weights and moments, a save every {save_every} steps, on two cores,
without an agent. "Alone" is the framework as it is, for 45 steps; "Keepstep" has 125 steps, and 45 with two ranks.
Rounds in which the ways take turns: {rounds}; numbers are medians.

![Steps of each framework, alone and with Keepstep](framework_saves.png)

"In flight": a step while a checkpoint is written, compared with the other steps of the same run. "Training": the time
from the third step to the end of the run, when all is written, compared with what it would be if each step took as
long as the median of those beside saves. Runs are not compared with each other for this, because whole runs of one
training differ by a fifth on such a machine. The memory for the copy is made in the second step, which is "once".
"Peak": how much more memory the process had at its peak than alone.

All were asked for asynchronous saves. By default Hugging Face's Trainer, TRL and Lightning are asynchronous if no code
of the program may look at a checkpoint before it is in its place. Accelerate and DeepSpeed are not: the line after
`save_state` or `save_checkpoint` is the program's, and may load, rename or add to what was saved. See
[the table](../docs/trainers.md#saving-while-training-goes-on).

| framework | ranks | first save, alone | Keepstep | | later, alone | Keepstep | | in flight | training | once | peak |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def report(runs: Runs, rounds: int) -> None:
    """Write the page."""
    rows = [_row(framework, ranks, runs) for framework, ranks in _trained(runs)]
    _REPORT.write_text(_HEAD.format(save_every=SAVE_EVERY, rounds=rounds) + "\n".join(rows) + "\n")


def missed(runs: Runs) -> Sequence[str]:
    """Say which goals were missed."""
    said = []
    for framework, ranks in _trained(runs):
        found = {
            "first save": _stall(runs, framework, ranks, 0)[2],
            "later saves": _stall(runs, framework, ranks, 1)[2],
        }
        goals = {"first save": STALL_GOAL, "later saves": STALL_GOAL}
        if ranks == 1:
            found |= {"steps in flight": _in_flight(runs, framework, 1), "training": _training(runs, framework, 1)}
            goals |= {"steps in flight": IN_FLIGHT_GOAL, "training": TOTAL_GOAL}
        for what, ratio in found.items():
            if ratio > goals[what]:
                said.append(f"missed: {framework}, {ranks} ranks, {what}: {ratio:.2f} x")
    return said


def plot(runs: Runs) -> None:
    """Draw the seconds of each step, with what was saved after it."""
    frameworks = [framework for framework, ranks in _trained(runs) if ranks == 1]
    figure, all_axes = pyplot.subplots(
        len(frameworks), 1, figsize=(9, 1.8 * len(frameworks)), layout="constrained", sharex=True, squeeze=False
    )
    for framework, (axes,) in zip(frameworks, all_axes, strict=True):
        for way, color in ((ALONE, "tab:red"), (KEEPSTEP, "tab:blue")):
            seconds = _steps(runs[framework, 1, way][0])[:45]
            axes.plot(range(2, len(seconds) + 2), seconds, label=way, color=color, linewidth=1.2)
        axes.set_title(framework, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("s per step")
    all_axes[0, 0].legend(loc="upper right", fontsize=8)
    all_axes[-1, 0].set_xlabel(f"step, with a save every {SAVE_EVERY}")
    figure.savefig(_PLOT, dpi=120)
    pyplot.close(figure)


def _row(framework: str, ranks: int, runs: Runs) -> str:
    cells = [framework, str(ranks)]
    for which in (0, 1):
        theirs, ours, ratio = _stall(runs, framework, ranks, which)
        cells += [f"{theirs:.2f} s", f"{ours:.2f} s", f"{ratio:.2f} x"]
    cells.append(f"{_in_flight(runs, framework, ranks):.2f} x")
    cells.append(f"{_training(runs, framework, ranks):.2f} x")
    once = statistics.median(
        _steps(run)[0] - statistics.median(_steps(run)) for run in runs[framework, ranks, KEEPSTEP]
    )
    cells.append(f"{once:.1f} s")
    peaks = [statistics.median(run["peak_bytes"] for run in runs[framework, ranks, way]) for way in (KEEPSTEP, ALONE)]
    cells.append(f"{(peaks[0] - peaks[1]) / 2**30:.1f} GiB")
    return f"| {' | '.join(cells)} |"


def _trained(runs: Mapping[tuple[str, int, str], object]) -> Iterator[tuple[str, int]]:
    yield from dict.fromkeys((framework, ranks) for framework, ranks, _ in runs)


def _stall(runs: Runs, framework: str, ranks: int, which: int) -> tuple[float, float, float]:
    """Seconds of the first save, or of the later ones, alone and with Keepstep, and the ratio."""
    # The end of the training is no periodic save.
    some = slice(0, 1) if which == 0 else slice(1, 2)
    theirs, ours = (
        statistics.median(seconds for run in runs[framework, ranks, way] for seconds in run["saves"][some])
        for way in (ALONE, KEEPSTEP)
    )
    return theirs, ours, ours / theirs


def _in_flight(runs: Runs, framework: str, ranks: int) -> float:
    """How much longer steps are while a checkpoint is written, on average."""
    ratios = []
    for run in runs[framework, ranks, KEEPSTEP]:
        during = _steps_where(run, (True, True))
        ratios.append(statistics.mean(during) / _beside_saves(run) if during else 1.0)
    return statistics.median(ratios)


def _training(runs: Runs, framework: str, ranks: int) -> float:
    """How much longer it takes with saves."""
    ratios = []
    for run in runs[framework, ranks, KEEPSTEP]:
        seconds: float = run["seconds"] - sum(_steps(run)[:_FIRST_STEPS])
        ratios.append(seconds / (len(run["steps"]) - 1 - _FIRST_STEPS) / _beside_saves(run))
    return statistics.median(ratios)


def _beside_saves(run: Mapping[str, Any]) -> float:
    return statistics.median(_steps_where(run, (False, False)))


def _steps_where(run: Mapping[str, Any], in_flight: tuple[bool, bool]) -> list[float]:
    """The seconds of steps at whose beginning and end a checkpoint was, or was not, being written."""
    # A step that a save held up, or in which a write ended, counts for neither.
    steps = list(zip(_steps(run), itertools.pairwise(run["in_flight"]), strict=True))[_FIRST_STEPS:]
    return [seconds for seconds, flight in steps if flight == in_flight]


def _steps(run: Mapping[str, Any]) -> Sequence[float]:
    """The seconds between the ends of steps: the first is that of the second step."""
    return [end - begin for begin, end in itertools.pairwise(run["steps"])]
