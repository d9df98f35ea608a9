"""The trainer's package beside what training environments hold: it holds nothing back. Asks the package index."""

import subprocess
from collections.abc import Sequence

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.harness.bounds import HANG_SECONDS
from tests.supply_chain.distributions import PROJECTS, ROOT, UV, uv

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3 * HANG_SECONDS)]

PYTHON = "3.12"


def resolved(requirements: Sequence[str], *options: str, python: str = PYTHON) -> dict[str, str]:
    """What is installed of each distribution, by its name, in an environment that is to have these."""
    if not UV.exists():
        pytest.skip("make .tools/uv makes what resolves them")
    command = uv("pip", "compile", "--quiet", "--python-version", python, "--no-annotate", "--no-header", *options)
    done = subprocess.run(
        [*command, "-"],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [Requirement(line) for line in done.stdout.splitlines() if "==" in line]
    return {canonicalize_name(one.name): str(one.specifier) for one in found}


@pytest.mark.parametrize(
    "beside",
    [
        "boto3",
        "s3fs",
        "tensorflow",
        "ray",
        "transformers",
        "vllm",
        "torch==2.15.0",
        "protobuf==3.20.3",
        "protobuf>=4,<5",
        "protobuf>=5,<6",
        "protobuf>=6,<7",
        "protobuf>=7,<8",
    ],
)
def test_a_training_environment_gets_the_versions_that_it_has_without_us(beside: str) -> None:
    alone = resolved([beside])
    ours: list[str] = PROJECTS["keepstep"]["project"]["dependencies"]
    together = resolved([beside, *ours])
    assert {name: together[name] for name in alone} == alone
    assert together.keys() - alone.keys() <= {"grpcio", "protobuf", "typing-extensions"}


@pytest.mark.parametrize("platform", ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_there_is_a_wheel_of_all_that_the_agent_needs(platform: str, python: str) -> None:
    project = PROJECTS["keepstep-agent"]["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    others = [one for one in wanted if canonicalize_name(Requirement(one).name) not in PROJECTS]
    found = resolved(others, "--only-binary=:all:", f"--python-platform={platform}", python=python)
    assert {"aiobotocore", "kubernetes"} <= found.keys()


@pytest.mark.parametrize("platform", ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28"])
def test_what_makes_a_release_can_be_installed(platform: str) -> None:
    lock = (ROOT / "requirements-release.txt").read_text()
    locked = [line.removesuffix(" \\") for line in lock.splitlines() if "==" in line.partition(" ")[0]]
    found = resolved(locked, "--only-binary=:all:", f"--python-platform={platform}", python="3.11")
    assert {"pex", "uv"} <= found.keys()
