"""Snapshots: what is in the output directories after a restore, for every state of destination and volume before it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.stored_checkpoints import flip_byte, truncate
from tests.restore.stored_snapshots import FIRST_NS, SECOND_NS, body, store_snapshot

from mooring_agent.adapters.output.mirror_state import read_base, write_base
from mooring_agent.adapters.volume.shared_folders import make_state_directory
from mooring_agent.adapters.volume.shared_volume import Folder, fingerprint
from mooring_agent.core.errors import ErrorKind, StoreError, VolumeError
from mooring_agent.core.mirror.base import MirrorBase
from mooring_agent.core.model import Owner, SnapshotId
from mooring_agent.core.stored.object_layout import damage_key, file_key, manifest_key, marker_key, pack_key
from mooring_agent.ports import ObjectStore
from mooring_agent.restore.snapshots import RestoredSnapshots, restore_snapshots

BROKEN = b"PK\x03\x04 and no end"
"""What begins like a zip, as torch.save writes it, and does not end like one."""


async def run(
    store: ObjectStore, volume: Path, directories: Sequence[Path] = (), **options: Any
) -> RestoredSnapshots | None:
    return await restore_snapshots(
        store,
        volume=volume,
        directories=[str(directory) for directory in directories] or [str(volume / "out")],
        state_directory=volume / "state",
        **options,
    )


async def restored(
    store: ObjectStore, volume: Path, directories: Sequence[Path] = (), **options: Any
) -> RestoredSnapshots:
    found = await run(store, volume, directories, **options)
    assert found is not None
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def base_of(volume: Path) -> MirrorBase:
    return read_base(volume, volume / "state")


def keep_base(volume: Path, **changes: Any) -> None:
    """Change the base as the agent does."""
    make_state_directory(volume, volume / "state")
    write_base(volume, volume / "state", replace(base_of(volume), **changes))


def leftovers(volume: Path) -> list[Path]:
    return list((volume / ".mooring" / "incoming").iterdir())


FILES = {path: body(path) for path in ("out/ckpt.pt", "out/run-1/model.bin", "out/run-1/logs/train.log", "out/empty")}
FILES["out/empty"] = b""


def below(label: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of one output directory, by their paths in it."""
    return {path.removeprefix(f"{label}/"): held for path, held in files.items() if path.startswith(f"{label}/")}


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
    assert (base.snapshot, base.files, set(base.others)) == (None, {}, set(FILES))


async def test_without_snapshots_or_directories_nothing_is_restored(store: FakeStore, volume: Path) -> None:
    assert await run(store, volume) is None
    await store_snapshot(store, 1, FILES)
    options: dict[str, Any] = {"volume": volume, "directories": (), "state_directory": volume / "state"}
    assert await restore_snapshots(store, **options) is None
    assert not (volume / ".mooring").exists()


async def test_a_restarted_container_finds_its_directory_as_it_left_it(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1000, FILES)
    await restored(store, volume)
    (volume / "out" / "ckpt.pt").write_bytes(b"newer")
    (volume / "out" / "empty").unlink()
    (volume / "out" / "another").write_bytes(b"new")
    before = base_of(volume)
    store.calls.clear()
    found = await restored(store, volume)
    assert (volume / "out" / "ckpt.pt").read_bytes() == b"newer"
    assert not (volume / "out" / "empty").exists()
    assert found.left == (volume / "out",)
    assert [(one.files, one.put_in_place) for one in found.snapshots] == [(0, False)]
    assert base_of(volume) == before
    assert "get_into" not in {method for method, _ in store.calls}


@pytest.mark.parametrize("newest", [999, 1000])
async def test_a_snapshot_that_is_no_newer_than_the_volumes_own_replaces_nothing(
    newest: int, store: FakeStore, volume: Path
) -> None:
    await store_snapshot(store, newest, FILES)
    await restored(store, volume)
    keep_base(volume, snapshot=SnapshotId(series="node-0", number=1000, save="made-here-and-pruned"))
    (volume / "out" / "ckpt.pt").write_bytes(b"newer")
    await restored(store, volume)
    assert (volume / "out" / "ckpt.pt").read_bytes() == b"newer"


