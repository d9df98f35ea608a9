"""Which parameters of a test `make test` leaves to `make test-all`."""

import pytest
from _pytest.mark import ParameterSet


def nightly(*values: object) -> list[ParameterSet]:
    """Values of one parameter that are tried in `make test-all` alone."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
