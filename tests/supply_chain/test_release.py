"""`make release` as a dry run, and the workflows of the public host that run our make targets."""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.bounds import HANG_SECONDS
from tests.supply_chain.distributions import ROOT

from keepstep_api import __version__

_FILES = {
    f"keepstep-{__version__}-py3-none-any.whl",
    f"keepstep-{__version__}.tar.gz",
    f"keepstep_agent-{__version__}-py3-none-any.whl",
    f"keepstep_agent-{__version__}.tar.gz",
    f"keepstep-{__version__}.tgz",
    f"keepstep-{__version__}.cdx.json",
}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A commit of its own with all that a release is made of, and this checkout's programs."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    folder = tmp_path / "checkout"
    for name in (".ci", "agent", "charts", "client", "proto"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "Dockerfile.agent", "LICENSE", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "--quiet")
    (folder / ".git" / "info" / "exclude").write_text(".venv\n")
    (folder / ".venv").symlink_to(sys.prefix)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=all")
    (folder / "build").mkdir()
    (folder / "build" / "sbom.cdx.json").write_text("{}")
    return folder


def git(folder: Path, *arguments: str) -> None:
    person = ["-c", "user.name=tests", "-c", "user.email=tests@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *person, *arguments], cwd=folder, timeout=HANG_SECONDS, check=True, env=_environment())


def release(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return script("release", folder, **{"BUILDER": "docker", **variables})


def script(name: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [folder / ".ci" / name],
        env={**_environment(), "TOOLS": sys.prefix, "IMAGE": "registry.example/keepstep", **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def _environment() -> dict[str, str]:
    """Without what a user, or a hook of git's that runs the tests, has set for git and for a release."""
    ours = ("GIT_", "BASE_IMAGE", "CHARTS", "COSIGN_", "DRY_RUN", "GPG_KEY", "PLATFORMS")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_dry_run_makes_the_same_files_each_time_and_says_what_it_leaves_out(checkout: Path) -> None:
    made = []
    for _ in range(2):
        done = release(checkout, DRY_RUN="1")
        assert done.returncode == 0, done.stderr
        made.append({path.name: path.read_bytes() for path in (checkout / "dist").iterdir()})
    assert made[0] == made[1]
    assert made[0].keys() == _FILES
    assert script("sign", checkout, VERSION="1.2.3").returncode == 1, "there is no key"
    assert script("sign", checkout, VERSION="1.2.3", DRY_RUN="1").returncode == 0
    sums = (checkout / "dist" / "SHA256SUMS").read_text().splitlines()
    assert sums == [f"{hashlib.sha256(content).hexdigest()}  {name}" for name, content in sorted(made[0].items())]
    assert b"keepstep/Chart.yaml" in gzip.decompress(made[0][f"keepstep-{__version__}.tgz"])
    assert f"dry run, left out: {sys.prefix}/bin/helm push dist/keepstep-{__version__}.tgz" in done.stdout
    assert "not built: no BASE_IMAGE is given" in done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_the_image_is_built_for_the_given_platforms_and_pushed_only_by_a_release(checkout: Path) -> None:
    base = f"registry.example/python:3.12@sha256:{'a' * 64}"
    done = release(checkout, DRY_RUN="1", BUILDER="echo", BASE_IMAGE=base, PLATFORMS="linux/amd64,linux/arm64")
    assert done.returncode == 0, done.stderr
    image = f"registry.example/keepstep:{__version__}"
    assert f"--platform linux/amd64,linux/arm64 --manifest {image} --build-arg BASE_IMAGE={base}" in done.stdout
    assert f"dry run, left out: echo manifest push --all {image} docker://{image}" in done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_a_release_is_signed_by_the_keys_that_are_given(checkout: Path, short_directory: Path) -> None:
    if not shutil.which("gpg"):
        pytest.skip("gpg is not installed")
    key = ["--batch", "--passphrase", "", "--quick-generate-key", "tests@example.org"]
    gpg = {"GNUPGHOME": str(short_directory)}
    environment = {**_environment(), **gpg}
    subprocess.run(["gpg", *key], env=environment, capture_output=True, timeout=HANG_SECONDS, check=True)
    (checkout / "dist").mkdir()
    (checkout / "dist" / "one.whl").touch()
    # A second time, as after a step that failed.
    for _ in range(2):
        keys = {"GPG_KEY": "tests@example.org", "COSIGN_KEY": "key"}
        done = script("sign", checkout, DRY_RUN="1", VERSION="1.2.3", **keys, **gpg)
        assert done.returncode == 0, done.stderr
    verify = ["gpg", "--verify", "SHA256SUMS.asc", "SHA256SUMS"]
    subprocess.run(
        verify, cwd=checkout / "dist", env=environment, capture_output=True, timeout=HANG_SECONDS, check=True
    )
    subprocess.run(["gpgconf", "--kill", "all"], env=environment, timeout=HANG_SECONDS, check=True)
    assert "dry run, left out: cosign sign --yes --recursive --key key registry.example/keepstep:1.2.3" in done.stdout


def test_a_release_refuses_changes_that_are_not_committed(checkout: Path) -> None:
    (checkout / "LICENSE").write_text("another")
    done = release(checkout, DRY_RUN="1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the tree has changes; hint: ")


def test_a_release_refuses_a_tag_of_another_version(checkout: Path) -> None:
    git(checkout, "tag", "v9.9.9")
    done = release(checkout, DRY_RUN="1")
    assert done.returncode == 1
    assert f"the tag is v9.9.9 and the version {__version__}" in done.stderr


def test_a_release_that_is_no_dry_run_wants_a_tag_a_base_and_a_place_for_the_chart(checkout: Path) -> None:
    assert f"the commit has no tag; hint: git tag v{__version__}" in release(checkout).stderr
    git(checkout, "tag", f"v{__version__}")
    assert "BASE_IMAGE is missing" in release(checkout).stderr
    assert "CHARTS is missing" in release(checkout, BASE_IMAGE="python@sha256:abc").stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_make_targets_that_exist_with_the_least_rights(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert content["permissions"] in ({}, {"contents": "read"})
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= (350 if workflow.name == "nightly.yml" else 90)
        assert _targets(job) <= targets
        for action in (step["uses"] for step in job["steps"] if "uses" in step):
            # By its commit: a tag can be moved.
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
            assert re.search(rf"uses: {re.escape(action)} # v\d+\.\d+\.\d+$", workflow.read_text(), re.MULTILINE)


def test_only_the_step_that_signs_sees_the_key_and_no_token_is_kept_for_the_package_index() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    seeing = [
        (name, step["run"].split()[:2]) for name, job in jobs.items() for step in job["steps"] if "secrets" in str(step)
    ]
    assert seeing == [("sign", ["make", "sign"])]
    assert "secrets" not in str([{**job, "steps": ()} for job in jobs.values()])
    assert set(re.findall(r"secrets\.(\w+)", text)) == {"COSIGN_PRIVATE_KEY", "COSIGN_PASSWORD"}
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["pypi"]


def test_the_workflow_of_ci_runs_every_lane() -> None:
    runs = re.findall(r"\.ci/lanes (.*)", (ROOT / ".ci" / "run").read_text())
    lanes = {lane for line in runs for lane in line.split()}
    assert lanes >= {"lint", "test-quick", "test-slow", "test-root"}
    assert lanes <= _targets_of("ci.yml")


def test_each_night_every_part_of_test_all_is_run() -> None:
    parts = re.search(r"^PARTS \?=((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert parts
    assert set(parts[1].replace("\\", "").split()) <= _targets_of("nightly.yml")


def _targets_of(workflow: str) -> set[str]:
    (path,) = [path for path in WORKFLOWS if path.name == workflow]
    return set().union(*map(_targets, yaml.safe_load(path.read_text())["jobs"].values()))


def _targets(job: dict[str, Any]) -> set[str]:
    """What its steps give to make; what the matrix stands for included."""
    runs = "\n".join(step["run"] for step in job["steps"] if "run" in step)
    lanes = job.get("strategy", {}).get("matrix", {}).get("lane", [""])
    return {
        name for lane in lanes for name in re.findall(r"\bmake ([a-z-]+)", runs.replace("${{ matrix.lane }}", lane))
    }
