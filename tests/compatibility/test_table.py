"""The page says what is tested, and nothing else."""

import re

from tests.compatibility.environments import ENVIRONMENTS, ROOT


def test_the_page_lists_every_environment_that_is_tested() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert rows == [(one.python, one.protobuf, one.grpcio) for one in ENVIRONMENTS]
