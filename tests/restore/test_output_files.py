"""Where restored files are put: never outside the output directories, in Keepstep's own folders, or through a link."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.fakes.fake_store import FakeStore
from tests.harness.warm_python import keepstep
from tests.restore.stored_snapshots import body, store_snapshot

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.output.mirror_state import read_base, write_base
from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.core.errors import ErrorKind, StoreError, VolumeError
from keepstep_agent.core.mirror.base import MirrorBase
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectStore
from keepstep_agent.restore.snapshots import RestoredSnapshots, restore_snapshots


async def run(store: ObjectStore, volume: Path, *directories: Path, state: str = "state") -> RestoredSnapshots | None:
    return await restore_snapshots(
        store,
        volume=volume,
        directories=[str(directory) for directory in directories or (volume / "out",)],
        state_directory=volume / state,
        checkpoint_directory=volume / "checkpoints",
    )


def found(folder: Path, name: str) -> list[Path]:
    return list(folder.rglob(name))


def forget_snapshot(volume: Path, state: str = "state") -> None:
    """Make this volume's base older than every snapshot, so that the newest replaces what is here."""
    base = read_base(volume, volume / state)
    write_base(volume, volume / state, MirrorBase(files=base.files))


async def test_what_has_the_name_of_a_file_is_replaced_and_not_written_through(
    store: FakeStore, volume: Path, tmp_path: Path
) -> None:
    await store_snapshot(store, 1, {"out/link": b"1", "out/fifo": b"1", "out/hard": b"1"})
    await run(store, volume)
    outside = tmp_path / "outside"
    outside.write_bytes(b"outside")
    for name in ("link", "fifo", "hard"):
        (volume / "out" / name).unlink()
    (volume / "out" / "link").symlink_to(outside)
    os.mkfifo(volume / "out" / "fifo")
    (volume / "out" / "hard").hardlink_to(outside)
    forget_snapshot(volume)
    await run(store, volume)
    assert [(volume / "out" / name).read_bytes() for name in ("link", "fifo", "hard")] == [b"1"] * 3
    assert not (volume / "out" / "link").is_symlink()
    assert outside.read_bytes() == b"outside"


@pytest.mark.parametrize("target", ["../outside", "inside"])
async def test_a_link_in_the_place_of_a_folder_is_never_followed(
    target: str, store: FakeStore, volume: Path, tmp_path: Path
) -> None:
    for folder in (tmp_path / "outside", volume / "out" / "inside"):
        folder.mkdir(parents=True)
    await store_snapshot(store, 1, {"out/folder/file": b"1"})
    (volume / "out" / "folder").symlink_to(target)
    # Nobody knows whose link it is.
    answer = await run(store, volume)
    assert answer is not None
    assert f"{volume}/out is not as the newest snapshot has it" in answer.warnings[0]
    # The volume knows of a file there, and another machine has a newer snapshot.
    (volume / "out" / "folder").unlink()
    await run(store, volume)
    (volume / "out" / "folder" / "file").unlink()
    (volume / "out" / "folder").rmdir()
    (volume / "out" / "folder").symlink_to(target)
    forget_snapshot(volume)
    with pytest.raises(VolumeError, match="out/folder/file cannot be restored") as caught:
        await run(store, volume)
    assert "move away" in caught.value.hint
    assert not list((tmp_path / "outside").iterdir())
    assert not list((volume / "out" / "inside").iterdir())


async def test_a_folder_in_the_place_of_a_file_is_an_error_that_names_it(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1, {"out/a": b"1", "out/b": b"1"})
    await run(store, volume)
    (volume / "out" / "b").unlink()
    (volume / "out" / "b").mkdir()
    (volume / "out" / "b" / "work").write_bytes(b"work")
    (volume / "out" / "a").write_bytes(b"work")
    forget_snapshot(volume)
    with pytest.raises(VolumeError, match="out/b cannot be restored: a folder is there"):
        await run(store, volume)
    assert (volume / "out" / "a").read_bytes() == b"work"
    assert (volume / "out" / "b" / "work").read_bytes() == b"work"


