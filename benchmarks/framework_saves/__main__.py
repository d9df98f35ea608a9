"""How long Hugging Face's Trainer and Accelerate wait for a save of 1 GiB, alone and with Mooring's asynchronous saves.

    python -m benchmarks.framework_saves [--rounds 3]

Both ways take turns, each in a process of its own, so that what else the machine does meets both alike. Writes
benchmarks/FRAMEWORK_SAVES.md, and exits 1 if a save takes more than a tenth of the framework's own. Needs 8 GiB of
memory and 4 GiB of free disk below the temporary directory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mooring_api import names

STEPS: Final = 45
SAVE_EVERY: Final = 20
GOAL: Final = 0.1
"""How long training may wait for a save at most, as a part of the framework's own time for it."""
FRAMEWORKS: Final = ("hugging-face", "accelerate")
_REPORT: Final = Path(__file__).parents[1] / "FRAMEWORK_SAVES.md"
_HEAD: Final = """# What a save costs in a framework

`python -m benchmarks.framework_saves`: {steps} steps of about half a second with a save of 1 GiB every {save_every}, on
two cores, without an agent. Rounds in which both ways take turns: {rounds}; the numbers are medians. Between saves
there is time to write. "Training" is from the first step to the end, when all is written.

| framework | first save, alone | asynchronous | | later, alone | asynchronous | | training, asynchronous / alone |
|---|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds: int = parser.parse_args().rounds
    rows, is_missed = [], False
    for framework in FRAMEWORKS:
        alone, ours = [], []
        for _ in range(rounds):
            alone.append(_trained(framework))
            ours.append(_trained(framework, "--mooring"))
        row, ratios = _row(framework, alone, ours)
        rows.append(row)
        is_missed |= max(ratios) > GOAL
        print(rows[-1], flush=True)
    head = _HEAD.format(steps=STEPS, save_every=SAVE_EVERY, rounds=rounds)
    _REPORT.write_text(head + "\n".join(rows) + "\n")
    return int(is_missed)


def _trained(framework: str, *more: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="framework-saves-") as folder:
        arguments = [framework, folder, str(STEPS), str(SAVE_EVERY), *more]
        environment = {**os.environ, names.ENV_VOLUME: folder, names.ENV_ASYNCHRONOUS_SAVES: "true"}
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.framework_saves.program", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    measured: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return measured


def _row(framework: str, alone: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> tuple[str, list[float]]:
    cells, ratios = [framework], []
    for some in (slice(0, 1), slice(1, 2)):
        theirs_seconds, our_seconds = (
            statistics.median(seconds for run in runs for seconds in run["saves"][some]) for runs in (alone, ours)
        )
        cells += [f"{theirs_seconds:.2f} s", f"{our_seconds:.2f} s", f"{our_seconds / theirs_seconds:.2f} x"]
        ratios.append(our_seconds / theirs_seconds)
    totals = [statistics.median(run["seconds"] for run in runs) for runs in (ours, alone)]
    return f"| {' | '.join([*cells, f'{totals[0] / totals[1]:.2f} x'])} |", ratios


if __name__ == "__main__":
    sys.exit(main())
