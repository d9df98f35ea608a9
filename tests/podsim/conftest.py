"""A node for the tests of the simulator's rules, in each of its views."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.podsim.namespaces import missing_namespaces
from tests.podsim.node import Node
from tests.podsim.shell_pods import SHELL


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.root), False], ids=["namespaces", "mapped-paths"])
def node(request: pytest.FixtureRequest, short_directory: Path) -> Iterator[Node]:
    if request.param and missing_namespaces():
        pytest.skip(missing_namespaces())
    with Node(short_directory / "n", images={"shell": SHELL}, namespaces=request.param) as made:
        yield made


@pytest.fixture
def real_node(short_directory: Path) -> Iterator[Node]:
    """With namespaces, where what is tested cannot be seen without."""
    if missing_namespaces():
        pytest.skip(missing_namespaces())
    with Node(short_directory / "n", images={"shell": SHELL}, namespaces=True) as made:
        yield made