async def test_a_broken_file_that_a_restarted_container_finds_is_mended(store: FakeStore, volume: Path) -> None:
    files = {"out/a.pt": b"old pickle", "out/b.pt": b"old pickle", "out/c.pt": b"old pickle"}
    stored = await store_snapshot(store, 1000, files)
    await restored(store, volume)
    (volume / "out" / "a.pt").write_bytes(BROKEN)
    (volume / "out" / "b.pt").write_bytes(b"newer pickle")
    (volume / "out" / "other.pt").write_bytes(BROKEN)
    found = await restored(store, volume)
    assert content(volume / "out") == {
        "a.pt": b"old pickle",
        "b.pt": b"newer pickle",
        "c.pt": b"old pickle",
        "other.pt": BROKEN,
    }
    assert (volume / "out" / "a.pt").stat().st_mtime_ns == stored.entries["out/a.pt"].modified_ns
    (warning,) = found.warnings
    assert f"{volume}/out/a.pt was not complete" in warning
    assert [(one.files, one.put_in_place) for one in found.snapshots] == [(1, False)]
    # It need not be sent again.
    assert base_of(volume).files["out/a.pt"].fingerprint == fingerprint((volume / "out" / "a.pt").stat())


async def test_a_restarted_container_starts_though_all_snapshots_are_damaged(store: FakeStore, volume: Path) -> None:
    stored = await store_snapshot(store, 1000, {"out/a": body("a")})
    await restored(store, volume)
    await store.delete(file_key(stored.info, "out/a"))
    found = await restored(store, volume)
    assert "none of 1" in found.warnings[0]
    assert content(volume / "out") == {"a": body("a")}


async def test_a_newer_snapshot_from_another_machine_replaces_what_is_here(store: FakeStore, volume: Path) -> None:
    first = await store_snapshot(store, 1000, FILES)
    await restored(store, volume)
    (volume / "out" / "ckpt.pt").write_bytes(b"lost when this machine went away")
    (volume / "out" / "only-here").write_bytes(b"stays")
    kept = {path: first.kept(path) for path in FILES if path != "out/ckpt.pt"}
    await store_snapshot(store, 2000, {"out/ckpt.pt": body("ckpt", 2)}, kept=kept, links={"out/latest": "ckpt.pt"})
    store.calls.clear()
    found = await restored(store, volume)
    expected = below("out", FILES) | {"ckpt.pt": body("ckpt", 2), "only-here": b"stays", "latest": body("ckpt", 2)}
    assert content(volume / "out") == expected
    assert (found.left, found.snapshots[0].put_in_place) == ((), True)
    base = base_of(volume)
    assert base.snapshot is not None
    assert base.snapshot.number == 2000
    assert (set(base.files), base.links) == (set(FILES), {"out/latest": "ckpt.pt"})
    # Of what is here already nothing is fetched.
    assert {key for method, key in store.calls if method == "get_into"} == {"node-0/node-0-2000/out/ckpt.pt"}


async def test_a_snapshot_of_this_volume_whose_agent_died_replaces_nothing(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1000, FILES)
    await restored(store, volume)
    (volume / "out" / "ckpt.pt").write_bytes(b"newer")
    await store_snapshot(store, 2000, {"out/ckpt.pt": b"new", "out/elsewhere": b"x"}, save="of-this-volume")
    keep_base(volume, pending=frozenset({"of-this-volume"}))
    found = await restored(store, volume)
    assert (volume / "out" / "ckpt.pt").read_bytes() == b"newer"
    assert not (volume / "out" / "elsewhere").exists()
    assert found.left == (volume / "out",)
    assert base_of(volume).pending == {"of-this-volume"}


async def test_the_first_snapshot_of_a_volume_whose_agent_died_replaces_nothing(store: FakeStore, volume: Path) -> None:
    (volume / "out").mkdir()
    (volume / "out" / "ckpt.pt").write_bytes(b"newer")
    await store_snapshot(store, 2000, {"out/ckpt.pt": b"new"}, save="of-this-volume")
    keep_base(volume, pending=frozenset({"of-this-volume"}))
    found = await restored(store, volume)
    assert (volume / "out" / "ckpt.pt").read_bytes() == b"newer"
    assert (found.left, found.warnings) == ((volume / "out",), ())


