"""ls, verify, prune and restore as an operator or an init container runs them: real processes, real stores."""

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.harness.warm_python import mooring
from tests.restore.stored_checkpoints import PART_BYTES, all_files, flip_byte, store_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from mooring_agent.adapters.open_store import open_store
from mooring_agent.cli.store_work import opened
from mooring_agent.core.model import SaveInfo
from mooring_agent.core.settings.values import StoreSettings
from mooring_agent.core.stored.object_layout import damage_key, file_key, marker_key


def fill(settings: StoreSettings, *steps: int, flip: int = -1) -> list[SaveInfo]:
    """Checkpoints at a destination; a byte of step `flip` is then changed."""

    async def write() -> list[SaveInfo]:
        async with open_store(settings) as store:
            infos = [await store_checkpoint(store, step) for step in steps]
            for info in infos:
                if info.step == flip:
                    await flip_byte(store, file_key(info, "model-0.safetensors"), 2 * PART_BYTES)
            return infos

    return asyncio.run(write())


@pytest.fixture
def bucket(tmp_path: Path) -> StoreSettings:
    (tmp_path / "bucket").mkdir()
    return StoreSettings(destination=f"file://{tmp_path}/bucket")


def answer(completed: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(completed.stdout)


async def test_the_garbage_collector_no_longer_looks_at_what_an_open_store_keeps(bucket: StoreSettings) -> None:
    kept: list[object] = [[]]
    assert any(one is kept for one in gc.get_objects())
    try:
        async with opened(bucket):
            assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_ls_shows_the_newest_of_a_long_history_and_says_that_there_are_older_ones(bucket: StoreSettings) -> None:
    fill(bucket, *range(1, 23))
    shown = answer(mooring("ls", bucket.destination, "--json"))
    assert ([row["step"] for row in shown["checkpoints"]], shown["older_exist"]) == ([*range(22, 2, -1)], True)
    assert mooring("ls", bucket.destination).stdout.endswith(
        "older ones are not listed: raise --newest, which is 20, or add --all\n"
    )
    for arguments in (("--newest=22",), ("--all",)):
        shown = answer(mooring("ls", bucket.destination, "--json", *arguments))
        assert (len(shown["checkpoints"]), shown["older_exist"]) == (22, False)
        assert "older" not in mooring("ls", bucket.destination, *arguments).stdout


def test_ls_shows_the_newest_first_as_a_table_and_as_json(bucket: StoreSettings) -> None:
    fill(bucket, 100, 200)
    table = mooring("ls", bucket.destination)
    assert (table.returncode, table.stderr) == (0, "")
    lines = table.stdout.splitlines()
    assert ["checkpoint-200" in lines[1], "checkpoint-100" in lines[2]] == [True, True]
    listed = answer(mooring("ls", bucket.destination, "--json"))
    assert [row["step"] for row in listed["checkpoints"]] == [200, 100]
    assert listed["checkpoints"][0]["file_count"] == 4


def test_a_command_signs_for_the_region_that_the_variables_of_aws_name(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, region in (
        ("AWS_REGION", "eu-west-1"),
        ("AWS_DEFAULT_REGION", "eu-north-1"),
        ("MOORING_S3_REGION", "eu-south-1"),
    ):
        monkeypatch.setenv(variable, region)
        assert mooring("ls", rclone_bucket.destination, "--endpoint-url", fault_proxy.endpoint_url).returncode == 0
        assert f"/{region}/s3/" in fault_proxy.log[-1].headers["authorization"]


def test_ls_of_an_empty_destination_is_no_error(bucket: StoreSettings) -> None:
    completed = mooring("ls", bucket.destination)
    assert (completed.returncode, completed.stdout) == (0, "no committed checkpoint\n")


def test_ls_says_which_marker_is_damaged(bucket: StoreSettings) -> None:
    (info,) = fill(bucket, 100)
    path = Path(bucket.destination.removeprefix("file://")) / marker_key(info)
    path.write_bytes(b"garbage")
    completed = mooring("ls", bucket.destination)
    assert completed.returncode == 1
    assert marker_key(info) in completed.stdout


def test_ls_says_what_a_restore_found_damaged_until_verify_finds_it_whole(bucket: StoreSettings) -> None:
    info, _ = fill(bucket, 100, 200)
    note = Path(bucket.destination.removeprefix("file://")) / damage_key(info.save)
    note.parent.mkdir(parents=True)
    note.write_text("model.pt is wrong\n")
    shown = mooring("ls", bucket.destination)
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[-1].endswith("step 100: a restore found it damaged: model.pt is wrong")
    listed = mooring("ls", bucket.destination, "--json")
    assert [row["problem"] != "" for row in answer(listed)["checkpoints"]] == [False, True]
    assert mooring("verify", bucket.destination, "--step", 100).returncode == 0
    assert mooring("ls", bucket.destination).returncode == 0


def test_verify_reads_every_byte_and_names_the_object_with_the_flipped_one(bucket: StoreSettings) -> None:
    fill(bucket, 100, 200, 300, flip=200)
    assert mooring("verify", bucket.destination).returncode == 0
    damaged = mooring("verify", bucket.destination, "--step", 200)
    assert damaged.returncode == 1
    assert "checkpoint-200/0123abcd-000200/model-0.safetensors" in damaged.stdout
    assert f"bytes {2 * PART_BYTES} to {3 * PART_BYTES}" in damaged.stdout
    everything = mooring("verify", bucket.destination, "--all", "--json")
    assert everything.returncode == 1
    found = {row["step"]: [one["object"] for one in row["problems"]] for row in answer(everything)["checkpoints"]}
    assert found == {300: [], 200: ["checkpoint-200/0123abcd-000200/model-0.safetensors"], 100: []}


def test_verify_of_a_step_that_is_not_there_is_an_error_with_a_hint(bucket: StoreSettings) -> None:
    fill(bucket, 100)
    completed = mooring("verify", bucket.destination, "--step", 7)
    assert completed.returncode == 1
    assert completed.stderr.splitlines() == [
        f"error: {bucket.destination} has no committed checkpoint of step 7",
        "hint: `mooring ls` lists the checkpoints",
    ]


def test_prune_removes_what_killed_agents_left_once_it_is_as_old_as_the_setting_says(bucket: StoreSettings) -> None:
    fill(bucket, 100)
    uploads = Path(bucket.destination.removeprefix("file://")) / ".mooring" / "uploads"
    leftovers = [uploads / f"put-{number:032x}" for number in range(20)]
    for path in leftovers:
        path.touch()
        os.utime(path, (time.time() - 3600,) * 2)
    command = ("prune", bucket.destination, "--json")
    assert answer(mooring(*command, "--yes"))["aborted_uploads"] == []
    assert all(path.exists() for path in leftovers)
    found = answer(mooring(*command, "--dry-run", MOORING_ORPHAN_AGE_SECONDS="1800"))
    assert len(found["aborted_uploads"]) == len(leftovers)
    assert mooring(*command, "--yes", MOORING_ORPHAN_AGE_SECONDS="1800").returncode == 0
    assert not list(uploads.iterdir())


def test_prune_of_nothing_refuses(bucket: StoreSettings) -> None:
    completed = mooring("prune", bucket.destination, "--keep-last", 1, "--yes")
    assert completed.returncode == 1
    assert "no committed checkpoint" in completed.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("prune", "file:///x", "--yes", "--dry-run"),
        ("prune", "file:///x", "--keep-every-steps", 5),
        ("prune", "file:///x", "--keep-daily", 30),
        ("prune", "file:///x", "--keep-every-seconds", 3600),
        ("prune", "file:///x", "--keep-last", 1, "--keep-daily", "all"),
        ("verify", "file:///x", "--all", "--step", 1),
        ("restore", "file:///x", "--volume", "/x", "--size-limit-bytes", "much"),
        ("restore", "file:///x", "--volume", "/x", "--checkpoint-directory", "/y"),
        ("restore", "file:///x", "--volume", "/x", "--max-concurrency", 0),
        ("ls",),
        ("ls", "x"),
        ("ls", "file:///x", "--addressing", "none"),
        ("ls", "--no-such-option"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_wrong_usage_exits_with_2(arguments: tuple[object, ...]) -> None:
    assert mooring(*arguments, MOORING_VOLUME="", MOORING_DESTINATION="").returncode == 2


@pytest.mark.parametrize("command", ["ls", "verify", "restore", "doctor"])
def test_every_setting_of_the_store_is_read_and_its_mistakes_are_said(bucket: StoreSettings, command: str) -> None:
    wrong: dict[str, Any] = {"MOORING_S3_CONNECT_TIMEOUT_SECONDS": "abc", "MOORING_S3_KMS_KEY_ID": "key"}
    refused = mooring(command, bucket.destination, "--addressing", "none", MOORING_GRACE_SECONDS="abc", **wrong)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "error: --addressing: 'none' is not one of auto, path, virtual",
        "error: MOORING_S3_CONNECT_TIMEOUT_SECONDS: 'abc' is not a number",
        "error: kms_key_id needs server_side_encryption aws:kms",
        "hint: every setting is described in docs/settings.md",
    ]


def test_restore_reads_its_settings_from_the_environment(moto_bucket: Bucket, tmp_path: Path) -> None:
    fill(moto_bucket.settings(), 100, 200, flip=200)
    completed = mooring(
        "restore",
        "--json",
        MOORING_DESTINATION=moto_bucket.destination,
        MOORING_S3_ENDPOINT_URL=moto_bucket.endpoint_url,
        MOORING_VOLUME=str(tmp_path / "volume"),
        MOORING_ATTEMPT="job-1",
    )
    assert completed.returncode == 0, completed.stderr
    restored = answer(completed)["restored"]
    assert restored["step"] == 100
    assert "model-0.safetensors" in restored["skipped"][0]
    place = tmp_path / "volume" / "checkpoints" / "checkpoint-100"
    assert restored["path"] == str(place)
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == set(all_files(100))


def test_restore_takes_the_volume_that_a_run_started_there_would_take(bucket: StoreSettings, tmp_path: Path) -> None:
    fill(bucket, 100)
    completed = mooring("restore", bucket.destination, "--json", directory=tmp_path, MOORING_VOLUME="")
    assert answer(completed)["restored"]["path"] == str(tmp_path / "mooring" / "checkpoints" / "checkpoint-100")


def test_restore_from_an_empty_destination_says_that_the_run_starts_from_nothing(
    bucket: StoreSettings, tmp_path: Path
) -> None:
    completed = mooring("restore", bucket.destination, "--volume", tmp_path / "volume")
    assert completed.returncode == 0
    assert "starts from step 0" in completed.stdout


@pytest.mark.parametrize(
    "command",
    [("ls",), ("verify",), ("prune", "--keep-last", "1", "--yes"), ("doctor",)],
    ids=lambda command: str(command[0]),
)
@pytest.mark.parametrize("missing", ["mount/run", "file/run", "file"])
def test_a_folder_that_is_not_there_is_not_an_empty_destination(
    command: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    completed = mooring(*command, f"file://{tmp_path}/{missing}")
    assert completed.returncode == 1
    said = completed.stdout + completed.stderr
    assert f"{tmp_path}/{missing}" in said
    assert "no committed checkpoint" not in said
    assert "answers" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize("name", ["ls", "restore"])
def test_a_command_ends_although_a_thread_hangs_in_a_dead_mount(
    name: str, bucket: StoreSettings, tmp_path: Path
) -> None:
    (info,) = fill(bucket, 100)
    # Whoever opens the marker waits for ever; the patience is cut short.
    program = (
        "import os, threading\n"
        "really_open = os.open\n"
        "def hang(path, *arguments, **options):\n"
        f"    if str(path).endswith({marker_key(info)!r}):\n"
        "        threading.Event().wait()\n"
        "    return really_open(path, *arguments, **options)\n"
        "os.open = hang\n"
        "from mooring_agent.__main__ import main\n"
        "from mooring_agent.adapters import retrying_store\n"
        "from mooring_agent.adapters.file_store import store as filesystem_store\n"
        "opened = filesystem_store.FilesystemStore.__init__\n"
        "def impatient(store, *arguments):\n"
        "    opened(store, *arguments)\n"
        "    store._timeout_seconds = 0.5\n"
        "filesystem_store.FilesystemStore.__init__ = impatient\n"
        "retrying_store.RetryPolicy.__init__.__kwdefaults__.update(attempts=1)\n"
        "main()\n"
    )
    command = [name, bucket.destination, *(["--volume", str(tmp_path / "volume")] if name == "restore" else [])]
    completed = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 1
    assert "did not answer in time" in completed.stderr


@pytest.mark.parametrize("command", ["restore", "ls", "verify"])
def test_a_command_that_calls_no_agent_loads_no_grpc(command: str, tmp_path: Path) -> None:
    words = ["-X", "importtime", "-m", "mooring_agent", command, f"file://{tmp_path}/run"]
    words += ["--volume", str(tmp_path / "volume")] if command == "restore" else []
    said = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60).stderr
    loaded = set(re.findall(r"\| +(\w+)$", said, re.MULTILINE))
    assert "click" in loaded
    assert "grpc" not in loaded


def test_a_first_restore_makes_the_folder_and_says_so(tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/new/run"
    for is_first in (True, False):
        completed = mooring("restore", destination, "--volume", tmp_path / "volume")
        assert completed.returncode == 0, completed.stderr
        assert "starts from step 0" in completed.stdout
        assert (f"warning: {destination} did not exist" in completed.stderr) == is_first


def test_restore_does_not_start_anew_because_a_mount_is_away(tmp_path: Path) -> None:
    mount, volume = tmp_path / "mount", tmp_path / "volume"
    destination = f"file://{mount}/run"
    mount.mkdir()
    assert mooring("restore", destination, "--volume", volume).returncode == 0
    fill(StoreSettings(destination=destination), 100)
    mount.rename(tmp_path / "away")
    mount.mkdir()

    completed = mooring("restore", destination, "--volume", volume)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert f"the folder {mount}/run does not exist, and the volume {volume} was used with it before" in completed.stderr
    assert "hint: mount it again" in completed.stderr
    assert list(mount.iterdir()) == []

    mount.rmdir()
    (tmp_path / "away").rename(mount)
    assert "checkpoint-100 (step 100" in mooring("restore", destination, "--volume", volume).stdout


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
    completed = mooring(
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
    assert mooring("restore", bucket.destination, "--volume", volume).returncode == 0
    assert mooring("restore", f"{bucket.destination}/", "--volume", volume).returncode == 0
    refused = mooring("restore", other, "--volume", volume)
    assert refused.returncode == 1
    errors = [line for line in refused.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert errors[0] == f"error: the volume {volume} belongs to {bucket.destination}, not to {other}"
    assert errors[1].startswith("hint: use another --volume")


@pytest.mark.parametrize("volume", ["/proc/no-such-volume", "file", "file/below"])
def test_a_run_says_that_its_volume_cannot_be_made(bucket: StoreSettings, tmp_path: Path, volume: str) -> None:
    (tmp_path / "file").touch()
    refused = mooring("run", "--to", bucket.destination, "--volume", tmp_path / volume, "--", "true")
    assert refused.returncode == 1
    error, hint = refused.stderr.splitlines()
    assert error.startswith(f"error: cannot make {tmp_path / volume}")
    assert hint.startswith("hint: set --volume to a directory")


@pytest.mark.parametrize("volume", ["/proc/no-such-volume", "file/below"])
def test_a_restore_does_not_take_a_volume_that_cannot_be_made_for_a_missing_file(
    bucket: StoreSettings, tmp_path: Path, volume: str
) -> None:
    (tmp_path / "file").touch()
    refused = mooring("restore", bucket.destination, "--volume", tmp_path / volume)
    assert refused.returncode == 1
    errors = [line for line in refused.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert errors[0].startswith("error: cannot ")
    assert str(tmp_path / volume) in errors[0]
    assert errors[1].startswith("hint: set --volume to a directory")


@pytest.mark.parametrize(("log_format", "begins"), [("json", "{"), ("console", "2")])
def test_a_run_logs_in_one_format_from_its_restore_to_its_end(
    bucket: StoreSettings, tmp_path: Path, log_format: str, begins: str
) -> None:
    fill(bucket, 100)
    command = ("run", "--to", bucket.destination, "--volume", tmp_path / "volume", "--log-format", log_format)
    completed = mooring(*command, "--", "true")
    assert completed.returncode == 0
    lines = completed.stderr.splitlines()
    for event in ("restore.tries", "agent.serving", "agent.exiting"):
        (line,) = [line for line in lines if event in line]
        assert line.startswith(begins)


def test_names_of_strangers_do_not_reach_the_terminal_as_they_are(bucket: StoreSettings) -> None:
    fill(bucket, 100, 200)
    root = Path(bucket.destination.removeprefix("file://"))
    evil = "\x1b[2J\x1b]0;owned\x07\u202e[red]x"
    # As large as a marker may be, and larger; an orphan's folders; something beside the manifests.
    (root / ".mooring" / "commits" / f"{10**12 - 1 - 300}.evil.json").write_bytes(b"x" * 9_000_000)
    (root / ".mooring" / "commits" / f"{10**12 - 1 - 400}.{evil}.json").write_bytes(b"x")
    (root / evil / "0123abcd-000009").mkdir(parents=True)
    (root / evil / "0123abcd-000009" / evil).write_bytes(b"x")
    (root / "name" / evil).mkdir(parents=True)
    (root / "name" / evil / "x").write_bytes(b"x")
    (root / "checkpoint-200" / "0123abcd-000200" / ".mooring" / f"manifest-{evil}.json").write_bytes(b"x")
    for arguments in (("ls",), ("verify", "--all"), ("prune", "--dry-run", "--keep-last=1"), ("prune", "--yes")):
        completed = mooring(arguments[0], bucket.destination, *arguments[1:])
        written = completed.stdout + completed.stderr
        assert "Traceback" not in written
        assert all(character.isprintable() for character in written.replace("\n", "")), written
        assert completed.returncode == (arguments[0] != "prune"), written
    assert "step 300: " in mooring("ls", bucket.destination).stdout


def test_verify_takes_back_a_note_of_damage_that_was_none(bucket: StoreSettings) -> None:
    (info,) = fill(bucket, 100)
    note = Path(bucket.destination.removeprefix("file://")) / ".mooring" / "damaged" / info.save
    note.parent.mkdir()
    note.write_text("the network was bad\n")
    assert mooring("verify", bucket.destination).returncode == 0
    assert not note.exists()
