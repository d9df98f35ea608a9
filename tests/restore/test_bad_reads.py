"""A bad read is no bad object: what is damaged on its way to us is read again, and nothing is called damaged for it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from aiobotocore.session import AioSession
from tests.fakes.fake_store import FakeStore
from tests.harness.flipping_store import FlippingStore
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import flip_byte, store_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.catalog.damage import note_damage
from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_committed, read_marker
from keepstep_agent.catalog.reading import load
from keepstep_agent.core.agent.commands import Commit, Turn
from keepstep_agent.core.agent.events import Committed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.stored.manifest import decode_manifest
from keepstep_agent.core.stored.object_layout import damage_key, file_key, manifest_key, marker_key
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.committer import Committer

POSITIONS = (3, 40, 77, 111, 160, -3, -12)
"""Of bytes in names, numbers, checksums and the end of a small object."""


def notes(store: FakeStore) -> list[str]:
    return [key for key in store.objects if key.startswith(damage_key(""))]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("at", range(3))
async def test_one_flipped_byte_on_the_way_never_makes_restore_pass_over_a_checkpoint(
    at: int, position: int, store: FakeStore, volume: Path
) -> None:
    for step in (1, 2):
        await store_checkpoint(store, step, world_size=2)
    flipping = FlippingStore(store, at=at, position=position)
    restored = await restore(
        flipping, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / ".keepstep"
    )
    assert restored is not None
    assert (restored.step, restored.skipped) == (2, ())
    assert flipping.flipped
    assert flipping.fresh_gets
    assert notes(store) == []


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("at", range(2))
async def test_one_flipped_byte_on_the_way_spoils_no_commit(at: int, position: int, store: FakeStore) -> None:
    info = await store_checkpoint(store, 1, world_size=2, committed=False)
    key = manifest_key(info, 0, 1)
    ours = decode_manifest(await store.get(key, limit_bytes=100_000), key)
    work = WorkId(Operation.COMMIT, info.save)
    flipping = FlippingStore(store, at=at, position=position)
    command = Commit(work=work, info=info, ranks=ours, turn=Turn.WRITE, sweep_uploads=False)
    assert isinstance(await Committer(SystemClock()).commit(flipping, command), Committed)
    assert flipping.flipped
    (committed,) = await list_committed(store)
    assert await check(store, committed) == ()


async def test_a_wrong_digit_in_a_listing_is_no_damage(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 1)

    class OnceWrong(FlippingStore):
        async def list(self, prefix: str):  # type: ignore[no-untyped-def]
            async for one in store.list(prefix):
                wrong = one.key == file_key(info, "model-0.safetensors") and not self.flipped
                self.flipped += one.key if wrong else ""
                yield replace(one, size_bytes=one.size_bytes + 8) if wrong else one

    once_wrong = OnceWrong(store, at=-1, position=0)
    restored = await restore(
        once_wrong, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / ".keepstep"
    )
    assert restored is not None
    assert once_wrong.flipped
    assert notes(store) == []


async def test_a_version_that_came_wrong_is_listed_again(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 1)

    class OnceWrong(FlippingStore):
        async def list(self, prefix: str):  # type: ignore[no-untyped-def]
            wrong = prefix.startswith("checkpoint-1/") and not self.flipped
            self.flipped += prefix if wrong else ""
            async for one in store.list(prefix):
                yield replace(one, version="another") if wrong else one

    restored = await restore(
        OnceWrong(store, at=-1, position=0),
        checkpoint_directory=volume / "checkpoints",
        volume=volume,
        state_directory=volume / ".keepstep",
    )
    assert restored is not None
    assert notes(store) == []


async def test_the_note_of_damage_goes_when_every_byte_is_found_good(store: FakeStore, volume: Path) -> None:
    older, newer = [await store_checkpoint(store, step) for step in (1, 2)]
    key = file_key(newer, "model-0.safetensors")
    await flip_byte(store, key, 5)
    restored = await restore(
        store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / ".keepstep"
    )
    assert restored is not None
    assert restored.save == older.save
    assert notes(store) == [damage_key(newer.save)]
    # As when the network was what damaged it.
    await flip_byte(store, key, 5)
    restored = await restore(
        store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / ".keepstep"
    )
    assert restored is not None
    assert restored.save == newer.save
    assert notes(store) == []


async def test_the_note_of_damage_stays_where_only_the_local_copy_is_found_good(store: FakeStore, volume: Path) -> None:
    info = await store_checkpoint(store, 1)
    again = partial(
        restore, store, checkpoint_directory=volume / "checkpoints", volume=volume, state_directory=volume / ".keepstep"
    )
    assert await again()
    await flip_byte(store, file_key(info, "model-0.safetensors"), 5)
    # By another pod, which had to read it.
    await note_damage(store, info.save, "wrong bytes")
    restored = await again()
    assert restored is not None
    assert not restored.downloaded
    assert notes(store) == [damage_key(info.save)]


async def test_what_is_damaged_in_the_store_is_damage_however_often_it_is_read(store: FakeStore) -> None:
    info = await store_checkpoint(store, 1)
    await flip_byte(store, marker_key(info), 30)
    (committed,) = await list_committed(store)
    with pytest.raises(StoreError, match="is not what was written"):
        await read_marker(store, committed)
    with pytest.raises(StoreError, match="is not what was written"):
        await load(store, committed)


async def test_a_second_read_of_a_small_object_has_a_connection_of_its_own(
    rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    async with open_store(replace(rclone_bucket.settings(), endpoint_url=fault_proxy.endpoint_url)) as store:
        await store.put("a", b"body")
        connections = [fault_proxy.connections]
        for fresh in (False, True, True):
            assert await store.get("a", limit_bytes=10, fresh=fresh) == b"body"
            connections.append(fault_proxy.connections)
    assert [count - connections[0] for count in connections] == [0, 0, 1, 2]


async def test_a_second_read_makes_no_second_client_on_the_event_loop(
    rclone_tls_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = AioSession.create_client

    def counted(session: AioSession, service: str, **options: object) -> object:
        made.append(service)
        return make(session, service, **options)

    monkeypatch.setattr(AioSession, "create_client", counted)
    async with open_store(rclone_tls_bucket.settings()) as store:
        await store.put("a", b"body")
        for fresh in (True, False, True):
            assert await store.get("a", limit_bytes=10, fresh=fresh) == b"body"
    assert made == ["s3"]
