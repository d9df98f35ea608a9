"""The integrations' own tests, with the oldest releases of the frameworks that Mooring supports."""

import os
import subprocess

import pytest
from tests.compatibility.environments import HUGGING_FACE, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_oldest_hugging_face_trainer_is_stopped_and_goes_on() -> None:
    if not HUGGING_FACE.interpreter.exists():
        pytest.skip("these older frameworks take minutes to install: `make test-compatibility` does it")
    command = [str(HUGGING_FACE.interpreter), "-m", "pytest", "-q", "tests/integrations/test_hugging_face.py"]
    # As the torch of that day did, which this release of transformers relies on to load what it has saved.
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
