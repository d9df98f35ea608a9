"""What a save costs a training on a GPU: alone and with Keepstep, in three frameworks and in a loop of its own.

    python -m benchmarks.gpu [--rounds 3] [--device cuda] [--layers 84]

The ways take turns, each in a process of its own. 84 layers are 4 GiB of weights and moments. Also measures the copy
from the device into our memory, beside one into memory that torch has pinned, and how long a training takes from
SIGTERM to its exit. Writes benchmarks/GPU.md. With `--device cpu --layers 3` it shows that it runs, and writes nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from keepstep.asynchronous_saves.host_copy import copy_to_host
from keepstep.asynchronous_saves.host_memory import HostMemory
from keepstep_api import names

_FRAMEWORKS: Final = ("plain", "hugging-face", "lightning", "accelerate")
_STEPS: Final = 50
_SAVE_EVERY: Final = 10
_STOP_AT: Final = 15
_REPORT: Final = Path(__file__).with_name("GPU.md")
_COPIED_BYTES: Final = 1024**3
_COPIES: Final = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=84)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here: nothing was measured")
        return 1
    rows = [_row(framework, options) for framework in _FRAMEWORKS]
    page = _page(options, rows)
    print(page)
    if options.device == "cuda":
        _REPORT.write_text(page)
    return 0


def _page(options: argparse.Namespace, rows: Sequence[str]) -> str:
    card = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    ours, torchs = _copy_rates(options.device)
    return "\n".join(
        [
            "# What a save costs on a GPU",
            "",
            "Made by `python -m benchmarks.gpu`; do not edit.",
            "",
            f"{card}, torch {torch.__version__}, {options.layers} layers, {options.rounds} rounds in which the ways "
            "take turns; medians. All were asked for asynchronous saves.",
            "",
            "| training | first save, alone | Keepstep | later, alone | Keepstep | SIGTERM to exit |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"From the device into Keepstep's memory: {ours:.1f} GB/s; into memory pinned by torch: {torchs:.1f} GB/s.",
            "",
        ]
    )


def _row(framework: str, options: argparse.Namespace) -> str:
    alone: list[list[float]] = []
    kept: list[list[float]] = []
    ends: list[float] = []
    for _ in range(options.rounds):
        alone.append(_trained(framework, options)[0]["saves"])
        kept.append(_trained(framework, options, "--keepstep")[0]["saves"])
        measured, ended_at = _trained(framework, options, "--keepstep", "--stop-at", str(_STOP_AT))
        ends.append(ended_at - measured["stopped_at"])

    def first(ways: list[list[float]]) -> float:
        return statistics.median(saves[0] for saves in ways)

    def later(ways: list[list[float]]) -> float:
        return statistics.median(seconds for saves in ways for seconds in saves[1:])

    numbers = (first(alone), first(kept), later(alone), later(kept), statistics.median(ends))
    return f"| {framework} | " + " | ".join(f"{seconds:.2f} s" for seconds in numbers) + " |"


def _trained(framework: str, options: argparse.Namespace, *arguments: str) -> tuple[dict[str, Any], float]:
    """Return what the program printed first, and when (time.time()) it had ended."""
    with tempfile.TemporaryDirectory(prefix="gpu-saves-") as folder:
        words = [framework, folder, str(_STEPS), str(_SAVE_EVERY), "--device", options.device]
        command = [sys.executable, "-m", "benchmarks.framework_saves.program", *words, *arguments]
        command += ["--layers", str(options.layers)]
        environment = {**os.environ, names.ENV_VOLUME: folder}
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        ended_at = time.time()
    stops = "--stop-at" in arguments
    if ended.returncode != (names.JUST_IN_TIME_EXIT_CODE if stops else 0):
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}")
    # Frameworks print too.
    printed = next(line for line in ended.stdout.splitlines() if line.startswith('{"'))
    return json.loads(printed), ended_at


def _copy_rates(device: str) -> tuple[float, float]:
    """Return GB/s from the device into our memory, and into torch's pinned memory; the copies take turns."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    pinned = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    memory = HostMemory()
    memory.reserve(_COPIED_BYTES)
    ours, torchs = [], []
    for _ in range(_COPIES):
        memory.reset()
        ours.append(_seconds(lambda: copy_to_host(source, memory)))
        torchs.append(_seconds(lambda: pinned.copy_(source)))
    return _COPIED_BYTES / 1e9 / statistics.median(ours), _COPIED_BYTES / 1e9 / statistics.median(torchs)


def _seconds(work: Any) -> float:
    began_at = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began_at


if __name__ == "__main__":
    sys.exit(main())