async def test_a_volume_that_another_node_had_gets_this_nodes_snapshot(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 2000, {"out/rank": b"0"}, node_rank=0)
    await restored(store, volume, node_rank=0)
    await store_snapshot(store, 1000, {"out/rank": b"1"}, node_rank=1)
    await restored(store, volume, node_rank=1)
    assert content(volume / "out") == {"rank": b"1"}


async def test_a_directory_whose_files_nobody_knows_is_left_alone(store: FakeStore, volume: Path) -> None:
    (volume / "out").mkdir()
    (volume / "out" / "ckpt.pt").write_bytes(b"whose?")
    await store_snapshot(store, 1000, FILES)
    await store_snapshot(store, 1000, {"out/of-node-1": b"x"}, node_rank=1)
    found = await restored(store, volume)
    assert content(volume / "out") == {"ckpt.pt": b"whose?"}
    (warning,) = found.warnings
    assert f"{volume}/out has files that are not of the newest snapshot (e.g. {volume}/out/ckpt.pt)" in warning
    assert base_of(volume) == MirrorBase()
    assert "get_into" not in {method for method, _ in store.calls}
    # As the warning says.
    (volume / "out" / "ckpt.pt").unlink()
    found = await restored(store, volume)
    assert content(volume / "out") == below("out", FILES) | {"of-node-1": b"x"}
    assert found.warnings == ()


async def test_a_directory_is_left_alone_if_only_another_nodes_file_is_in_the_way(
    store: FakeStore, volume: Path
) -> None:
    (volume / "out").mkdir()
    (volume / "out" / "of-node-1").write_bytes(b"whose?")
    await store_snapshot(store, 1000, FILES)
    await store_snapshot(store, 1000, {"out/of-node-1": b"x"}, node_rank=1)
    found = await restored(store, volume)
    assert content(volume / "out") == {"of-node-1": b"whose?"}
    assert len(found.warnings) == 1
    assert not leftovers(volume)


async def test_files_with_the_very_bytes_are_not_fetched_again(store: FakeStore, volume: Path) -> None:
    (volume / "out").mkdir()
    (volume / "out" / "ckpt.pt").write_bytes(FILES["out/ckpt.pt"])
    stored = await store_snapshot(store, 1000, FILES)
    store.calls.clear()
    await restored(store, volume)
    assert content(volume / "out") == below("out", FILES)
    assert (volume / "out" / "ckpt.pt").stat().st_mtime_ns == stored.entries["out/ckpt.pt"].modified_ns
    assert file_key(stored.info, "out/ckpt.pt") not in {key for method, key in store.calls if method == "get_into"}
    assert set(base_of(volume).files) == set(FILES)


async def test_several_directories_are_judged_one_by_one(store: FakeStore, volume: Path, tmp_path: Path) -> None:
    places = [volume / "out", volume / "deep" / "logs", tmp_path / "elsewhere" / "pictures"]
    files = {"out/a": b"a", "logs/b": b"b", "pictures/c": b"c"}
    await store_snapshot(store, 1000, files)
    places[1].mkdir(parents=True)
    (places[1] / "b").write_bytes(b"whose?")
    found = await restored(store, volume, places)
    assert [content(place) for place in places] == [{"a": b"a"}, {"b": b"whose?"}, {"c": b"c"}]
    assert found.snapshots[0].directories == (places[0], places[2])
    assert set(base_of(volume).files) == {"out/a", "pictures/c"}
    # Once the user has made room, that directory alone is restored.
    (places[0] / "a").write_bytes(b"newer")
    (places[1] / "b").unlink()
    found = await restored(store, volume, places)
    assert [content(place) for place in places] == [{"a": b"newer"}, {"b": b"b"}, {"c": b"c"}]
    assert found.left == (places[0], places[2])
    assert set(base_of(volume).files) == set(files)


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


