"""A damaged snapshot gives way to an older one; what only failed to be read is not called damaged."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.restored_snapshots import base_of, restored, run
from tests.restore.restored_volume import content, leftovers
from tests.restore.stored_checkpoints import flip_byte, truncate
from tests.restore.stored_snapshots import FILES, body, store_snapshot

from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.mirror.base import MirrorBase
from keepstep_agent.core.stored.object_layout import damage_key, file_key, manifest_key, marker_key, pack_key

DAMAGE = {
    "a flipped byte": lambda store, info: flip_byte(store, file_key(info, "out/a"), 9),
    "a truncated file": lambda store, info: truncate(store, file_key(info, "out/a")),
    "a missing file": lambda store, info: store.delete(file_key(info, "out/a")),
    "a damaged pack": lambda store, info: flip_byte(store, pack_key(info, 0, 0), 512),
    "a missing manifest": lambda store, info: store.delete(manifest_key(info, 0, 1)),
    "a garbage marker": lambda store, info: store.put(marker_key(info), b"garbage"),
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_damage_leads_to_the_next_older_snapshot_and_is_noted(what: str, store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1, {"out/a": body("a", 1)}, packed={"out/b": b"1"})
    newest = await store_snapshot(store, 2, {"out/a": body("a", 2)}, packed={"out/b": b"2"})
    await DAMAGE[what](store, newest.info)
    found = await restored(store, volume)
    assert content(volume / "out") == {"a": body("a", 1), "b": b"1"}
    assert found.snapshots[0].number == 1
    assert len(found.skipped) == 1
    assert damage_key(newest.info.save) in store.objects
    assert not leftovers(volume)
    # The damaged one is still the newest. What the program has done since then is newer.
    (volume / "out" / "a").write_bytes(b"later")
    again = await restored(store, volume)
    assert (volume / "out" / "a").read_bytes() == b"later"
    assert again.left == (volume / "out",)


async def test_damage_to_what_an_earlier_snapshot_owns_is_damage(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1, {"out/a": body("a", 1)})
    owner = await store_snapshot(store, 2, {"out/a": body("a", 2)})
    await store_snapshot(store, 3, {"out/b": b"b"}, kept={"out/a": owner.kept("out/a")})
    await flip_byte(store, file_key(owner.info, "out/a"), 3)
    found = await restored(store, volume)
    assert found.snapshots[0].number == 1
    assert content(volume / "out") == {"a": body("a", 1)}


@pytest.mark.parametrize("node_rank", [0, 1])
async def test_a_series_of_which_nothing_can_be_restored_is_an_error(
    node_rank: int, store: FakeStore, volume: Path
) -> None:
    for number in (1, 2):
        stored = await store_snapshot(store, number, {"out/a": body("a")})
        await flip_byte(store, file_key(stored.info, "out/a"), 3)
    with pytest.raises(StoreError, match="none of 2") as caught:
        await run(store, volume, node_rank=node_rank)
    assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT
    assert not (volume / "out").exists()
    assert base_of(volume) == MirrorBase()
    assert not leftovers(volume)


async def test_a_restarted_container_starts_though_all_snapshots_are_damaged(store: FakeStore, volume: Path) -> None:
    stored = await store_snapshot(store, 1000, {"out/a": body("a")})
    await restored(store, volume)
    await store.delete(file_key(stored.info, "out/a"))
    found = await restored(store, volume)
    assert "none of 1" in found.warnings[0]
    assert content(volume / "out") == {"a": body("a")}


async def test_trouble_with_the_store_is_no_damage(store: FakeStore, volume: Path) -> None:
    stored = await store_snapshot(store, 1000, FILES)
    store.fail("get_into", ErrorKind.ACCESS_DENIED, times=9)
    with pytest.raises(StoreError):
        await run(store, volume)
    assert damage_key(stored.info.save) not in store.objects
    assert not leftovers(volume)


async def test_a_snapshot_that_is_deleted_meanwhile_is_not_called_damaged(store: FakeStore, volume: Path) -> None:
    older = await store_snapshot(store, 1, {"out/a": body("a", 1)})
    newer = await store_snapshot(store, 2, {"out/a": body("a", 2)})
    del store.objects[file_key(newer.info, "out/a")]
    del store.objects[marker_key(newer.info)]

    class Listing(FakeStore):
        """Its first listing still has the marker."""

        async def list(self, prefix: str):  # type: ignore[no-untyped-def]
            first = not any(method == "list" for method, _ in self.calls)
            async for one in super().list(prefix):
                yield one
                if first and one.key == marker_key(older.info):
                    yield replace(one, key=marker_key(newer.info))

    listing = Listing()
    listing.objects = store.objects
    found = await restored(listing, volume)
    assert found.snapshots[0].save == older.info.save
    assert "was deleted meanwhile" in found.skipped[0]
    assert damage_key(newer.info.save) not in store.objects
