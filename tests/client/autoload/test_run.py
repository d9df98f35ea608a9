"""Where autoload comes from: `keepstep run --autoload`, and a volume that brings the client to another interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import google
import grpc
import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep import autoload


def run(tmp_path: Path, *options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    code = "import os, sys; print(repr(os.environ.get('PYTHONPATH')), '_keepstep_autoload.zero_code' in sys.modules)"
    command = [sys.executable, "-m", "keepstep_agent", "run", "--to", f"file://{tmp_path}/bucket"]
    command += ["--watch=off", *options]
    (tmp_path / "bucket").mkdir(exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*command, "--volume", str(tmp_path / "volume"), "--", sys.executable, "-c", code],
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
