"""Property tests judge the code and never the machine: no clock fails them, and every run tries the same examples."""

import pytest
from hypothesis import HealthCheck, settings
from tests.core.played_program import Played

settings.register_profile(
    "keepstep",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
)
settings.load_profile("keepstep")


@pytest.fixture(params=[True, False], ids=["open-files-are-known", "open-files-are-unknown"])
def played(request: pytest.FixtureRequest) -> Played:
    return Played(knows_open=request.param)