async def test_a_link_takes_the_place_of_another_link(store: FakeStore, volume: Path, tmp_path: Path) -> None:
    await store_snapshot(store, 1, {"out/a": b"1", "out/b": b"1"}, links={"out/latest": "b"})
    await run(store, volume)
    (volume / "out" / "latest").unlink()
    (volume / "out" / "latest").symlink_to(tmp_path)
    forget_snapshot(volume)
    await run(store, volume)
    assert (volume / "out" / "latest").readlink() == Path("b")


@pytest.mark.parametrize(
    ("path", "target"),
    [("out/link", "../x"), ("out/link", "/etc/passwd"), ("out/a/link", "../../x"), ("out/a/link", "b/../../../x")],
)
async def test_a_link_that_leads_elsewhere_makes_its_snapshot_damaged(
    path: str, target: str, store: FakeStore, volume: Path
) -> None:
    await store_snapshot(store, 1, {"out/file": b"1"})
    await store_snapshot(store, 2, {"out/file": b"2"}, links={path: target})
    answer = await run(store, volume)
    assert answer is not None
    assert (volume / "out" / "file").read_bytes() == b"1"
    assert "leads elsewhere" in answer.skipped[0]


async def test_a_file_below_a_link_makes_its_snapshot_damaged(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 2, {"out/link/file": b"2"}, links={"out/link": "a"})
    with pytest.raises(StoreError, match="lies below the link"):
        await run(store, volume)
    assert not (volume / "out").exists()


@pytest.mark.parametrize("path", ["../escape", "out/../../escape", "/escape", "out//escape", "out/./escape"])
async def test_a_path_that_leaves_its_directory_makes_its_snapshot_damaged(
    path: str, store: FakeStore, volume: Path, tmp_path: Path
) -> None:
    await store_snapshot(store, 2, {path: b"2"})
    with pytest.raises(StoreError):
        await run(store, volume)
    assert not found(tmp_path, "escape")


@pytest.mark.parametrize("watched", ["", "..", "alias"])
async def test_nothing_is_put_into_keepsteps_own_folders(
    watched: str, store: FakeStore, volume: Path, tmp_path: Path
) -> None:
    (tmp_path / "alias").symlink_to(volume)
    directory = {"": volume, "..": tmp_path, "alias": tmp_path / "alias"}[watched]
    label = directory.name
    inside = f"{label}/volume" if watched == ".." else label
    own = {f"{inside}/.keepstep/signal": b"x", f"{inside}/kept/state/journal.sqlite3": b"x"}
    await store_snapshot(store, 1, {f"{inside}/file": b"1", **own}, links={f"{inside}/.keepstep/agent.sock": "signal"})
    answer = await run(store, volume, directory, state="kept/state")
    assert answer is not None
    assert (volume / "file").read_bytes() == b"1"
    assert not (volume / ".keepstep" / "signal").exists()
    assert not (volume / ".keepstep" / "agent.sock").is_symlink()
    assert not (volume / "kept" / "state" / "journal.sqlite3").exists()
    assert "Keepstep keeps its own files where the snapshot has" in answer.warnings[0]


async def test_two_series_with_one_save_id_do_not_mix(store: FakeStore, volume: Path) -> None:
    await store_snapshot(store, 1, {"out/a": body("a")}, save="same")
    await store_snapshot(store, 1, {"out/b": body("b")}, save="same", node_rank=1)
    await run(store, volume)
    assert (volume / "out" / "a").read_bytes() == body("a")
    assert (volume / "out" / "b").read_bytes() == body("b")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("volumes", "folders", "files"), [(0o755, 0o755, 0o644), (0o777, 0o777, 0o666)])
async def test_what_is_made_may_be_changed_by_whoever_may_change_the_volume(
    volumes: int, folders: int, files: int, store: FakeStore, volume: Path
) -> None:
    (volume / "out" / "before").mkdir(parents=True, mode=0o700)
    for folder in (volume / ".", volume / "out"):
        folder.chmod(volumes)
    await store_snapshot(store, 1, {"out/a/b/file": b"1", "out/file": b"1", "out/before/file": b"1"})
    await run(store, volume)
    assert [mode(volume / "out" / path) for path in ("a", "a/b")] == [folders, folders]
    assert [mode(volume / "out" / path) for path in ("a/b/file", "file")] == [files, files]
    # The folder of another process stays as it is.
    assert [mode(volume / "out" / path) for path in ("before", "before/file")] == [0o700, 0o644]


