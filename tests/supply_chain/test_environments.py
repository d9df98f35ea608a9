"""The agent by itself, installed as the README says from an index of what is built here, and programs of other
environments, which stay as they are. In `make test-all` alone, because it asks the package index.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.supply_chain.distributions import PROGRAM, ROOT, UV, uv

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(4 * HANG_SECONDS)]

NETWORK = {
    name: value for name, value in os.environ.items() if name.upper().startswith(("SSL_CERT", "HTTP", "NO_PROXY"))
}
"""By which uv reaches the package index where somebody has set it."""
WITHOUT_KEEPSTEP = """
import pathlib
out = pathlib.Path("out")
out.mkdir(exist_ok=True)
print(sorted(path.name for path in out.iterdir()))
(out / "weights").write_text("seven")
"""


def python_of(version: str) -> str:
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode != 0:
        pytest.skip(f"there is no Python {version} here")
    return found


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both wheels, as `dist/` is after `make release`. They are named by their paths: on the package
    index their names may be somebody else's."""
    if not UV.exists():
        pytest.skip("make .tools/uv makes what installs them")
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT, ROOT / "agent"):
        build = uv("build", "--quiet", "--wheel", "--out-dir", folder, project)
        subprocess.run(build, check=True, timeout=HANG_SECONDS)
    return folder


def wheel(dist: Path, package: str) -> Path:
    (found,) = dist.glob(f"{package}-*.whl")
    return found


@pytest.fixture(scope="module", params=["uv", "pipx"])
def keepstep(request: pytest.FixtureRequest, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, of an environment that the tool made for the agent alone."""
    home = tmp_path_factory.mktemp(request.param)
    variables = {"UV_TOOL_DIR": home / "tools", "UV_TOOL_BIN_DIR": home / "bin"}
    variables |= {"PIPX_HOME": home / "tools", "PIPX_BIN_DIR": home / "bin", "PIPX_MAN_DIR": home / "man"}
    agent, client = wheel(dist, "keepstep_agent"), wheel(dist, "keepstep")
    with_uv = uv("tool", "install", "--python", sys.executable, agent, "--with", client)
    (home / "constraints.txt").write_text(f"keepstep @ file://{client}\n")
    with_pipx = uv("tool", "run", "pipx", "install", "--python", sys.executable)
    with_pipx += [f"--pip-args=--constraint={home}/constraints.txt", str(agent)]
    install = with_uv if request.param == "uv" else with_pipx
    environment = {**os.environ, **{name: str(path) for name, path in variables.items()}}
    done = subprocess.run(install, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return home / "bin" / "keepstep"


def environment_with(folder: Path, python: str, packages: Sequence[str | Path]) -> Path:
    """Its Python."""
    subprocess.run(uv("venv", "--quiet", "--python", python, folder), check=True, timeout=HANG_SECONDS)
    if packages:
        install = uv("pip", "install", "--quiet", "--python", folder, *packages)
        subprocess.run(install, check=True, timeout=HANG_SECONDS)
    return folder / "bin" / "python"


def contents(environment: Path) -> dict[str, int]:
    """The size of every file, but for what Python compiles."""
    files = [path for path in environment.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(environment)): path.stat().st_size for path in files}


def run(keepstep: Path, folder: Path, *words: str | Path) -> str:
    """What the program printed, run from a directory of its own as a user does who has nothing else of ours."""
    done = subprocess.run(
        [str(keepstep), "run", "--to", f"file://{folder}/bucket", *map(str, words)],
        cwd=folder / "work",
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **NETWORK},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # As after the loss of the machine.
    shutil.rmtree(folder / "work")
    (folder / "work").mkdir()
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("bucket", "work"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("version", "beside"),
    [
        *((version, []) for version in ("3.10", "3.11", "3.12", "3.13")),
        ("3.12", ["boto3", "protobuf>=7"]),
        ("3.12", ["s3fs>=2025"]),
        ("3.11", ["protobuf<4", "grpcio<1.50"]),
        ("3.12", ["tensorflow-cpu"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "alone",
)
def test_a_program_with_the_client_resumes_and_its_environment_stays_as_it_was(
    keepstep: Path, dist: Path, folder: Path, version: str, beside: list[str]
) -> None:
    environment = folder / "environment"
    python = environment_with(environment, python_of(version), [wheel(dist, "keepstep"), *beside])
    before = contents(environment)
    assert not [name for name in before if "keepstep_agent" in name]
    assert run(keepstep, folder, "--", python, "-c", PROGRAM) == "None\n"
    assert run(keepstep, folder, "--", python, "-c", PROGRAM) == "checkpoint-7\n"
    assert contents(environment) == before


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_a_program_without_anything_of_keepsteps_has_its_directory_back(
    keepstep: Path, folder: Path, version: str
) -> None:
    python = environment_with(folder / "environment", python_of(version), ())
    before = contents(folder / "environment")
    watched: list[str | Path] = ["--watch", folder / "work" / "out", "--", python, "-c", WITHOUT_KEEPSTEP]
    assert run(keepstep, folder, *watched) == "[]\n"
    assert run(keepstep, folder, *watched) == "['weights']\n"
    assert contents(folder / "environment") == before


def test_uv_run_makes_the_environment_of_a_program_that_the_agent_protects(
    keepstep: Path, dist: Path, folder: Path
) -> None:
    program = uv("run", "--quiet", "--no-project", "--python", sys.executable, "--with", wheel(dist, "keepstep"))
    program += ["python", "-c", PROGRAM]
    assert run(keepstep, folder, "--", *program) == "None\n"
    assert run(keepstep, folder, "--", *program) == "checkpoint-7\n"