async def test_other_nodes_files_are_brought_up_to_date_after_a_restart(store: FakeStore, volume: Path) -> None:
    first = {"out/rewritten": b"1", "out/changed-here": b"1", "out/deleted-here": b"1", "out/same": b"1"}
    before = await store_snapshot(store, 1000, first)
    await store_snapshot(store, 1000, {"out/own": b"own"}, node_rank=1)
    await restored(store, volume, node_rank=1)
    (volume / "out" / "changed-here").write_bytes(b"mine")
    (volume / "out" / "deleted-here").unlink()
    (volume / "out" / "own").unlink()
    later = dict.fromkeys((*first, "out/added", "out/own"), FIRST_NS + 100 * SECOND_NS)
    files = {path: b"2" for path in later if path != "out/same"}
    await store_snapshot(store, 2000, files, modified_ns=later, kept={"out/same": before.kept("out/same")})
    store.calls.clear()
    found = await restored(store, volume, node_rank=1)
    assert content(volume / "out") == {"rewritten": b"2", "changed-here": b"mine", "same": b"1", "added": b"2"}
    assert {key.rpartition("/")[2] for method, key in store.calls if method == "get_into"} == {"rewritten", "added"}
    assert [(one.series, one.files, one.put_in_place) for one in found.snapshots] == [
        ("node-1", 0, False),
        ("node-0", 2, False),
    ]
    others = base_of(volume).others
    assert others["out/rewritten"] == fingerprint((volume / "out" / "rewritten").stat())
    assert others["out/added"] == fingerprint((volume / "out" / "added").stat())


async def test_a_restore_that_is_killed_at_any_rename_is_completed_by_the_next(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {"out/latest": "run-1"}
    await store_snapshot(store, 1000, FILES, links=links)
    await store_snapshot(store, 1000, {"out/of-node-1": b"x"}, node_rank=1)
    rename = Folder.rename
    for killed_at in range(1, len(FILES) + 4):
        volume = tmp_path / f"volume-{killed_at}"
        volume.mkdir()
        done = 0

        def killed(folder: Folder, path: str, to: Folder, to_path: str, at: int = killed_at) -> None:
            nonlocal done
            done += 1
            if done == at:
                raise KeyboardInterrupt
            rename(folder, path, to, to_path)

        monkeypatch.setattr(Folder, "rename", killed)
        if killed_at <= len(FILES) + 2:
            with pytest.raises(KeyboardInterrupt):
                await run(store, volume)
            assert base_of(volume) == MirrorBase()
        else:
            await run(store, volume)
        monkeypatch.setattr(Folder, "rename", rename)
        found = await restored(store, volume)
        assert found.warnings == ()
        latest = {f"latest/{path.removeprefix('run-1/')}": held for path, held in below("out", FILES).items()}
        assert content(volume / "out").items() <= (below("out", FILES) | latest | {"of-node-1": b"x"}).items()
        assert len(content(volume / "out")) >= len(FILES) + 1
        assert (volume / "out" / "latest").readlink() == Path("run-1")
        assert set(base_of(volume).files) == set(FILES)
        assert set(base_of(volume).others) == {"out/of-node-1"}
        assert not leftovers(volume)


async def test_too_little_space_is_told_before_anything_is_fetched(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1000, FILES)
    with pytest.raises(VolumeError, match="node-0 needs") as caught:
        await run(store, volume, size_limit_bytes=1000)
    assert caught.value.kind is ErrorKind.DISK_FULL
    assert not (volume / "out").exists()


async def test_trouble_with_the_store_is_no_damage(store: FakeStore, volume: Path) -> None:
    stored = await store_snapshot(store, 1000, FILES)
    store.fail("get_into", ErrorKind.ACCESS_DENIED, times=9)
    with pytest.raises(StoreError):
        await run(store, volume)
    assert damage_key(stored.info.save) not in store.objects
    assert not leftovers(volume)


async def test_an_unreadable_base_counts_as_missing(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1000, FILES)
    await restored(store, volume)
    (volume / "state" / "mirror.json").write_bytes(b"garbage")
    found = await restored(store, volume)
    assert found.left == ()
    assert set(base_of(volume).files) == set(FILES)


async def test_a_base_is_never_added_to_with_files_of_another_snapshot(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1000, {"out/a": b"a", "logs/b": b"b"})
    await restored(store, volume)
    newer = SnapshotId(series="node-0", number=2000, save="made-here-and-pruned")
    keep_base(volume, snapshot=newer)
    await restored(store, volume, [volume / "out", volume / "logs"])
    assert content(volume / "logs") == {"b": b"b"}
    base = base_of(volume)
    assert (base.snapshot, set(base.files)) == (newer, {"out/a"})


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
