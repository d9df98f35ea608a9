"""Autoload in images without grpcio or protobuf: real interpreters, what `keepstep restore --autoload-to` copies, and
an agent. `tests/compatibility` stops and resumes a run of one.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.agent_server import AgentServer, serving
from tests.compatibility.environments import ENVIRONMENTS
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.cli.autoload import copy_autoload
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.injection import volumes
from keepstep_agent.core.injection.pod import quantity_or_nothing
from keepstep_api import names

PROGRAM = """
import importlib.util, sys
import keepstep
checkpointer = keepstep.Checkpointer()
assert checkpointer.resume() is None
with checkpointer.save(1) as directory:
    (directory / "state").write_text("1")
checkpointer.finish()
grpc, protobuf = sys.modules.get("grpc"), sys.modules.get("google.protobuf")
print(grpc and grpc.__file__)
print(protobuf and protobuf.__file__, protobuf and protobuf.__version__)
print([name for name in ("own_package", "another_package") if importlib.util.find_spec(name)])
try:
    import google.cloud
    print("google.cloud is here")
except ModuleNotFoundError:
    print("google.cloud is missing")
sys.exit(7)
"""
"""Exits with a code of its own. Says whose gRPC and protobuf it got, and which packages of nobody's it can find."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with nothing but its own library."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=HANG_SECONDS)
    return folder / "bin" / "python"


@pytest.fixture
def injected(tmp_path: Path) -> Path:
    copy_autoload(tmp_path / "injected")
    return tmp_path / "injected"


def test_a_folder_with_other_files_is_left_as_it_is_and_a_copy_can_be_made_again(tmp_path: Path) -> None:
    users = tmp_path / "users" / "sitecustomize.py"
    users.parent.mkdir()
    users.write_text("mine")
    with pytest.raises(KeepstepError, match="has files that Keepstep did not write"):
        copy_autoload(users.parent)
    assert [path.read_text() for path in users.parent.iterdir()] == ["mine"]
    for _ in range(2):
        copy_autoload(tmp_path / "new")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """What the image has, as its site-packages."""
    (tmp_path / "image" / "own_package").mkdir(parents=True)
    return tmp_path / "image"


@pytest.fixture
def agent(volume: Path) -> Iterator[AgentServer]:
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as server:
        yield server


