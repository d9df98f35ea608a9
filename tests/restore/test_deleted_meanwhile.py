"""What is deleted while somebody reads it: a marker goes first, and what follows looks like damage and is none."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import flip_byte, store_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import SaveInfo
from keepstep_agent.core.stored.object_layout import damage_key, file_key, manifest_key, marker_key, save_prefix
from keepstep_agent.restore.init_step import Restored

_NO_SUCH_KEY = b"<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>"


class PrunedStore(FakeStore):
    """When the object `at` is first asked for, `save` is deleted as prune does it, and `then` happens."""

    def __init__(self) -> None:
        super().__init__()
        self.at = ""
        self.save: SaveInfo | None = None
        self.then: Callable[[], Awaitable[object]] | None = None

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        if key == self.at and self.save:
            save, self.save = self.save, None
            for stored in [marker_key(save), *(one for one in self.objects if one.startswith(save_prefix(save)))]:
                del self.objects[stored]
            if self.then:
                await self.then()
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)


async def run(store: PrunedStore, volume: Path) -> Restored | None:
    (volume / ".keepstep").mkdir()
    agent = volume / ".keepstep" / "agent"
    return await restore(store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=agent)


async def test_restore_takes_what_was_committed_while_retention_deleted_its_first_choice(tmp_path: Path) -> None:
    store = PrunedStore()
    info = store.save = await store_checkpoint(store, 1)
    store.at = manifest_key(info, 0, 1)
    store.then = partial(store_checkpoint, store, 2)
    restored = await run(store, tmp_path)
    assert restored is not None
    assert restored.step == 2
    (skipped,) = restored.skipped
    assert "was deleted meanwhile" in skipped
    # Nothing is damaged, and a note of damage would keep prune from deleting.
    assert damage_key(info.save) not in store.objects


async def test_a_destination_that_is_emptied_during_a_restore_is_no_fresh_start(tmp_path: Path) -> None:
    store = PrunedStore()
    info = store.save = await store_checkpoint(store, 1)
    store.at = marker_key(info)
    with pytest.raises(StoreError, match=r"none of 1 committed .* was deleted meanwhile") as caught:
        await run(store, tmp_path)
    assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT


def test_verify_and_ls_call_nothing_damaged_that_is_gone(rclone_bucket: Bucket, fault_proxy: FaultProxy) -> None:
    gone, damaged = asyncio.run(_fill(rclone_bucket))
    for method, body in (("GET", _NO_SUCH_KEY), ("HEAD", b"")):
        target = marker_key(gone)
        rule = Rule(name="gone", fault=Fault.STATUS, method=method, target=target, times=-1, status=404, body=body)
        fault_proxy.add(rule)
    code, answer = _keepstep("verify", rclone_bucket, fault_proxy, "--step=1")
    assert (code, answer["checkpoints"]) == (
        0,
        [{"step": 1, "save": gone.save, "weights_only": False, "deleted": True, "problems": []}],
    )
    code, answer = _keepstep("verify", rclone_bucket, fault_proxy, "--all")
    assert code == 1
    assert [(row["deleted"], len(row["problems"])) for row in answer["checkpoints"]] == [(False, 1), (True, 0)]
    code, answer = _keepstep("ls", rclone_bucket, fault_proxy)
    assert (code, [row["save"] for row in answer["checkpoints"]]) == (0, [damaged.save])


async def _fill(bucket: Bucket) -> tuple[SaveInfo, SaveInfo]:
    """Steps 1 and 2, the second with a flipped byte."""
    async with open_store(bucket.settings()) as store:
        infos = await store_checkpoint(store, 1), await store_checkpoint(store, 2)
        await flip_byte(store, file_key(infos[1], "model-0.safetensors"), 1)
    return infos


def _keepstep(command: str, bucket: Bucket, proxy: FaultProxy, *options: str) -> tuple[int, Any]:
    arguments = [command, bucket.destination, f"--endpoint-url={proxy.endpoint_url}", "--json", *options]
    completed = subprocess.run(
        [sys.executable, "-m", "keepstep_agent", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert completed.stdout, completed.stderr
    return completed.returncode, json.loads(completed.stdout)