@pytest.fixture
def other_filesystem(volume: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == volume.stat().st_dev:
        pytest.skip("no second filesystem")
    with TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


async def test_a_directory_on_another_filesystem_gets_copies(
    store: FakeStore, volume: Path, other_filesystem: Path
) -> None:
    out = other_filesystem / "deep" / "out"
    stored = await store_snapshot(store, 1, {"out/a/b": body("b"), "out/c": b""}, links={"out/d": "c"})
    await run(store, volume, out)
    assert [(out / path).read_bytes() for path in ("a/b", "c", "d")] == [body("b"), b"", b""]
    assert (out / "a" / "b").stat().st_mtime_ns == stored.entries["out/a/b"].modified_ns
    assert {path.name for path in out.rglob("*")} == {"a", "b", "c", "d"}
    assert not list((volume / ".keepstep" / "incoming").iterdir())
    held = read_base(volume, volume / "state").files["out/a/b"].fingerprint
    assert held.inode == (out / "a" / "b").stat().st_ino


async def test_a_copy_that_does_not_fit_leaves_nothing_half_written(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_snapshot(store, 1, {"out/a": body("a")})
    rename = Folder.rename

    def elsewhere(folder: Folder, path: str, to: Folder, to_path: str) -> None:
        if path == "a":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(folder, path, to, to_path)

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Folder, "rename", elsewhere)
    with monkeypatch.context() as patched:
        patched.setattr(os, "sendfile", full)
        with pytest.raises(VolumeError) as caught:
            await run(store, volume)
    assert caught.value.kind is ErrorKind.DISK_FULL
    assert not list((volume / "out").iterdir())
    (volume / "out" / ".keepstep-partial").write_bytes(b"of a restore that was killed")
    await run(store, volume)
    assert {path.name: path.read_bytes() for path in (volume / "out").iterdir()} == {"a": body("a")}


async def test_every_folder_is_on_disk_before_the_base_says_that_it_holds_the_snapshot(
    store: FakeStore, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_snapshot(store, 1, {"out/a/b/file": b"1", "out/c/file": b"1"}, links={"out/d/link": "x"})
    synced: list[str] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    await run(store, volume)
    base = next(position for position, path in enumerate(synced) if "mirror.json" in path)
    last_file = max(position for position, path in enumerate(synced) if "/incoming/" in path)
    folders = {str(volume / path).rstrip("/") for path in ("out", "out/a", "out/a/b", "out/c", "out/d")}
    assert folders | {str(volume)} <= set(synced[last_file:base])


async def snapshot_at(settings: StoreSettings, **files: bytes) -> None:
    async with open_store(settings) as store:
        await store.probe()
        await store_snapshot(store, 1_795_464_900, {f"checkpoints/{name}": content for name, content in files.items()})


async def test_the_command_restores_snapshots_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    settings = StoreSettings(destination=f"file://{tmp_path}/bucket")
    volume = tmp_path / "volume"
    await snapshot_at(settings, ckpt=bytes(2048), log=b"")
    place = volume / "checkpoints"
    completed = keepstep("restore", settings.destination, "--volume", volume)
    assert completed.stdout == f"snapshot of 2026-11-23 20:15 UTC (2 files, 2.0 KiB) restored to {place}\n"
    assert (place / "ckpt").read_bytes() == bytes(2048)
    completed = keepstep("restore", settings.destination, "--volume", volume)
    assert completed.stdout == f"{place} is left alone: it has this run's newer files\n"
    completed = keepstep("restore", settings.destination, "--volume", volume, "--json")
    assert '"left": [' in completed.stdout
    completed = keepstep("restore", settings.destination, "--volume", tmp_path / "other", "--node-rank", 1)
    assert completed.stdout.startswith("snapshot of node-0 of 2026-11-23 20:15 UTC")
    out = tmp_path / "elsewhere" / "out"
    completed = keepstep("restore", settings.destination, "--volume", tmp_path / "third", "--watch", out)
    assert "warning: the snapshot has files of checkpoints, which is not watched" in completed.stderr
    assert completed.returncode == 0