def run(python: Path | str, volume: Path, *path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(python), "-W", "error", "-c", PROGRAM],
        env={"PYTHONPATH": os.pathsep.join(map(str, path)), names.ENV_VOLUME: str(volume), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def called(agent: AgentServer) -> bool:
    return bool(agent.requests("Register") and agent.requests("AnnounceCheckpoint"))


def test_an_image_without_both_calls_its_agent_with_the_copies(
    bare: Path, injected: Path, image: Path, volume: Path, agent: AgentServer
) -> None:
    got = run(bare, volume, injected, image)
    vendor = injected / "vendor"
    assert (got.returncode, got.stderr) == (7, "")
    lines = got.stdout.splitlines()
    assert lines[0] == str(vendor / "grpc" / "__init__.py")
    assert lines[1].startswith(str(vendor / "google" / "protobuf" / "__init__.py"))
    assert lines[2] == "['own_package']"
    assert called(agent)


def test_an_image_with_an_older_protobuf_keeps_it(
    bare: Path, injected: Path, image: Path, volume: Path, agent: AgentServer
) -> None:
    oldest = next(one for one in ENVIRONMENTS if f"{sys.version_info.major}.{sys.version_info.minor}" == one.python)
    found = list(oldest.interpreter.parents[1].glob("lib/python*/site-packages/google/protobuf"))
    if not found:
        pytest.skip(f"`make compatibility` made no {oldest.name}")
    shutil.copytree(found[0], image / "google" / "protobuf")
    got = run(bare, volume, injected, image)
    assert got.returncode == 7, got.stderr
    lines = got.stdout.splitlines()
    assert lines[0] == str(injected / "vendor" / "grpc" / "__init__.py")
    assert lines[1] == f"{image / 'google' / 'protobuf' / '__init__.py'} {oldest.protobuf}"
    assert called(agent)


def test_an_image_with_other_parts_of_google_keeps_them(
    bare: Path, injected: Path, image: Path, volume: Path, agent: AgentServer
) -> None:
    (image / "google" / "cloud").mkdir(parents=True)
    got = run(bare, volume, injected, image)
    assert (got.returncode, got.stderr) == (7, "")
    assert got.stdout.splitlines()[3] == "google.cloud is here"
    assert called(agent)


def test_an_image_with_a_grpc_of_its_own_gets_no_other_one(
    bare: Path, injected: Path, image: Path, volume: Path, agent: AgentServer
) -> None:
    (image / "grpc").mkdir()
    (image / "grpc" / "__init__.py").write_text("raise ImportError('it misses libstdc++')\n")
    got = run(bare, volume, injected, image)
    assert got.returncode == 7
    assert is_one_warning(got.stderr, "ImportError: it misses libstdc++")
    assert not agent.calls


def test_copies_for_another_python_cost_one_line_and_the_program_goes_on(
    bare: Path, injected: Path, image: Path, volume: Path, agent: AgentServer
) -> None:
    (extension,) = (injected / "vendor" / "grpc" / "_cython").glob("cygrpc.*.so")
    extension.rename(extension.with_name("cygrpc.cpython-399-x86_64-linux-gnu.so"))
    got = run(bare, volume, injected, image)
    assert (got.returncode, got.stdout.splitlines()[0]) == (7, "None")
    assert is_one_warning(got.stderr, "No module named 'grpc'")
    assert (volume / "checkpoints" / "checkpoint-1" / "state").exists()
    assert not agent.calls


def test_copies_that_do_not_load_cost_one_line_and_the_program_goes_on(
    bare: Path, injected: Path, image: Path, volume: Path, agent: AgentServer
) -> None:
    (extension,) = (injected / "vendor" / "grpc" / "_cython").glob("cygrpc.*.so")
    extension.write_bytes(b"not of this machine")
    got = run(bare, volume, injected, image)
    assert got.returncode == 7
    assert is_one_warning(got.stderr, "ImportError")
    assert not agent.calls


def test_another_minor_version_of_python_goes_on_with_one_line(
    injected: Path, image: Path, volume: Path, agent: AgentServer
) -> None:
    python = another_python()
    if python is None:
        pytest.skip("there is no other Python from 3.10 on")
    got = run(python, volume, injected, image)
    assert (got.returncode, got.stdout.splitlines()[0]) == (7, "None"), got.stderr
    assert is_one_warning(got.stderr, "No module named 'grpc'")
    assert (volume / "checkpoints" / "checkpoint-1" / "state").exists()


def test_a_run_on_one_machine_takes_them_from_beside_the_agents_keepstep(
    bare: Path, injected: Path, image: Path, volume: Path, agent: AgentServer, tmp_path: Path
) -> None:
    """As with `keepstep run --autoload`, if the agent is installed and not this checkout: one site-packages has all."""
    installed = tmp_path / "site-packages"
    shutil.copytree(injected / "vendor", installed)
    for name in ("keepstep", "keepstep_api"):
        shutil.move(injected / name, installed / name)
    (installed / "another_package").mkdir()
    got = run(bare, volume, installed / "keepstep" / "autoload" / "path", image)
    assert (got.returncode, got.stderr) == (7, "")
    lines = got.stdout.splitlines()
    assert lines[0] == str(installed / "grpc" / "__init__.py")
    assert lines[1].startswith(str(installed / "google" / "protobuf" / "__init__.py"))
    assert lines[2] == "['own_package']"
    assert called(agent)


def test_what_is_copied_fits_into_the_pods_volume_with_room_to_grow(injected: Path) -> None:
    size_bytes = sum(path.stat().st_size for path in injected.rglob("*") if path.is_file())
    assert 1.5 * size_bytes < quantity_or_nothing(volumes._AUTOLOAD_LIMIT), "the pod would be evicted"


def is_one_warning(errors: str, error: str) -> bool:
    return errors.count("\n") == 1 and (
        errors.startswith("no agent: gRPC cannot be loaded")
        and error in errors
        and "pip install --upgrade 'grpcio>=1.48.2' 'protobuf>=3.20.3'" in errors
    )


def another_python() -> str | None:
    """Where there is one: on the PATH, or beside this one, as pyenv installs them."""
    versions = [f"python3.{minor}" for minor in range(10, 15) if minor != sys.version_info.minor]
    found = [path for path in map(shutil.which, versions) if path is not None]
    for version in versions:
        found += map(str, Path(sys.base_prefix).parent.glob(f"3.*/bin/{version}"))
    return next((one for one in found if not subprocess.run([one, "-c", ""], capture_output=True).returncode), None)
