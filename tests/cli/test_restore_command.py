"""restore as an operator or an init container runs it: real processes, real stores."""

from pathlib import Path
from typing import Any

import pytest
from tests.cli.filled_destination import answer, fill
from tests.harness.warm_python import keepstep
from tests.restore.stored_checkpoints import all_files
from tests.servers.server import Bucket

from keepstep_agent.core.settings.values import StoreSettings


def test_restore_reads_its_settings_from_the_environment(moto_bucket: Bucket, tmp_path: Path) -> None:
    fill(moto_bucket.settings(), 100, 200, flip=200)
    completed = keepstep(
        "restore",
        "--json",
        KEEPSTEP_DESTINATION=moto_bucket.destination,
        KEEPSTEP_S3_ENDPOINT_URL=moto_bucket.endpoint_url,
        KEEPSTEP_VOLUME=str(tmp_path / "volume"),
        KEEPSTEP_ATTEMPT="job-1",
    )
    assert completed.returncode == 0, completed.stderr
    (restored,) = answer(completed)["restored"]
    assert restored["step"] == 100
    assert "model-0.safetensors" in restored["skipped"][0]
    place = tmp_path / "volume" / "checkpoints" / "checkpoint-100"
    assert restored["path"] == str(place)
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == set(all_files(100))


def test_restore_takes_the_volume_that_a_run_started_there_would_take(bucket: StoreSettings, tmp_path: Path) -> None:
    fill(bucket, 100)
    completed = keepstep("restore", bucket.destination, "--json", directory=tmp_path, KEEPSTEP_VOLUME="")
    (restored,) = answer(completed)["restored"]
    assert restored["path"] == str(tmp_path / "keepstep" / "checkpoints" / "checkpoint-100")


def test_restore_from_an_empty_destination_says_that_the_run_starts_from_nothing(
    bucket: StoreSettings, tmp_path: Path
) -> None:
    completed = keepstep("restore", bucket.destination, "--volume", tmp_path / "volume")
    assert completed.returncode == 0
    assert "starts from step 0" in completed.stdout


def test_a_first_restore_makes_the_folder_and_says_so(tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/new/run"
    for is_first in (True, False):
        completed = keepstep("restore", destination, "--volume", tmp_path / "volume")
        assert completed.returncode == 0, completed.stderr
        assert "starts from step 0" in completed.stdout
        assert (f"warning: {destination} did not exist" in completed.stderr) == is_first


def test_a_volume_of_another_run_is_named_before_a_new_destination_is_made(tmp_path: Path) -> None:
    volume, first, new = tmp_path / "volume", f"file://{tmp_path}/first", f"file://{tmp_path}/new"
    assert keepstep("restore", first, "--volume", volume).returncode == 0
    completed = keepstep("restore", new, "--volume", volume)
    assert completed.returncode == 1
    assert f"the volume {volume} belongs to {first}, not to {new}" in completed.stderr
    assert not (tmp_path / "new").exists()


def test_restore_does_not_start_anew_because_a_mount_is_away(tmp_path: Path) -> None:
    mount, volume = tmp_path / "mount", tmp_path / "volume"
    destination = f"file://{mount}/run"
    mount.mkdir()
    assert keepstep("restore", destination, "--volume", volume).returncode == 0
    fill(StoreSettings(destination=destination), 100)
    mount.rename(tmp_path / "away")
    mount.mkdir()

    completed = keepstep("restore", destination, "--volume", volume)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert f"the folder {mount}/run does not exist, and the volume {volume} was used with it before" in completed.stderr
    assert "hint: mount it again" in completed.stderr
    assert list(mount.iterdir()) == []

    mount.rmdir()
    (tmp_path / "away").rename(mount)
    assert "checkpoint-100 (step 100" in keepstep("restore", destination, "--volume", volume).stdout


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        ({}, {"AWS_SECRET_ACCESS_KEY": "wrong"}, "error:"),
        ({"destination": "s3://no-such-bucket-here/run"}, {}, "no-such-bucket-here"),
        ({"endpoint_url": "http://127.0.0.1:9"}, {}, "127.0.0.1:9"),
    ],
    ids=["wrong secret", "missing bucket", "unreachable"],
)
def test_restore_never_takes_trouble_with_the_store_for_a_fresh_start(
    changes: dict[str, str], environment: dict[str, Any], message: str, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    fill(rclone_bucket.settings(), 100)
    settings = rclone_bucket.settings(**changes)
    volume = tmp_path / "volume"
    completed = keepstep(
        "restore",
        settings.destination,
        *("--endpoint-url", settings.endpoint_url, "--volume", volume),
        **environment,
    )
    assert completed.returncode == 1, completed.stdout
    errors = [line for line in completed.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert message in errors[0]
    assert errors[1].startswith("hint: ")
    assert "Traceback" not in completed.stderr
    # Not even claimed: the right destination is still welcome.
    assert not volume.exists()


def test_restore_refuses_a_volume_that_holds_another_runs_checkpoints(bucket: StoreSettings, tmp_path: Path) -> None:
    fill(bucket, 100)
    volume, other = tmp_path / "volume", f"file://{tmp_path}/other"
    (tmp_path / "other").mkdir()
    assert keepstep("restore", bucket.destination, "--volume", volume).returncode == 0
    assert keepstep("restore", f"{bucket.destination}/", "--volume", volume).returncode == 0
    refused = keepstep("restore", other, "--volume", volume)
    assert refused.returncode == 1
    errors = [line for line in refused.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert errors[0] == f"error: the volume {volume} belongs to {bucket.destination}, not to {other}"
    assert errors[1].startswith("hint: use another --volume")


@pytest.mark.parametrize("volume", ["/proc/no-such-volume", "file/below"])
def test_a_restore_does_not_take_a_volume_that_cannot_be_made_for_a_missing_file(
    bucket: StoreSettings, tmp_path: Path, volume: str
) -> None:
    (tmp_path / "file").touch()
    refused = keepstep("restore", bucket.destination, "--volume", tmp_path / volume)
    assert refused.returncode == 1
    errors = [line for line in refused.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert errors[0].startswith("error: cannot ")
    assert str(tmp_path / volume) in errors[0]
    assert errors[1].startswith("hint: set --volume to a directory")
