"""A training in another thread than the main one is stopped just in time, and goes on where it was.

Python gives signals to the main thread alone, which here waits for the training and handles none.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.integrations.thread_program import STEPS

from keepstep.checkpoints.records import Kind, read_records
from keepstep_api import names

PROGRAM = Path(__file__).with_name("thread_program.py")


@pytest.mark.parametrize(
    ("framework", "main"),
    [
        ("checkpointer", "waits"),
        ("checkpointer", "looks"),
        ("checkpointer", "ends"),
        ("hugging_face", "waits"),
        pytest.param("accelerate", "looks", marks=pytest.mark.nightly),
        pytest.param("lightning", "waits", marks=pytest.mark.nightly),
    ],
)
def test_a_training_in_a_thread_is_stopped_and_goes_on(framework: str, main: str, tmp_path: Path) -> None:
    if find_spec({"checkpointer": "torch", "hugging_face": "transformers"}.get(framework, framework)) is None:
        pytest.skip(f"{framework} is not installed")
    # Short names: a socket lies below them.
    volume = tmp_path / "v"
    words = ("run", "--to", f"file://{tmp_path / 'store'}", "--volume", str(volume), "--autoload", "--")
    program = (sys.executable, str(PROGRAM), framework, main, str(volume / "checkpoints"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}

    def live() -> "subprocess.CompletedProcess[str]":
        command = (sys.executable, "-m", "keepstep_agent", *words, *program)
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )

    stopped = live()
    assert stopped.returncode == 143, stopped.stdout + stopped.stderr
    assert "begins with step 0" in stopped.stdout
    assert "trained" not in stopped.stdout
    saved = read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)[0]
    assert saved.kind is Kind.JUST_IN_TIME
    assert 3 <= saved.step < STEPS
    resumed = live()
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"begins with step {saved.step}" in resumed.stdout
    assert "trained" in resumed.stdout
