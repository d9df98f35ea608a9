"""Autoload in an image without grpcio and protobuf, which gets copies: a run stops, loses its disk, and goes on."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.run_process import TRAINER, RunProcess
from tests.servers.server import Bucket

from keepstep_agent.cli.autoload import copy_autoload
from keepstep_api.names import JUST_IN_TIME_EXIT_CODE

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1000)]


def test_a_stopped_trainer_without_grpcio_and_protobuf_goes_on(rclone_bucket: Bucket, tmp_path: Path) -> None:
    bare, injected, volume = tmp_path / "bare", tmp_path / "injected", tmp_path / "volume"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=HANG_SECONDS)
    copy_autoload(injected)
    trainer = (str(bare / "bin" / "python"), "-W", "error", str(TRAINER))
    command = ("env", f"PYTHONPATH={injected}", *trainer)
    options: dict[str, Any] = {"endpoint_url": rclone_bucket.endpoint_url, "grace_seconds": HANG_SECONDS}
    with RunProcess(volume, rclone_bucket.destination, command=command, **options) as run:
        run.wait_steps(5)
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME_EXIT_CODE, run.output()
        last_step = run.steps()[-1][0]
    assert "client-sigterm" in [line["source"] for line in run.log("termination.noticed")], "it called its agent"
    assert not run.log("unannounced.found"), "it announced what it saved"
    assert len(BucketView(rclone_bucket).markers()) == 1

    shutil.rmtree(volume)
    more = {"STEPS": last_step + 3}
    with RunProcess(volume, rclone_bucket.destination, command=command, trainer=more, **options) as again:
        assert again.wait() == 0, again.output()
    assert f"begin {last_step}\n" in again.output()
