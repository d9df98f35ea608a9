"""What all commands at a destination share: settings, mistakes, a mount that is away or hangs."""

import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.filled_destination import answer, fill
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import keepstep

from keepstep_agent.cli.store_work import opened
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.object_layout import marker_key


async def test_the_garbage_collector_no_longer_looks_at_what_an_open_store_keeps(bucket: StoreSettings) -> None:
    kept: list[object] = [[]]
    assert any(one is kept for one in gc.get_objects())
    try:
        async with opened(bucket):
            assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_prune_removes_what_killed_agents_left_once_it_is_as_old_as_the_setting_says(bucket: StoreSettings) -> None:
    fill(bucket, 100)
    uploads = Path(bucket.destination.removeprefix("file://")) / ".keepstep" / "uploads"
    leftovers = [uploads / f"put-{number:032x}" for number in range(20)]
    for path in leftovers:
        path.touch()
        os.utime(path, (time.time() - 3600,) * 2)
    command = ("prune", bucket.destination, "--json")
    assert answer(keepstep(*command, "--yes"))["aborted_uploads"] == []
    assert all(path.exists() for path in leftovers)
    found = answer(keepstep(*command, "--dry-run", KEEPSTEP_ORPHAN_AGE_SECONDS="1800"))
    assert len(found["aborted_uploads"]) == len(leftovers)
    assert keepstep(*command, "--yes", KEEPSTEP_ORPHAN_AGE_SECONDS="1800").returncode == 0
    assert not list(uploads.iterdir())


def test_prune_of_nothing_refuses(bucket: StoreSettings) -> None:
    completed = keepstep("prune", bucket.destination, "--keep-last", 1, "--yes")
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
    assert keepstep(*arguments, KEEPSTEP_VOLUME="", KEEPSTEP_DESTINATION="").returncode == 2


@pytest.mark.parametrize("command", ["ls", "verify", "restore", "doctor"])
def test_every_setting_of_the_store_is_read_and_its_mistakes_are_said(bucket: StoreSettings, command: str) -> None:
    wrong: dict[str, Any] = {"KEEPSTEP_S3_CONNECT_TIMEOUT_SECONDS": "abc", "KEEPSTEP_S3_KMS_KEY_ID": "key"}
    refused = keepstep(command, bucket.destination, "--addressing", "none", KEEPSTEP_GRACE_SECONDS="abc", **wrong)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "error: --addressing: 'none' is not one of auto, path, virtual",
        "error: KEEPSTEP_S3_CONNECT_TIMEOUT_SECONDS: 'abc' is not a number",
        "error: KEEPSTEP_S3_KMS_KEY_ID needs --server-side-encryption aws:kms",
        "hint: every setting is described in docs/settings.md",
    ]


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
    completed = keepstep(*command, f"file://{tmp_path}/{missing}")
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
        "from keepstep_agent.__main__ import main\n"
        "from keepstep_agent.adapters import retrying_store\n"
        "from keepstep_agent.adapters.file_store import store as filesystem_store\n"
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
        [sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert completed.returncode == 1
    assert "did not answer in time" in completed.stderr


@pytest.mark.parametrize("command", ["restore", "ls", "verify"])
def test_a_command_that_calls_no_agent_loads_no_grpc(command: str, tmp_path: Path) -> None:
    words = ["-X", "importtime", "-m", "keepstep_agent", command, f"file://{tmp_path}/run"]
    words += ["--volume", str(tmp_path / "volume")] if command == "restore" else []
    said = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=HANG_SECONDS).stderr
    loaded = set(re.findall(r"\| +(\w+)$", said, re.MULTILINE))
    assert "click" in loaded
    assert "grpc" not in loaded


@pytest.mark.parametrize("volume", ["/proc/no-such-volume", "file", "file/below"])
def test_a_run_says_that_its_volume_cannot_be_made(bucket: StoreSettings, tmp_path: Path, volume: str) -> None:
    (tmp_path / "file").touch()
    refused = keepstep("run", "--to", bucket.destination, "--volume", tmp_path / volume, "--", "true")
    assert refused.returncode == 1
    error, hint = refused.stderr.splitlines()
    assert error.startswith(f"error: cannot make {tmp_path / volume}")
    assert hint.startswith("hint: set --volume to a directory")


def test_a_run_refuses_a_checkpoint_directory_that_leads_off_the_volume_and_moves_nothing(
    bucket: StoreSettings, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "volume").mkdir()
    link = tmp_path / "volume" / "checkpoints"
    link.symlink_to(tmp_path / "elsewhere")
    refused = keepstep("run", "--to", bucket.destination, "--volume", tmp_path / "volume", "--", "true")
    assert refused.returncode == 1
    assert f"{link} is, or lies below, a link to {tmp_path}/elsewhere" in refused.stderr
    assert link.is_symlink()


@pytest.mark.parametrize(("log_format", "begins"), [("json", "{"), ("console", "2")])
def test_a_run_logs_in_one_format_from_its_restore_to_its_end(
    bucket: StoreSettings, tmp_path: Path, log_format: str, begins: str
) -> None:
    fill(bucket, 100)
    command = ("run", "--to", bucket.destination, "--volume", tmp_path / "volume", "--log-format", log_format)
    completed = keepstep(*command, "--", "true")
    assert completed.returncode == 0
    lines = completed.stderr.splitlines()
    for event in ("restore.tries", "agent.serving", "agent.exiting"):
        (line,) = [line for line in lines if event in line]
        assert line.startswith(begins)
