"""Where autoload comes from: `keepstep run --autoload`, and a volume that brings the client to another interpreter."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import google
import grpc
import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep import autoload

LOOKS: Final = (
    "import os, sys; print(repr(os.environ.get('PYTHONPATH')), '_keepstep_autoload.zero_code' in sys.modules)"
)


def run(
    tmp_path: Path, *options: str, program: Sequence[str] = (sys.executable, "-c", LOOKS), **environment: str
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "keepstep_agent", "run", "--to", f"file://{tmp_path}/bucket"]
    command += ["--watch=off", *options]
    (tmp_path / "bucket").mkdir(exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*command, "--volume", str(tmp_path / "volume"), "--", *program],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    ("users", "expected"), [({}, ""), ({"PYTHONPATH": "/theirs:/more"}, ":/theirs:/more"), ({"PYTHONPATH": ""}, "")]
)
def test_a_run_with_autoload_puts_its_folder_before_the_users(
    tmp_path: Path, users: dict[str, str], expected: str
) -> None:
    got = run(tmp_path, "--autoload", **users)
    assert got.stdout == f"{str(autoload.path()) + expected!r} True\n", got.stderr
    assert got.returncode == 0


def test_a_run_without_it_leaves_the_path_alone(tmp_path: Path) -> None:
    assert run(tmp_path, PYTHONPATH="/theirs").stdout == "'/theirs' False\n"


def test_an_agent_of_a_checkout_brings_the_client_to_an_interpreter_that_has_none(tmp_path: Path) -> None:
    """There, the two packages of the client lie apart."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=HANG_SECONDS)
    code = "import keepstep; print(keepstep.Checkpointer, keepstep.__file__)"
    # What the default volume makes in the program's directory.
    (tmp_path / "directory" / "keepstep").mkdir(parents=True)
    program = (str(bare / "bin" / "python"), "-c", code)
    got = run(tmp_path, "--autoload", program=program, PYTHONPATH=str(tmp_path / "directory"))
    assert got.stdout.startswith("<class 'keepstep.checkpointer.Checkpointer'>"), got.stderr
    assert str(Path(autoload.path()).parents[1]) in got.stdout
    assert "autoload is off" not in got.stderr


def test_a_volume_brings_the_client_to_an_interpreter_that_has_none(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=HANG_SECONDS
    )
    injected, needed, frameworks = tmp_path / "injected", tmp_path / "needed", tmp_path / "frameworks"
    (tmp_path / "bucket").mkdir()
    restore = ["restore", f"file://{tmp_path}/bucket", "--volume", tmp_path / "volume", "--autoload-to", injected]
    subprocess.run([sys.executable, "-m", "keepstep_agent", *map(str, restore)], check=True, timeout=HANG_SECONDS)
    needed.mkdir()
    packages = [Path(grpc.__path__[0]), Path(google.__path__[0])]
    for package in [*packages, *packages[0].parent.glob("typing_extensions.py")]:
        (needed / package.name).symlink_to(package)
    worker = frameworks / "torch" / "utils" / "data" / "_utils" / "worker.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("def _worker_loop(): pass\n")
    code = """if True:
        import torch.utils.data._utils.worker as worker
        import keepstep
        print(worker._worker_loop.__module__, keepstep.__file__)
    """
    python = str(tmp_path / "bare" / "bin" / "python")
    got = subprocess.run(
        [python, "-c", code],
        env={"PYTHONPATH": f"{injected}:{needed}:{frameworks}"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    expected = f"keepstep.workers.worker_processes {injected / 'keepstep' / '__init__.py'}\n"
    assert (got.stdout, got.stderr) == (expected, "")
