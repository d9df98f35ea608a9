"""A destination that a newer version has written to, read by this one: nothing of it is called damaged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.formats.test_frozen_formats import newer
from tests.harness.bounds import HANG_SECONDS
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.limits import MARKER_BYTES
from keepstep_agent.core.policies.restore_choice import Pin, encode_pin
from keepstep_agent.core.settings.values import RetentionSettings, StoreSettings
from keepstep_agent.core.stored.object_layout import damage_key, marker_key

NEWEST = 200


@pytest.fixture
async def settings(tmp_path: Path) -> StoreSettings:
    """Steps 100 and 200, the latter's marker of a newer version."""
    (tmp_path / "bucket").mkdir()
    settings = StoreSettings(destination=f"file://{tmp_path}/bucket")
    async with open_store(settings) as store:
        await store_checkpoint(store, 100)
        info = await store_checkpoint(store, NEWEST)
        body = await store.get(marker_key(info), limit_bytes=MARKER_BYTES)
        await store.put(marker_key(info), newer(body))
    return settings


async def run(settings: StoreSettings, volume: Path, **options: Any) -> Any:
    agent = volume / ".keepstep" / "agent"
    async with open_store(settings) as store:
        return await restore(
            store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=agent, **options
        )


async def test_restore_takes_the_newest_that_it_can_read_and_says_why(settings: StoreSettings, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    restored = await run(settings, volume)
    assert restored.step == 100
    (reason,) = restored.skipped
    assert "it has format 9" in reason
    async with open_store(settings) as store:
        notes = [one.key async for one in store.list(damage_key("").rpartition("/")[0])]
    assert notes == []


def test_ls_shows_the_row_with_its_reason(settings: StoreSettings) -> None:
    command = [sys.executable, "-m", "keepstep_agent", "ls", settings.destination, "--json"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    rows = {row["step"]: row["problem"] for row in json.loads(listed.stdout)["checkpoints"]}
    assert rows[100] == ""
    assert "update Keepstep" in rows[NEWEST]


async def test_a_pin_of_a_newer_version_ends_restore(settings: StoreSettings, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    async with open_store(settings) as store:
        await store.put(".keepstep/resume/one/000000.json", newer(encode_pin(Pin(attempt="one"))))
    with pytest.raises(KeepstepError, match="update Keepstep"):
        await run(settings, volume, attempt="one")


async def test_two_saves_of_one_step_of_which_one_is_newer_are_listed(settings: StoreSettings, tmp_path: Path) -> None:
    """As after a downgrade: the run goes on from the older checkpoint and comes to the same step again."""
    volume = tmp_path / "volume"
    volume.mkdir()
    async with open_store(settings) as store:
        again = await store_checkpoint(store, NEWEST, save="after-the-downgrade")
    restored = await run(settings, volume)
    assert (restored.step, restored.save) == (NEWEST, again.save)


async def test_prune_counts_on_nothing_that_it_cannot_read(settings: StoreSettings) -> None:
    async with open_store(settings) as store:
        report = await prune(store, RetentionSettings(keep_last=1), now=1e12, dry_run=False)
        kept = {one.step for one in await list_committed(store)}
    assert not report.plan.refused
    assert kept == {100, NEWEST}


def test_verify_names_what_it_cannot_read_and_goes_on(settings: StoreSettings) -> None:
    command = [sys.executable, "-m", "keepstep_agent", "verify", settings.destination, "--all", "--json"]
    verified = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    problems = {one["step"]: one["problems"] for one in json.loads(verified.stdout)["checkpoints"]}
    assert verified.returncode == 1
    assert problems[100] == []
    assert "update Keepstep" in str(problems[NEWEST])
