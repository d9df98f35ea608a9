"""What restore leaves for the agent's ledger: when it ran and what it put in place, whatever came of it."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.harness.warm_python import keepstep
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.ledger import Resumed
from keepstep_agent.restore.start_record import StartRecord, read_start_record

STATE = Path(".keepstep") / "agent"


def restored(tmp_path: Path, *options: str) -> StartRecord:
    """What a restore leaves behind."""
    volume, before = tmp_path / "volume", time.time()
    completed = keepstep("restore", f"file://{tmp_path}/bucket", "--volume", volume, *options)
    assert completed.returncode == 0, completed.stderr
    record = read_start_record(volume, volume / STATE)
    assert record is not None
    assert before <= record.began_at <= record.restored_at <= time.time()
    return record


def test_a_restore_leaves_what_it_did_and_each_is_told_from_the_last(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    nothing = restored(tmp_path)
    assert (nothing.resumed, nothing.step, nothing.save) == (Resumed.NOTHING, 0, "")

    async def fill() -> None:
        async with open_store(StoreSettings(destination=f"file://{tmp_path}/bucket")) as store:
            await store_checkpoint(store, 100)

    asyncio.run(fill())
    found = restored(tmp_path)
    assert (found.resumed, found.step, found.save) == (Resumed.SAVE, 100, "0123abcd-000100")
    lazy = restored(tmp_path, "--restore=lazy")
    assert (lazy.resumed, lazy.step) == (Resumed.UNKNOWN, 0)
    off = restored(tmp_path, "--restore=off")
    assert (off.resumed, off.save) == (Resumed.UNKNOWN, "")
    assert len({nothing.start, found.start, lazy.start, off.start}) == 4


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 50_000, b"x" * 100_000, b'{"began_at": -1}'])
def test_a_damaged_record_is_no_record(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATE).mkdir(parents=True)
    assert read_start_record(tmp_path, tmp_path / STATE) is None
    (tmp_path / STATE / "start.json").write_bytes(content)
    assert read_start_record(tmp_path, tmp_path / STATE) is None
