"""The packages that users install: what is in them, what they say of themselves, and that each works by itself."""

import ast
import email
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tests.compatibility.environments import ENVIRONMENTS
from tests.harness.bounds import HANG_SECONDS
from tests.supply_chain.distributions import FOLDERS, PROJECTS, ROOT, needed

from keepstep_api import __version__

_WHEELS = {"keepstep": f"keepstep-{__version__}", "keepstep-agent": f"keepstep_agent-{__version__}"}
PAGES = "https://github.com/keepstep-dev/keepstep"
_TRAINER = """
import sys
import keepstep
checkpointer = keepstep.Checkpointer()
path = checkpointer.resume()
with checkpointer.save(7) as directory:
    (directory / "state").write_text("seven")
checkpointer.finish()
print(path, keepstep.__version__, "_keepstep_autoload.zero_code" in sys.modules)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment of its own, with no more than what a distribution asks for."""

    folder: Path

    def run(self, *command: object, code: int = 0, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run one of its programs in its folder. It sees nothing of whoever runs the tests."""
        program = self.folder / "bin" / str(command[0])
        done = subprocess.run(
            [str(program), *map(str, command[1:])],
            cwd=self.folder,
            env={"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder), **variables},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both distributions as wheels and as sdists."""
    target = tmp_path_factory.mktemp("built")
    for folder in FOLDERS.values():
        _python("-m", "hatchling", "build", "--directory", target, folder=folder)
    return target


@pytest.fixture(scope="module")
def trainers(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Where a user has only the trainer's package."""
    return _environment(tmp_path_factory.mktemp("trainers"), built, "keepstep")


@pytest.fixture(scope="module")
def agents(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return _environment(tmp_path_factory.mktemp("agents"), built, "keepstep", "keepstep-agent")


def _environment(folder: Path, built: Path, *names: str) -> Environment:
    """What they need comes as links to what is installed here, so that no network takes part."""
    _python("-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed([names[-1]]):
        for file in distribution(name).files or []:
            if file.parts[0] != ".." and file.suffix != ".pyc":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(Path(str(file.locate())).resolve())
    pip = ("-m", "pip", "--python", folder / "bin" / "python")
    _python(*pip, "install", "--no-index", *(built / f"{_WHEELS[name]}-py3-none-any.whl" for name in names))
    _python(*pip, "check")
    return Environment(folder=folder)


def _python(*arguments: object, folder: Path | None = None) -> None:
    """Run this Python; it must end with 0."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def _metadata(built: Path, name: str) -> Any:
    with zipfile.ZipFile(built / f"{_WHEELS[name]}-py3-none-any.whl") as wheel:
        return email.message_from_bytes(wheel.read(f"{_WHEELS[name]}.dist-info/METADATA"))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_made_from_the_sdist_is_the_wheel_made_from_the_checkout(
    name: str, built: Path, tmp_path: Path
) -> None:
    # Not by tarfile, whose filters Python 3.11.2 does not know, and without which 3.13 warns.
    subprocess.run(["tar", "-xzf", built / f"{_WHEELS[name]}.tar.gz", "-C", tmp_path], check=True, timeout=HANG_SECONDS)
    build = ("-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path)
    _python(*build, folder=tmp_path / _WHEELS[name])
    file = f"{_WHEELS[name]}-py3-none-any.whl"
    assert (tmp_path / file).read_bytes() == (built / file).read_bytes()


def test_no_file_is_in_both_wheels_and_each_holds_its_own_packages_alone(built: Path) -> None:
    names = {
        name: set(zipfile.ZipFile(built / f"{wheel}-py3-none-any.whl").namelist()) for name, wheel in _WHEELS.items()
    }
    assert names["keepstep"] & names["keepstep-agent"] == set()
    folders = {name: {file.partition("/")[0] for file in files} for name, files in names.items()}
    assert folders == {
        "keepstep": {"keepstep", "keepstep_api", f"{_WHEELS['keepstep']}.dist-info"},
        "keepstep-agent": {"keepstep_agent", f"{_WHEELS['keepstep-agent']}.dist-info"},
    }
    started = {f"keepstep/autoload/path/{name}.py" for name in ("sitecustomize", "usercustomize")}
    assert started <= names["keepstep"]
    console = ROOT / "agent" / "keepstep_agent" / "console"
    shown = {file.relative_to(ROOT / "agent").as_posix() for file in console.glob("[st]*/*")}
    assert {"keepstep_agent/console/templates/runs.html", "keepstep_agent/console/static/console.css"} <= shown
    assert shown <= names["keepstep-agent"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_says_where_the_project_is_and_all_links_of_its_page_lead_there(name: str, built: Path) -> None:
    said = _metadata(built, name)
    assert (said["Name"], said["Version"], said["License-Expression"]) == (name, __version__, "Apache-2.0")
    addresses = [address for _, _, address in (one.partition(", ") for one in said.get_all("Project-URL"))]
    links = re.findall(r"\]\(([^)\s]+)\)", said.get_payload())
    assert links
    for address in {*addresses, *links} - {"https://pypi.org/project/keepstep/"}:
        assert address.startswith(PAGES), address
        file = address.removeprefix(f"{PAGES}/blob/main/")
        assert file.startswith(PAGES) or (ROOT / file).exists(), address


def test_the_trainers_package_asks_for_grpcio_and_protobuf_alone(built: Path) -> None:
    asked = map(Requirement, _metadata(built, "keepstep").get_all("Requires-Dist"))
    assert {one.name for one in asked if one.marker is None} == {"grpcio", "protobuf"}


def test_the_agents_package_asks_for_the_trainers_of_its_own_version() -> None:
    assert f"keepstep=={__version__}" in PROJECTS["keepstep-agent"]["project"]["dependencies"]


def test_the_agents_package_asks_for_all_that_it_imports() -> None:
    imported: set[str] = set()
    for path in (ROOT / "agent" / "keepstep_agent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    strangers = imported - set(sys.stdlib_module_names) - {"keepstep_agent", "keepstep_api"}
    providers = packages_distributions()
    asked = needed(["keepstep-agent[console,webhook]"])
    assert [name for name in strangers if not asked & set(map(canonicalize_name, providers[name]))] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_package_claims_the_pythons_that_ci_tests_and_no_others(name: str) -> None:
    project = PROJECTS[name]["project"]
    claimed = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflows = ROOT / ".github" / "workflows"
    jobs = yaml.safe_load((workflows / "ci.yml").read_text())["jobs"]
    first, others = jobs["test"]["env"]["PYTHON"], jobs["other-pythons"]["strategy"]["matrix"]["python"]
    nightly = yaml.safe_load((workflows / "nightly.yml").read_text())["jobs"]["part"]
    installed = nightly["steps"][1]["with"]["python-version"].split()
    assert sorted(installed) == sorted({one.python for one in ENVIRONMENTS})
    assert claimed == (sorted(installed) if name == "keepstep" else [first.removeprefix("python"), *others])
    assert project["requires-python"] == f">={claimed[0]}"
    assert all(python in SpecifierSet(project["requires-python"]) for python in claimed)
    assert (FOLDERS[name] / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_version_is_printed_without_anything_that_takes_time(agents: Environment) -> None:
    """It took 0.2 s when all of the command line was loaded: what is imported does not depend on the machine."""
    plain = agents.run("python", "-X", "importtime", "-c", "import contextlib, os, signal, sys, threading")
    done = agents.run("python", "-X", "importtime", agents.folder / "bin" / "keepstep", "--version")
    assert done.stdout == f"keepstep, version {__version__}\n"
    loaded = [set(re.findall(r"\| +([\w.]+)$", run.stderr, re.MULTILINE)) for run in (plain, done)]
    assert loaded[1] - loaded[0] == {"keepstep_api", "keepstep_agent", "keepstep_agent.__main__"}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["ls", "file:///nowhere"], []])
def test_without_the_agent_the_trainers_package_says_how_it_is_installed(
    trainers: Environment, arguments: list[str]
) -> None:
    assert not (trainers.folder / "bin" / "keepstep").exists()
    done = trainers.run("python", "-m", "keepstep", *arguments, code=2)
    assert done.stderr.splitlines() == [
        "error: there is no command keepstep on the PATH",
        "hint: it comes with the agent: uv tool install keepstep-agent, or pipx install keepstep-agent",
    ]


@pytest.mark.slow
def test_a_training_environment_hands_over_to_an_agent_of_another_one(
    trainers: Environment, agents: Environment
) -> None:
    """With the code and the output of the command, whatever its arguments."""
    path = f"{trainers.folder / 'bin'}:{agents.folder / 'bin'}:/usr/bin:/bin"
    (trainers.folder / "bucket").mkdir()
    destination = f"file://{trainers.folder / 'bucket'}"
    command = ["run", "--to", destination, "--", "python", "-c", _TRAINER]
    assert trainers.run("python", "-m", "keepstep", *command, PATH=path).stdout == f"None {__version__} False\n"
    listed = trainers.run("python", "-m", "keepstep", "ls", destination, PATH=path)
    assert "checkpoint-7" in listed.stdout
    refused = trainers.run("python", "-m", "keepstep", "ls", "nowhere", PATH=path, code=2)
    assert refused.stderr.startswith("error: ")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_trainer_saves_with_its_package_alone_and_can_call_an_agent(trainers: Environment) -> None:
    calls = "import keepstep.agent_client.channel"
    done = trainers.run("python", "-c", _TRAINER + calls, KEEPSTEP_VOLUME=str(trainers.folder / "volume"))
    assert done.stdout == f"None {__version__} False\n"
    assert (trainers.folder / "volume" / "checkpoints" / "checkpoint-7" / "state").read_text() == "seven"


@pytest.mark.slow
def test_the_agents_package_runs_a_program_with_autoload_and_restores_what_it_saved(agents: Environment) -> None:
    (agents.folder / "bucket").mkdir()
    (agents.folder / "train.py").write_text(_TRAINER)
    destination = f"file://{agents.folder / 'bucket'}"
    run = ["keepstep", "run", "--autoload", "--to", destination, "--", "python", "train.py"]
    assert agents.run(*run).stdout == f"None {__version__} True\n"
    (listed,) = json.loads(agents.run("keepstep", "ls", destination, "--json").stdout)["checkpoints"]
    assert listed["step"] == 7
    assert agents.run("keepstep", "--version").stdout == f"keepstep, version {__version__}\n"
    assert agents.run("python", "-m", "keepstep_agent", "--version").stdout == f"keepstep, version {__version__}\n"
    webhook = agents.run("keepstep", "webhook", "--image=keepstep", "--certificates=.", code=2)
    assert "hint: uv tool install 'keepstep-agent[webhook]'" in webhook.stderr
    console = agents.run("keepstep", "console", destination, code=2)
    assert "hint: uv tool install 'keepstep-agent[console]'" in console.stderr
