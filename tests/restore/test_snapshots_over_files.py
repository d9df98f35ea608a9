"""Snapshots for a volume that has files already: what is newer there stays, and what nobody knows."""

from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.restored_snapshots import base_of, keep_base, restored, run
from tests.restore.restored_volume import content, leftovers
from tests.restore.stored_snapshots import FILES, FIRST_NS, SECOND_NS, below, body, store_snapshot

from keepstep_agent.adapters.volume.shared_volume import Folder, fingerprint
from keepstep_agent.core.mirror.base import MirrorBase
from keepstep_agent.core.model import SnapshotId
from keepstep_agent.core.stored.object_layout import file_key

BROKEN = b"PK\x03\x04 and no end"
"""What begins like a zip, as torch.save writes it, and does not end like one."""


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


async def test_what_is_left_alone_counts_as_unread_and_stays_in_the_order_of_its_changes(
    store: FakeStore, volume: Path
) -> None:
    await store_snapshot(store, 1000, FILES)
    await restored(store, volume)
    in_order = [
        volume / path for path in ("out/empty", "out/run-1/model.bin", "out/ckpt.pt", "out/run-1/logs/train.log")
    ]
    for path in in_order:
        path.read_bytes()
        path.chmod(0o600)
    await restored(store, volume)
    looks = [path.stat() for path in in_order]
    assert [look.st_atime_ns - look.st_mtime_ns for look in looks] == [0] * len(in_order)
    assert [look.st_ctime_ns for look in looks] == sorted(look.st_ctime_ns for look in looks)


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
    assert f"{volume}/out is not as the newest snapshot has it (e.g. {volume}/out/ckpt.pt)" in warning
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


@pytest.mark.parametrize("kind", ["file", "dangling link"])
async def test_what_is_no_directory_is_left_alone(store: FakeStore, tmp_path: Path, kind: str) -> None:
    """A trainer that left it must not end every restore."""
    place = tmp_path / "out"
    place.write_bytes(b"whose?") if kind == "file" else place.symlink_to("nowhere")
    await store_snapshot(store, 1000, FILES)
    found = await restored(store, tmp_path / "volume", [place])
    (warning,) = found.warnings
    assert f"{place} is not as the newest snapshot has it" in warning
    place.unlink()
    await restored(store, tmp_path / "volume", [place])
    assert content(place) == below("out", FILES)


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
