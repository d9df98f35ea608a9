"""A destination that a newer version has written to, read by this one: nothing of it is called damaged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.formats.test_frozen_formats import newer
from tests.restore.stored_checkpoints import store_checkpoint

from mooring_agent.adapters.open_store import open_store
from mooring_agent.core.errors import MooringError
from mooring_agent.core.limits import MARKER_BYTES
from mooring_agent.core.policies.restore_choice import Pin, encode_pin
from mooring_agent.core.settings.values import StoreSettings
from mooring_agent.core.stored.object_layout import damage_key, marker_key
from mooring_agent.restore import restore

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
    agent = volume / ".mooring" / "agent"
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
    command = [sys.executable, "-m", "mooring_agent", "ls", settings.destination, "--json"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    rows = {row["step"]: row["problem"] for row in json.loads(listed.stdout)["checkpoints"]}
    assert rows[100] == ""
    assert "update Mooring" in rows[NEWEST]


async def test_a_pin_of_a_newer_version_ends_restore(settings: StoreSettings, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    async with open_store(settings) as store:
        await store.put(".mooring/resume/one.json", newer(encode_pin(Pin(attempt="one"))))
    with pytest.raises(MooringError, match="update Mooring"):
        await run(settings, volume, attempt="one")
