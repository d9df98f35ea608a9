"""`keepstep run` tells the program where restore has put a checkpoint, for scripts that resume by an argument."""

import shutil
import sys
from pathlib import Path

import pytest
from tests.harness.run_process import RunProcess

from keepstep_api.names import ENV_RESUME

LINE = """exec python script.py ${KEEPSTEP_RESUME:+--resume_from_checkpoint "$KEEPSTEP_RESUME"}"""
SCRIPT = """
import os, signal, sys
from pathlib import Path
import keepstep
print("arguments:", *sys.argv[1:], flush=True)
resumed = Path(sys.argv[2]) if sys.argv[1:] else None
step = int((resumed / "step").read_text()) + 1 if resumed else 1
checkpointer = keepstep.Checkpointer()
checkpointer.resume()
with checkpointer.save(step) as directory:
    (directory / "step").write_text(str(step))
checkpointer.finish()
"""


def arguments(run: RunProcess) -> list[str]:
    return [line.removeprefix("arguments:").strip() for line in run.output().splitlines() if "arguments:" in line]


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    """As the page says it, but where this Python and the script are."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return ("sh", "-c", LINE.replace("python script.py", f"{sys.executable} '{script}'"))


def test_the_documented_line_resumes_a_script_with_what_was_restored(tmp_path: Path, command: tuple[str, ...]) -> None:
    # A path with a blank is still one argument.
    volume, store = tmp_path / "the volume", f"file://{tmp_path}/store"
    for _ in range(2):
        with RunProcess(volume, store, command=command, environment={ENV_RESUME: "of another run"}) as run:
            assert run.wait() == 0, run.output()
    shutil.rmtree(volume)
    with RunProcess(volume, store, command=command) as run:
        assert run.wait() == 0, run.output()
    options = [f"--resume_from_checkpoint {volume}/checkpoints/checkpoint-{step}" for step in (1, 2)]
    assert arguments(run) == ["", *options]


@pytest.mark.nightly
def test_a_run_that_restores_nothing_names_no_earlier_checkpoint(tmp_path: Path, command: tuple[str, ...]) -> None:
    volume = tmp_path / "volume"
    options = {"volume": volume, "destination": f"file://{tmp_path}/store", "command": command}
    for restore in ("whole", "whole", "off"):
        with RunProcess(**options, restore=restore) as run:  # type: ignore[arg-type]
            assert run.wait() == 0, run.output()
    shutil.rmtree(tmp_path / "store" / ".keepstep" / "commits")
    with RunProcess(**options) as run:  # type: ignore[arg-type]
        assert run.wait() == 0, run.output()
    option = f"--resume_from_checkpoint {volume}/checkpoints/checkpoint-1"
    assert arguments(run) == ["", option, "", ""]
