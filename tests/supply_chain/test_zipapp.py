"""The agent as one file, as `make zipapp` makes it: in `make test-all` alone, because that asks the package index."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.supply_chain.distributions import PROGRAM, ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(4 * HANG_SECONDS)]


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made for this Python, from a copy of the checkout, so that nothing is left in it."""
    copy = tmp_path_factory.mktemp("zipapp") / "checkout"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", ".tools", "node_modules"))
    make = ["make", "zipapp", f"PYTHON={sys.executable}", f"ZIPAPP_PYTHONS={sys.executable}"]
    made = subprocess.run(make, cwd=copy, capture_output=True, text=True, timeout=3 * HANG_SECONDS, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return copy / "dist" / f"keepstep-agent-linux-{platform.machine()}.pyz"


def start(one_file: Path, *words: object, home: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """As a user who has nothing of ours. Where root may cut it off, without a network."""
    alone = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
    return subprocess.run(
        [*alone, sys.executable, str(one_file), *map(str, words)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), **variables},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_it_runs_and_resumes_a_program_whose_environment_has_nothing_of_keepsteps(
    one_file: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=HANG_SECONDS)
    freeze = [str(environment / "bin" / "python"), "-m", "pip", "freeze", "--all"]
    before = subprocess.run(freeze, capture_output=True, check=True, timeout=HANG_SECONDS).stdout
    (tmp_path / "bucket").mkdir()
    run = [
        "run",
        "--autoload",
        "--to",
        f"file://{tmp_path}/bucket",
        "--",
        environment / "bin" / "python",
        "-c",
        PROGRAM,
    ]
    first = start(one_file, *run, home=tmp_path)
    assert (first.returncode, first.stdout) == (0, "None\n"), first.stderr
    shutil.rmtree(tmp_path / "keepstep")
    again = start(one_file, *run, home=tmp_path)
    assert (again.returncode, again.stdout) == (0, "checkpoint-7\n"), again.stderr
    assert subprocess.run(freeze, capture_output=True, check=True, timeout=HANG_SECONDS).stdout == before


def test_where_it_cannot_be_unpacked_it_says_so_and_runs(one_file: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "home").mkdir(mode=0o500)
    said = start(one_file, "--version", home=tmp_path / "home")
    assert said.stdout.startswith("keepstep, version ")
    assert "PEX_ROOT" in said.stderr
    assert start(one_file, "--version", home=tmp_path / "home", PEX_ROOT=str(tmp_path / "cache")).stderr == ""


@contextmanager
def noexec(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, timeout=HANG_SECONDS).returncode != 0:
        pytest.skip("nobody may mount a filesystem here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=HANG_SECONDS)


@pytest.mark.root
def test_on_a_disk_that_forbids_code_the_error_names_what_to_set(one_file: Path, tmp_path: Path) -> None:
    with noexec(tmp_path / "noexec") as folder:
        said = start(one_file, "ls", f"file://{tmp_path}", home=tmp_path, PEX_ROOT=str(folder / "cache"))
    assert said.returncode == 2
    error, hint = said.stderr.splitlines()
    assert error.startswith("error: ")
    assert "PEX_ROOT" in hint
