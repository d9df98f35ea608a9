"""The integrations' own tests, with older releases of the frameworks."""

import os
import subprocess
import sysconfig

import pytest
from tests.compatibility.environments import FRAMEWORKS, ROOT, FrameworkEnvironment

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1800)]
CASES = [
    pytest.param(environment, test, id=f"{environment.name}-{test}")
    for environment in FRAMEWORKS
    for test in environment.tests
]


@pytest.mark.parametrize(("environment", "test"), CASES)
def test_older_frameworks_are_stopped_and_go_on(environment: FrameworkEnvironment, test: str) -> None:
    if not environment.interpreter.exists():
        pytest.skip("these older frameworks take minutes to install: `make test-compatibility` does it")
    # Their warnings of what has changed since are no errors of ours.
    command = [str(environment.interpreter), "-m", "pytest", "-q", "-W", "ignore", f"tests/integrations/{test}"]
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    variables = {**os.environ, **dict(environment.environment), "PATH": path, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
