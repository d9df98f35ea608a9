"""Trainings on a GPU: stopped they go on bit by bit, and what captures or compiles a step, or fails on the device."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.gpu.program import sums
from tests.harness.bounds import HANG_SECONDS

from keepstep_api import names

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("program.py")


def run(way: str, volume: Path, device: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, names.ENV_VOLUME: str(volume), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    words = [sys.executable, str(PROGRAM), way, str(volume / "checkpoints"), device, *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def losses(ended: "subprocess.CompletedProcess[str]") -> Sequence[str]:
    return [line for line in ended.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize("way", ["checkpointer", "torch_loop", "hugging_face"])
@pytest.mark.parametrize("stop_at", [6, 8], ids=["between saves", "at a save"])
def test_stopped_it_goes_on_bit_by_bit(way: str, stop_at: int, device: str, tmp_path: Path) -> None:
    alone = run(way, tmp_path / "alone", device)
    assert alone.returncode == 0, alone.stderr
    stopped = run(way, tmp_path / "stopped", device, "--stop-at", stop_at)
    assert stopped.returncode == names.JUST_IN_TIME_EXIT_CODE, stopped.stderr
    resumed = run(way, tmp_path / "stopped", device)
    assert resumed.returncode == 0, resumed.stderr
    assert [*losses(stopped), *losses(resumed)] == losses(alone)


def test_a_step_may_be_captured_after_one_step(gpu: str, tmp_path: Path) -> None:
    ended = run("graph", tmp_path, gpu)
    assert ended.stdout.splitlines() == ["equal True"], ended.stderr


def test_a_whole_step_may_be_compiled(device: str, tmp_path: Path) -> None:
    ended = run("compiled", tmp_path, device)
    assert ended.stdout.splitlines() == ["equal True"], ended.stderr


def test_a_failure_on_the_device_leaves_the_save_in_flight_whole(device: str, tmp_path: Path) -> None:
    ended = run("failing", tmp_path, device)
    assert ended.returncode != 0
    assert "assert" in ended.stderr.lower()
    state = torch.load(tmp_path / "checkpoints" / "checkpoint-1" / "state.pt", map_location="cpu")
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)])
    model.load_state_dict(state["model"])
    assert sums(model) == pytest.approx(state["sum"], rel=1e-6)
