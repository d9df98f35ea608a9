"""The trainer's package in images of last year and of today: a run is stopped, loses its disk, and goes on."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.compatibility.environments import ENVIRONMENTS, Environment
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import TRAINER, RunProcess
from tests.servers.server import Bucket

from keepstep_api.names import JUST_IN_TIME_EXIT_CODE

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda one: one.name)
def test_a_stopped_trainer_goes_on_with_this_protobuf_and_grpcio(
    environment: Environment, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    if not environment.interpreter.exists():
        pytest.skip(f"python{environment.python} is not installed, or `make test-compatibility` made nothing of it")
    volume = tmp_path / "volume"
    # A warning at import would be one in everybody's log.
    command = (str(environment.interpreter), "-W", "error", str(TRAINER))
    options: dict[str, Any] = {"endpoint_url": rclone_bucket.endpoint_url, "grace_seconds": HANG_SECONDS}
    with RunProcess(volume, rclone_bucket.destination, command=command, **options) as run:
        run.wait_steps(5)
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME_EXIT_CODE, run.output()
        last_step = run.steps()[-1][0]
    assert "client-sigterm" in [line["source"] for line in run.log("termination.noticed")], "it called its agent"
    assert not run.log("snapshot.taken"), "it announced what it saved"
    assert len(BucketView(rclone_bucket).markers()) == 1

    shutil.rmtree(volume)
    more = {"STEPS": last_step + 3}
    with RunProcess(volume, rclone_bucket.destination, command=command, trainer=more, **options) as again:
        assert again.wait() == 0, again.output()
    assert f"begin {last_step}\n" in again.output()
