"""The trainer's package beside what training environments hold: it holds nothing back. Asks the package index."""

import subprocess
from collections.abc import Sequence

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.harness.bounds import HANG_SECONDS
from tests.supply_chain.distributions import PROJECTS, ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3 * HANG_SECONDS)]

UV = ROOT / ".tools" / "uv" / "bin" / "uv"
PYTHON = "3.12"


def resolved(requirements: Sequence[str]) -> dict[str, str]:
    """What is installed of each distribution, by its name, in an environment that is to have these."""
    command = [str(UV), "pip", "compile", "--quiet", "--python-version", PYTHON, "--no-annotate", "--no-header", "-"]
    done = subprocess.run(
        command, input="\n".join(requirements), capture_output=True, text=True, timeout=HANG_SECONDS, check=False
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
        "protobuf==3.20.3",
        "protobuf>=4,<5",
        "protobuf>=5,<6",
        "protobuf>=6,<7",
        "protobuf>=7,<8",
    ],
)
def test_a_training_environment_gets_the_versions_that_it_has_without_us(beside: str) -> None:
    if not UV.exists():
        pytest.skip("make .tools/uv makes what resolves them")
    alone = resolved([beside])
    ours: list[str] = PROJECTS["keepstep"]["project"]["dependencies"]
    together = resolved([beside, *ours])
    assert {name: together[name] for name in alone} == alone
    assert together.keys() - alone.keys() <= {"grpcio", "protobuf", "typing-extensions"}
