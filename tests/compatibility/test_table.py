"""The page says what is tested, and nothing else."""

import re

from tests.compatibility.environments import ENVIRONMENTS, FRAMEWORKS, ROOT

PAGE = (ROOT / "docs" / "compatibility.md").read_text()
COLUMNS = ("torch", "transformers", "accelerate", "trl", "lightning", "deepspeed")


def test_the_page_lists_every_environment_that_is_tested() -> None:
    rows = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert rows == [(one.python, one.protobuf, one.grpcio) for one in ENVIRONMENTS]


def test_the_page_lists_every_older_framework_that_is_tested() -> None:
    for one in FRAMEWORKS:
        releases = dict(package.split("==") for package in one.packages)
        cells = " ".join(f"| {releases[name]}" if name in releases else "|" for name in COLUMNS)
        assert f"\n| {one.name} {cells} |\n" in PAGE
