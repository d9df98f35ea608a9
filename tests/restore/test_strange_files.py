"""Files that no record of Keepstep's names are there after a restore, whatever is restored over them."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.fakes.fake_store import FakeStore
from tests.restore import restored_snapshots
from tests.restore.restored_volume import content, leftovers, record, run
from tests.restore.stored_checkpoints import all_files, store_checkpoint
from tests.restore.stored_snapshots import store_snapshot

from keepstep.checkpoints.records import is_whole, read_records
from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume
from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.catalog.reading import load
from keepstep_agent.core.errors import VolumeError
from keepstep_agent.core.mirror.base import MirrorBase
from keepstep_agent.core.model import SnapshotId
from keepstep_agent.restore.local_copy import LocalCopies
from keepstep_agent.restore.strange_files import remove_recorded
from keepstep_api.records import Kind, Record, RecordedFile

STRANGE = {"notes.txt": b"mine", "optimizer/mine.pt": b"mine too", "eval/scores.json": b"{}"}
NEW = {"model-0.safetensors": b"new!", "optimizer/state-0.pt": b"new!", "rng_state_0.pth": b"new!"}
OLD = {"model-0.safetensors": b"old", "optimizer/state-0.pt": b"old", "old/only.pt": b"old"}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for path, body in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(body)


def write_old(volume: Path, name: str = "checkpoint-5", *, strange: dict[str, bytes] | None = None) -> Path:
    """A whole checkpoint of an earlier save with a record, and strange files in its folder."""
    place = volume / "checkpoints" / name
    write(place, OLD)
    files = tuple(RecordedFile(path=path, size_bytes=len(body)) for path, body in OLD.items())
    old = Record(name=name, step=5, save="old-1", kind=Kind.PERIODIC, world_size=1, saved_at=1.0, files=files)
    records = volume / ".keepstep" / "records"
    records.mkdir(parents=True, exist_ok=True)
    (records / f"{name}.json").write_bytes(old.encode())
    write(place, STRANGE if strange is None else strange)
    return place


async def test_only_what_the_record_names_is_replaced_and_the_rest_stays(store: FakeStore, volume: Path) -> None:
    place = write_old(volume)
    (place / "empty").mkdir()
    (place / "link").symlink_to("/etc/hostname")
    await store_checkpoint(store, 5)
    with capture_logs() as log:
        restored = await run(store, volume)
    assert restored is not None
    assert (place / "link").is_symlink()
    (place / "link").unlink()
    assert content(place) == all_files(5) | STRANGE
    assert (place / "empty").is_dir()
    assert not (place / "old").exists()
    assert record(volume, "checkpoint-5")["save"] == restored.save
    assert not [line for line in log if line["event"] == "restore.set_aside"]
    assert not leftovers(volume)
    assert not list((volume / ".keepstep" / "replaced").iterdir())


async def test_a_strange_file_with_the_name_of_a_restored_one_is_kept_beside_it_and_told(
    store: FakeStore, volume: Path
) -> None:
    place = volume / "checkpoints" / "checkpoint-5"
    same = all_files(5)["rng_state_0.pth"]
    theirs = {"model-0.safetensors": b"mine", "rng_state_0.pth": same, "optimizer": b"a file", "notes.txt": b"mine"}
    write(place, theirs)
    write(place, {"model-0.safetensors.before-restore": b"of the restore before"})
    await store_checkpoint(store, 5)
    with capture_logs() as log:
        await run(store, volume)
    assert content(place) == all_files(5) | {
        "model-0.safetensors.before-restore": b"of the restore before",
        "model-0.safetensors.before-restore-2": b"mine",
        "optimizer.before-restore": b"a file",
        "notes.txt": b"mine",
    }
    (line,) = [line for line in log if line["event"] == "restore.set_aside"]
    assert set(line["paths"]) == {
        "checkpoint-5/model-0.safetensors.before-restore-2",
        "checkpoint-5/optimizer.before-restore",
    }
    assert "remove what you do not need" in line["hint"]


async def test_a_record_of_another_directory_names_nothing_here(store: FakeStore, volume: Path) -> None:
    """A trainer can write records."""
    place = write_old(volume, strange={})
    path = volume / ".keepstep" / "records" / "checkpoint-5.json"
    path.write_text(path.read_text().replace('"format"', '"directory": "outputs", "format"', 1))
    await store_checkpoint(store, 5)
    await run(store, volume)
    aside = {"model-0.safetensors.before-restore", "optimizer/state-0.pt.before-restore", "old/only.pt"}
    assert set(content(place)) == {*all_files(5), *aside}


async def test_a_strange_file_in_the_place_of_a_folder_is_kept_and_the_other_way_round(
    store: FakeStore, volume: Path
) -> None:
    checkpoints = volume / "checkpoints"
    write(checkpoints, {"checkpoint-5": b"mine"})
    await store_checkpoint(store, 5)
    await run(store, volume)
    assert content(checkpoints / "checkpoint-5") == all_files(5)
    assert (checkpoints / "checkpoint-5.before-restore").read_bytes() == b"mine"

    write(checkpoints, {"last.ckpt/notes.txt": b"mine"})
    await store_checkpoint(store, 6, name="last.ckpt", ranks=[{"last.ckpt": b"6"}], single_file=True)
    await run(store, volume)
    assert (checkpoints / "last.ckpt").read_bytes() == b"6"
    assert content(checkpoints / "last.ckpt.before-restore") == {"notes.txt": b"mine"}


@pytest.mark.parametrize("target", ["/", "elsewhere"])
async def test_a_link_in_the_place_of_a_checkpoint_is_kept_and_never_followed(
    target: str, store: FakeStore, volume: Path
) -> None:
    checkpoints = volume / "checkpoints"
    write(checkpoints, {"elsewhere/model-0.safetensors": b"mine"})
    (checkpoints / "checkpoint-5").symlink_to(target)
    await store_checkpoint(store, 5)
    await run(store, volume)
    assert content(checkpoints / "checkpoint-5") == all_files(5)
    assert (checkpoints / "checkpoint-5.before-restore").readlink() == Path(target)
    assert content(checkpoints / "elsewhere") == {"model-0.safetensors": b"mine"}


def test_a_forged_record_removes_nothing_but_files_below_its_checkpoint(volume: Path) -> None:
    write(volume, {"top/a": b"1", "top/folder/b": b"2", "outside": b"3"})
    (volume / "top" / "link").symlink_to(volume)
    paths = ["../outside", "/etc/passwd", "link/outside", "folder", "", "a/b", ".", "x" * 300, "nothing", "a\0"]
    with open_volume(volume) as root:
        remove_recorded(root, "top", paths)
    assert content(volume) == {"top/a": b"1", "top/folder/b": b"2", "outside": b"3"}


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


def killed_at_change(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """From now on the change `number` of a folder does not happen, nor any after it."""
    count = 0

    def counted(change: Any) -> Any:
        def change_or_die(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count >= number:
                raise Killed
            return change(*arguments)

        return change_or_die

    for name in ("rename", "unlink", "remove", "remove_if_empty", "write_durably"):
        monkeypatch.setattr(Folder, name, counted(getattr(Folder, name)))


async def test_killed_at_any_change_one_checkpoint_is_there_and_every_strange_file(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each kill a restore that finds nothing to restore puts things in order, and may be killed as well."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    await store_checkpoint(store, 5, ranks=[NEW])
    (committed,) = await list_committed(store)
    checkpoint = await load(store, committed)
    strange = {"optimizer/mine.pt": b"mine too", "rng_state_0.pth": b"mine"}

    def install(case: Path) -> None:
        local = LocalCopies(case, case / "checkpoints", case / ".keepstep" / "agent")
        local.prepare()
        write(case / local.incoming(checkpoint), NEW)
        local.install(checkpoint)

    def check(case: Path, *, after: str) -> str:
        """Return whose record there is; its checkpoint is whole, byte by byte."""
        place = case / "checkpoints" / "checkpoint-5"
        files = content(place) if place.exists() else {}
        there = list(content(case).values())
        assert all(body in there for body in strange.values()), after
        records = [one for one in read_records(case / ".keepstep" / "records") if is_whole(one, place)]
        for one in records:
            expected = OLD if one.save == "old-1" else NEW
            assert {path: files.get(path) for path in expected} == expected, after
        return records[0].save if records else ""

    def settle(case: Path, number: int) -> bool:
        """A restore that is killed at its change `number`; whether it came so far."""
        with pytest.MonkeyPatch.context() as patch:
            killed_at_change(patch, number)
            try:
                LocalCopies(case, case / "checkpoints", case / ".keepstep" / "agent").prepare()
            except Killed:
                return True
        return False

    kills = 0
    for first in range(1, 100):
        second = 0
        is_killed = True
        while is_killed:
            second += 1
            case = volume / f"{first}-{second}"
            place = write_old(case, strange=strange)
            with pytest.MonkeyPatch.context() as patch:
                killed_at_change(patch, first)
                try:
                    install(case)
                except Killed:
                    pass
                else:
                    assert check(case, after="no kill") == committed.save
                    assert kills > 100
                    return
            check(case, after=f"a kill at {first}")
            is_killed = settle(case, second)
            kills += 1
            check(case, after=f"kills at {first} and {second}")
            settle(case, 1000)
            assert not list((case / ".keepstep" / "replaced").glob("*")), (first, second)
            kept = content(place)
            assert kept["optimizer/mine.pt"] == b"mine too", (first, second)
            is_new = all(kept.get(path) == body for path, body in NEW.items() if path not in strange)
            assert is_new or {path: kept.get(path) for path in OLD} == OLD, (first, second)
            # The old one is back with its record.
            if not is_new:
                assert check(case, after=f"kills at {first} and {second}") == "old-1"
            shutil.rmtree(case)
    raise AssertionError("it never came to its end")


async def test_what_cannot_be_put_back_costs_no_restore_and_is_put_back_by_the_next(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_old(volume)
    await store_checkpoint(store, 5)
    rename = Folder.rename

    def refuse(folder: Folder, path: str, to: Folder, to_path: str) -> None:
        if path == "notes.txt":
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        rename(folder, path, to, to_path)

    monkeypatch.setattr(Folder, "rename", refuse)
    with capture_logs() as log:
        restored = await run(store, volume)
    assert restored is not None
    (line,) = [line for line in log if line["event"] == "restore.replaced_kept"]
    assert content(Path(line["path"])).items() >= {"content/notes.txt": b"mine"}.items()
    # Nothing may take the place of what waits there.
    (place / "rng_state_0.pth").unlink()
    with pytest.raises(VolumeError, match="is still there"):
        await run(store, volume)
    monkeypatch.undo()
    await run(store, volume)
    assert content(place) == all_files(5) | STRANGE


async def test_a_newer_snapshot_replaces_no_file_that_its_base_does_not_know(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1000, {"out/model.pt": b"1"})
    await restored_snapshots.restored(store, volume)
    write(volume / "out", {"new.pt": b"mine", "same.pt": b"same", "link.pt": b"mine too"})
    await store_snapshot(
        store,
        2000,
        {"out/model.pt": b"2", "out/new.pt": b"2", "out/same.pt": b"same"},
        links={"out/link.pt": "model.pt"},
    )
    found = await restored_snapshots.restored(store, volume)
    out = content(volume / "out")
    assert out == {
        "model.pt": b"2",
        "new.pt": b"2",
        "new.pt.before-restore": b"mine",
        "same.pt": b"same",
        "link.pt": b"2",
        "link.pt.before-restore": b"mine too",
    }
    (warning,) = found.warnings
    assert f"{volume}/out/link.pt, {volume}/out/new.pt" in warning
    assert ".before-restore" in warning


async def test_a_file_of_another_node_replaces_no_file_that_the_base_does_not_know(
    store: FakeStore, volume: Path
) -> None:
    await store_snapshot(store, 1000, {"out/model.pt": b"1"})
    await restored_snapshots.restored(store, volume)
    base = restored_snapshots.base_of(volume)
    assert base != MirrorBase()
    restored_snapshots.keep_base(volume, snapshot=SnapshotId(series="node-0", number=1, save="earlier"))
    write(volume / "out", {"rank-1.pt": b"mine"})
    await store_snapshot(store, 1000, {"out/rank-1.pt": b"1"}, node_rank=1)
    await restored_snapshots.restored(store, volume)
    assert content(volume / "out") == {"model.pt": b"1", "rank-1.pt": b"1", "rank-1.pt.before-restore": b"mine"}
