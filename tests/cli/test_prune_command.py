"""`keepstep prune` as an operator runs it: it shows first, says why everything else stays, and deletes when told to."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.formats.test_frozen_formats import newer
from tests.harness.warm_python import keepstep
from tests.restore.stored_checkpoints import store_checkpoint
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.limits import MARKER_BYTES
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.object_layout import marker_key

_DAY = 24 * 3600.0
_FILES = [{"model.pt": b"bytes"}]


def fill(settings: StoreSettings, *steps: int, final: int = -1) -> dict[int, SaveInfo]:
    """Small checkpoints by step; that of step `final` is one."""

    async def write() -> dict[int, SaveInfo]:
        async with open_store(settings) as store:
            return {
                step: await store_checkpoint(
                    store, step, ranks=_FILES, kind=Kind.FINAL if step == final else Kind.PERIODIC
                )
                for step in steps
            }

    return asyncio.run(write())


def content(settings: StoreSettings) -> dict[str, str]:
    """The version of every object."""

    async def read() -> dict[str, str]:
        async with open_store(settings) as store:
            return {one.key: one.version async for one in store.list("")}

    return asyncio.run(read())


def steps_of(*arguments: object, yes: bool = False) -> dict[str, Any]:
    """What `prune --json` answers: its parts, with names for the saves."""
    completed = keepstep("prune", *arguments, "--json", *(["--yes"] if yes else []))
    assert completed.returncode == 0, completed.stderr
    answer = json.loads(completed.stdout)
    return {
        "dry_run": answer["dry_run"],
        "deleted": [one["name"] for one in answer["deleted"]],
        "kept": {one["name"]: one["reason"] for one in answer["kept"]},
    }


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["without a word", "dry run"])
def test_prune_only_shows_what_it_would_delete_and_how_to_delete_it(
    options: tuple[str, ...], bucket: StoreSettings
) -> None:
    fill(bucket, 100, 200, 300)
    before = content(bucket)
    completed = keepstep("prune", bucket.destination, "--keep-last", 2, *options)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert [line.split() for line in completed.stdout.splitlines()[:2]] == [
        ["NAME", "SAVE", "SIZE", "WHY"],
        ["checkpoint-100", "0123abcd-000100", "would", "be", "deleted", "288", "B", "2", "newer", "are", "valid"],
    ]
    assert completed.stdout.splitlines()[-1] == "nothing was deleted: add --yes to delete"
    assert content(bucket) == before


def test_prune_deletes_with_yes_what_it_has_shown_and_no_more(rclone_bucket: Bucket) -> None:
    settings = rclone_bucket.settings()
    fill(settings, *range(10, 81, 10))
    command: tuple[str, ...] = (
        rclone_bucket.destination,
        "--endpoint-url",
        rclone_bucket.endpoint_url,
        "--keep-last=2",
    )
    command += ("--keep-every-steps=40",)
    shown = steps_of(*command)
    assert shown == {
        "dry_run": True,
        "deleted": [f"checkpoint-{step}" for step in (10, 20, 30, 50, 60)],
        "kept": {
            "checkpoint-80": "newest 2, milestone 80",
            "checkpoint-70": "newest 2",
            "checkpoint-40": "milestone 40",
        },
    }
    before = content(settings)
    assert steps_of(*command, yes=True) == {**shown, "dry_run": False}
    gone = [f"0123abcd-{int(name.removeprefix('checkpoint-')):06d}" for name in shown["deleted"]]
    assert content(settings) == {
        key: version for key, version in before.items() if not any(save in key for save in gone)
    }
    verified = keepstep("verify", rclone_bucket.destination, "--endpoint-url", rclone_bucket.endpoint_url, "--all")
    assert verified.returncode == 0, verified.stdout
    assert steps_of(*command, yes=True)["deleted"] == []


def test_prune_keeps_the_last_of_each_day_and_of_each_interval(bucket: StoreSettings) -> None:
    infos = fill(bucket, *range(1, 7))
    folder = Path(bucket.destination.removeprefix("file://"))
    noon = (time.time() // _DAY - 10) * _DAY + _DAY / 2
    for info, hours in zip(infos.values(), (0, 1, 24, 26, 48, 72), strict=True):
        os.utime(folder / marker_key(info), (noon + hours * 3600,) * 2)
    command = (bucket.destination, "--keep-last", 1)
    assert steps_of(*command, "--keep-daily", 3) == {
        "dry_run": True,
        "deleted": ["checkpoint-1", "checkpoint-2", "checkpoint-3"],
        "kept": {"checkpoint-6": "newest 1, daily", "checkpoint-5": "daily", "checkpoint-4": "daily"},
    }
    both = steps_of(*command, "--keep-daily", 3, "--keep-every-seconds", 2 * 3600)
    assert both["deleted"] == ["checkpoint-1"]
    assert {both["kept"][f"checkpoint-{step}"] for step in (2, 3)} == {"one per 7200 s"}
    assert both["kept"]["checkpoint-6"] == "newest 1, one per 7200 s, daily"


def test_prune_keeps_final_checkpoints_unless_told_otherwise(bucket: StoreSettings) -> None:
    fill(bucket, 10, 20, 30, final=20)
    assert steps_of(bucket.destination, "--keep-last", 1, yes=True) == {
        "dry_run": False,
        "deleted": ["checkpoint-10"],
        "kept": {"checkpoint-30": "newest 1", "checkpoint-20": "final"},
    }
    assert steps_of(bucket.destination, "--keep-last", 1, "--no-keep-final", yes=True)["deleted"] == ["checkpoint-20"]


def test_prune_keeps_what_a_newer_version_may_have_written_as_final(bucket: StoreSettings) -> None:
    key = marker_key(fill(bucket, 10)[10])

    async def update() -> None:
        async with open_store(bucket) as store:
            await store.put(key, newer(await store.get(key, limit_bytes=MARKER_BYTES)))

    asyncio.run(update())
    fill(bucket, 20)
    found = steps_of(bucket.destination, "--keep-last", 1, yes=True)
    assert found["deleted"] == []
    assert found["kept"]["checkpoint-10"].startswith("it may be final: ")
    assert steps_of(bucket.destination, "--keep-last", 1, "--no-keep-final", yes=True)["deleted"] == ["checkpoint-10"]


def test_prune_says_which_options_need_another(bucket: StoreSettings) -> None:
    refused = keepstep("prune", bucket.destination, "--keep-daily", 30, "--keep-every-seconds", 60)
    assert (refused.returncode, refused.stderr.splitlines()) == (
        2,
        [
            "error: --keep-every-seconds needs --keep-last: with --keep-last 0 everything is kept",
            "error: --keep-daily needs --keep-last: with --keep-last 0 everything is kept",
            "hint: every setting is described in docs/settings.md",
        ],
    )
