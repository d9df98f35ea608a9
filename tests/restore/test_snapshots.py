"""What snapshots bring into the output directories of an empty volume, and the base that they leave there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.restored_snapshots import base_of, restored, run
from tests.restore.restored_volume import content, leftovers
from tests.restore.stored_snapshots import FILES, below, body, store_snapshot

from keepstep_agent.adapters.volume.shared_volume import fingerprint
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.model import Owner, SnapshotId
from keepstep_agent.ports import ObjectStore
from keepstep_agent.restore.snapshots import restore_snapshots


async def test_files_come_back_where_they_were_with_their_times_and_links(
    real_store: ObjectStore, volume: Path
) -> None:
    links = {"out/latest": "run-1", "out/run-1/best": "../ckpt.pt"}
    stored = await store_snapshot(real_store, 1000, FILES, links=links)
    seen: list[tuple[str, int, int]] = []
    found = await restored(real_store, volume, on_progress=lambda *progress: seen.append(progress))
    out = volume / "out"
    assert below("out", FILES) == {path: held for path, held in content(out).items() if path != "run-1/best"}
    for path, entry in stored.entries.items():
        assert (volume / path).lstat().st_mtime_ns == entry.modified_ns
    assert {path: str((volume / path).readlink()) for path in links} == links
    changed = [(volume / path).stat().st_ctime_ns for path in FILES]
    assert changed == sorted(changed)
    (one,) = found.snapshots
    size_bytes = sum(map(len, FILES.values()))
    assert (one.series, one.save, one.number, one.files) == ("node-0", "node-0-1000", 1000, 6)
    assert (one.size_bytes, one.put_in_place, one.directories) == (size_bytes, True, (out,))
    assert (found.left, found.warnings, found.skipped) == ((), (), ())
    assert seen[-1] == ("snapshot of node-0", size_bytes, size_bytes)
    assert not leftovers(volume)


async def test_what_was_restored_is_the_base_of_the_next_snapshot(store: FakeStore, volume: Path) -> None:
    stored = await store_snapshot(store, 1000, FILES, links={"out/latest": "run-1"})
    await restored(store, volume)
    base = base_of(volume)
    assert base.snapshot == SnapshotId(series="node-0", number=1000, save="node-0-1000")
    assert set(base.files) == set(FILES)
    for path, held in base.files.items():
        assert held.fingerprint == fingerprint((volume / path).lstat())
        assert held.entry.owner == Owner(name="node-0", save="node-0-1000", rank=0, path=path)
        assert held.entry.has_bytes_of(stored.entries[path])
    assert (base.others, base.links, base.pending) == ({}, {"out/latest": "run-1"}, frozenset())


async def test_files_that_earlier_snapshots_own_come_back_too(store: FakeStore, volume: Path) -> None:
    first = await store_snapshot(store, 1, {"out/a": body("a")}, packed={"out/b": b"b", "out/c": b"c"})
    second = await store_snapshot(
        store, 2, {"out/d": body("d")}, kept={path: first.kept(path) for path in ("out/a", "out/c")}
    )
    moved = replace(second.kept("out/a"), path="out/moved/a")
    kept = {path: second.kept(path) for path in ("out/c", "out/d")}
    await store_snapshot(store, 3, {}, packed={"out/e": b"e"}, kept=kept | {"out/moved/a": moved})
    await restored(store, volume)
    assert content(volume / "out") == {"moved/a": body("a"), "c": b"c", "d": body("d"), "e": b"e"}
    owners = {path: held.entry.owner for path, held in base_of(volume).files.items()}
    assert owners["out/moved/a"] == Owner(name="node-0", save="node-0-1", rank=0, path="out/a")
    assert owners["out/e"] == Owner(name="node-0", save="node-0-3", rank=0, path="out/e")


async def test_other_nodes_files_come_too_and_the_own_ones_win(store: FakeStore, volume: Path) -> None:
    own = {"out/same": b"own", "out/own": b"own", "out/folder/x": b"own"}
    await store_snapshot(store, 5, own, node_rank=2, links={"out/link": "folder"})
    await store_snapshot(
        store, 7, {"out/same": b"0", "out/zero": b"0", "out/folder": b"0", "out/link/y": b"0", "out/own/z": b"0"}
    )
    await store_snapshot(store, 6, {"out/zero": b"1", "out/one": b"1"}, node_rank=10)
    found = await restored(store, volume, node_rank=2)
    files = content(volume / "out")
    assert files == {"same": b"own", "own": b"own", "folder/x": b"own", "zero": b"0", "one": b"1"}
    assert [(one.series, one.files) for one in found.snapshots] == [("node-2", 4), ("node-0", 1), ("node-10", 1)]
    base = base_of(volume)
    assert base.snapshot is not None
    assert base.snapshot.series == "node-2"
    assert set(base.files) == set(own)
    assert base.others == {path: fingerprint((volume / path).stat()) for path in ("out/zero", "out/one")}


async def test_a_node_without_snapshots_gets_the_others_files(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 7, FILES)
    await restored(store, volume, node_rank=1)
    assert content(volume / "out") == below("out", FILES)
    base = base_of(volume)
    assert (base.snapshot, set(base.files), set(base.others)) == (None, set(), set(FILES))


async def test_without_snapshots_or_directories_nothing_is_restored(store: FakeStore, volume: Path) -> None:
    assert await run(store, volume) is None
    await store_snapshot(store, 1, FILES)
    options: dict[str, Any] = {"volume": volume, "state_directory": volume / "state"}
    assert (
        await restore_snapshots(store, directories=(), checkpoint_directory=volume / "checkpoints", **options) is None
    )
    assert not (volume / ".keepstep").exists()


async def test_a_directory_that_is_not_watched_is_named(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1000, {"out/a": b"a", "logs/b": b"b", "file": b"c"})
    found = await restored(store, volume)
    (warning,) = found.warnings
    assert "the snapshot has files of file, logs, which is not watched" in warning
    assert "--watch" in warning
    assert content(volume / "out") == {"a": b"a"}
    # It comes as soon as it is watched, although the base is there.
    await restored(store, volume, [volume / "out", volume / "logs"])
    assert content(volume / "logs") == {"b": b"b"}


async def test_too_little_space_is_told_before_anything_is_fetched(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1000, FILES)
    with pytest.raises(VolumeError, match="node-0 needs") as caught:
        await run(store, volume, size_limit_bytes=1000)
    assert caught.value.kind is ErrorKind.DISK_FULL
    assert not (volume / "out").exists()
