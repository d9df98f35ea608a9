"""A program that looks at what it saves, and has files of its own there, sees with Keepstep what it sees alone.

Real frameworks under `keepstep run --autoload` with its defaults: the same lines, the same exit code, the same files.
All its files of the newest checkpoint come back.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.lanes import nightly

PROGRAM = Path(__file__).with_name("looking_program.py")
NEWEST = {
    "accelerate": ("step-4", {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}),
    "deepspeed": (
        "last",
        {"mp_rank_00_model_states.pt", "args.json", "ema.safetensors", "samples/1.png", "state.json", "train.log"},
    ),
    "hugging_face": (
        "checkpoint-4",
        {"ema.pt", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"},
    ),
    "lightning": ("epoch=0-step=4.ckpt", set[str]()),
    "dcp": ("step-4", {".metadata", "__0_0.distcp", "meta.pt"}),
}
"""The newest checkpoint of each program, and what it must have; none for one that is a file."""


@pytest.mark.parametrize("framework", ["accelerate", "hugging_face", "lightning", "dcp", *nightly("deepspeed")])
def test_it_sees_what_it_sees_alone_and_its_own_files_come_back(framework: str, tmp_path: Path) -> None:
    if find_spec({"hugging_face": "transformers", "dcp": "torch"}.get(framework, framework)) is None:
        pytest.skip(f"{framework} is not installed")
    alone = run(sys.executable, str(PROGRAM), framework, str(tmp_path / "alone" / "checkpoints"))
    assert alone.returncode == 0, alone.stderr

    # Short names: a socket lies below them.
    volume, store = tmp_path / "v", f"file://{tmp_path / 'store'}"
    output = volume / "checkpoints"
    kept = (sys.executable, "-m", "keepstep_agent", "run", "--to", store, "--volume", str(volume))
    protected = run(*kept, "--autoload", "--", sys.executable, str(PROGRAM), framework, str(output))
    assert protected.returncode == 0, protected.stderr
    assert seen(protected) == seen(alone)
    assert files(output) == files(tmp_path / "alone" / "checkpoints")

    other = (*kept[:-1], str(tmp_path / "w"))
    restored = run(*other, "--", sys.executable, "-c", "pass")
    assert restored.returncode == 0, restored.stderr
    name, expected = NEWEST[framework]
    newest = tmp_path / "w" / "checkpoints" / name
    assert expected <= set(files(newest)) if expected else newest.is_file(), files(newest.parent)


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def seen(ended: "subprocess.CompletedProcess[str]") -> Sequence[str]:
    """Return what it saw."""
    lines = [line for line in ended.stdout.splitlines() if line.startswith("seen ")]
    assert lines, ended.stdout + ended.stderr
    return lines


def files(folder: Path) -> Sequence[str]:
    """Return the files below a folder, but for the folder that is Keepstep's own."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
