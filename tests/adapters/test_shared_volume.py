"""Paths of the volume lead where they are written, whatever the trainer puts in their way."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.deep_folders import LEVELS, deep_folders

from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume

ACTIONS: dict[str, Callable[[Folder, str], Any]] = {
    "open": lambda root, path: os.close(root.open_file(path)),
    "create": lambda root, path: os.close(root.open_file(path, os.O_WRONLY | os.O_CREAT)),
    "read": lambda root, path: root.read(path, 1000),
    "write": lambda root, path: root.write_durably(path, b"written"),
    "status": lambda root, path: root.status(path),
    "make": lambda root, path: root.make_folder(path).close(),
    "unlink": lambda root, path: root.unlink(path),
    "remove": lambda root, path: root.remove(path),
    "rename": lambda root, path: root.rename(path, root, "renamed"),
    "rename to": lambda root, path: root.rename("file", root, path),
}


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volume" / "a" / "b").mkdir(parents=True)
    (tmp_path / "volume" / "file").write_bytes(b"inside")
    return tmp_path / "volume"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside" / "b").mkdir(parents=True)
    (tmp_path / "outside" / "b" / "file").write_bytes(b"outside")
    return tmp_path / "outside"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("where", ["first", "middle"])
def test_no_call_goes_through_a_folder_that_is_a_link(volume: Path, outside: Path, action: str, where: str) -> None:
    before = tree(outside)
    if where == "first":
        (volume / "link").symlink_to(outside)
        path = "link/b/file"
    else:
        (volume / "a" / "link").symlink_to(outside / "b")
        path = "a/link/file"
    with open_volume(volume) as root, pytest.raises(OSError, match=os.strerror(errno.ENOTDIR)):
        ACTIONS[action](root, path)
    assert tree(outside) == before


@pytest.mark.parametrize("action", ["open", "create", "read"])
def test_a_file_that_is_a_link_is_not_opened(volume: Path, outside: Path, action: str) -> None:
    (volume / "link").symlink_to(outside / "b" / "file")
    with open_volume(volume) as root, pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        ACTIONS[action](root, "link")


def test_what_is_written_or_removed_in_the_place_of_a_link_is_the_link(volume: Path, outside: Path) -> None:
    before = tree(outside)
    with open_volume(volume) as root:
        for name in ("one", "two", "three.partial"):
            (volume / name).symlink_to(outside / "b" / "file")
        (volume / "folder").symlink_to(outside)
        root.write_durably("one", b"written")
        root.unlink("two")
        root.write_durably("three", b"written")
        root.remove("folder")
    assert (volume / "one").read_bytes() == b"written"
    assert not (volume / "one").is_symlink()
    assert not (volume / "two").is_symlink()
    assert not (volume / "folder").is_symlink()
    assert tree(outside) == before


def test_a_tree_with_links_in_it_is_removed_and_what_they_lead_to_stays(volume: Path, outside: Path) -> None:
    before = tree(outside)
    (volume / "a" / "b" / "link").symlink_to(outside)
    with open_volume(volume) as root:
        root.remove("a")
        root.remove("a")
    assert not (volume / "a").exists()
    assert tree(outside) == before


@pytest.fixture
def _few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_descriptors")
@pytest.mark.parametrize("path", ["deep", "deep/d/d"])
def test_a_tree_of_any_depth_is_removed_with_few_descriptors(volume: Path, path: str) -> None:
    with deep_folders(volume / "deep"), open_volume(volume) as root:
        root.remove(path)
        assert not (volume / path).exists()


def test_a_tree_that_is_deep_and_wide_is_removed(volume: Path, outside: Path) -> None:
    before = tree(outside)
    deep = volume / "deep" / "/".join(["d"] * 100)
    deep.mkdir(parents=True)
    for folder in (deep, *deep.parents[:40]):
        (folder / "side" / "below").mkdir(parents=True)
        (folder / "side" / "link").symlink_to(outside)
        (folder / "empty").mkdir(mode=0o500)
    with open_volume(volume) as root:
        root.remove("deep")
    assert not (volume / "deep").exists()
    assert tree(outside) == before


def test_a_removal_of_folders_that_somebody_keeps_making_ends(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep_agent.adapters.volume.shared_volume._MOST_MOVES", LEVELS // 65 - 1)
    with deep_folders(volume / "deep"), open_volume(volume) as root:
        with pytest.raises(OSError, match="levels deep"):
            root.remove("deep")
        root.remove("deep")
        assert not (volume / "deep").exists()


@pytest.mark.parametrize(
    "path", ["..", "../outside/b/file", "a/../../outside", "/etc/passwd", "a//b", ".", "a/.", "a\0b"]
)
def test_a_path_only_goes_down(volume: Path, outside: Path, path: str) -> None:
    with open_volume(volume) as root:
        for action in ACTIONS.values():
            with pytest.raises(OSError, match="plain relative path"):
                action(root, path)


def test_what_is_no_regular_file_is_refused_and_hangs_nobody(volume: Path) -> None:
    os.mkfifo(volume / "fifo")
    with open_volume(volume) as root:
        for name in ("fifo", "a"):
            with pytest.raises(OSError, match="not a regular file"):
                root.read(name, 1000)


def test_a_file_that_is_larger_than_its_limit_is_not_read(volume: Path) -> None:
    with open_volume(volume) as root:
        assert root.read("file", 6) == b"inside"
        with pytest.raises(OSError, match="more than 5 bytes"):
            root.read("file", 5)


def test_a_link_to_an_open_file_is_to_that_very_file(volume: Path) -> None:
    with open_volume(volume) as root, root.opened_file("file") as descriptor:
        (volume / "file").rename(volume / "moved")
        (volume / "file").write_bytes(b"another")
        root.link_open_file(descriptor, "a/pin")
    assert (volume / "a" / "pin").samefile(volume / "moved")


def test_a_walk_sees_links_as_entries_and_stops_at_a_depth(volume: Path, outside: Path) -> None:
    (volume / "a" / "link").symlink_to(outside)
    with open_volume(volume) as root:
        seen = [prefix + entry.name for prefix, _, entries in root.walk() for entry in entries]
    assert seen == ["a", "file", "a/b", "a/link"]
    deep = volume / "/".join(["d"] * 70)
    deep.mkdir(parents=True)
    with open_volume(volume) as root:
        failed: list[str] = []
        walked = [prefix for prefix, _, _ in root.walk(lambda path, error: failed.append(path))]
        assert max(prefix.count("d/") for prefix in walked) == 63
        assert [prefix.count("d/") for prefix in failed] == [64]
        with pytest.raises(OSError, match="nested folders"):
            list(root.walk())


def test_nothing_is_left_open(volume: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with open_volume(volume) as root:
        list(root.walk())
        for action in ACTIONS.values():
            for path in ("a/b/missing", "missing/b", "a/b"):
                try:
                    action(root, path)
                except OSError:
                    continue
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def mounted(volume: Path) -> Iterator[Path]:
    """A folder of the volume that is another filesystem."""
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", volume / "a"], capture_output=True).returncode:
        pytest.skip("mounting another filesystem needs root")
    (volume / "a" / "file").write_bytes(b"elsewhere")
    yield volume / "a"
    subprocess.run(["umount", volume / "a"], check=True)


@pytest.mark.root
def test_another_filesystem_is_not_entered(volume: Path, mounted: Path) -> None:
    with open_volume(volume) as root:
        with pytest.raises(OSError, match="another filesystem"):
            root.read("a/file", 1000)
        with pytest.raises(OSError, match="another filesystem"):
            root.make_folder("a/c")


def mount(*arguments: object) -> None:
    if subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode:
        pytest.skip(f"mount {arguments[0]} needs root")


@pytest.mark.root
def test_a_file_of_another_filesystem_is_not_opened(volume: Path, mounted: Path) -> None:
    mount("--bind", mounted / "file", volume / "file")
    try:
        with open_volume(volume) as root:
            assert root.status("file").st_dev != os.fstat(root.descriptor).st_dev
            for flags in (os.O_RDONLY, os.O_WRONLY):
                with pytest.raises(OSError, match="another filesystem"):
                    root.open_file("file", flags)
    finally:
        subprocess.run(["umount", "--lazy", volume / "file"], check=True)
    with open_volume(volume) as root:
        assert root.read("file", 1000) == b"inside"


@pytest.mark.root
def test_files_of_an_overlay_are_the_volumes_own_whatever_device_they_name(volume: Path, mounted: Path) -> None:
    """As in a container whose image lies on another filesystem than what it writes."""
    for name in ("upper", "work", "merged"):
        (volume / name).mkdir()
    layers = f"lowerdir={mounted},upperdir={volume / 'upper'},workdir={volume / 'work'},xino=off"
    mount("-t", "overlay", "overlay", "-o", layers, volume / "merged")
    try:
        with open_volume(volume / "merged") as root:
            root.write_durably("new", b"written")
            assert root.status("new").st_dev != os.fstat(root.descriptor).st_dev
            assert (root.read("new", 1000), root.read("file", 1000)) == (b"written", b"elsewhere")
    finally:
        subprocess.run(["umount", "--lazy", volume / "merged"], check=True)


@pytest.mark.root
def test_a_removal_leaves_what_is_on_another_filesystem(volume: Path, mounted: Path) -> None:
    with open_volume(volume) as root, pytest.raises(OSError, match="another filesystem"):
        root.remove("a")
    assert (mounted / "file").read_bytes() == b"elsewhere"


def test_a_folder_that_somebody_keeps_removing_is_made_all_the_same(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = iter(range(3))
    mkdir = os.mkdir

    def removed_at_once(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if name == "x" and next(removals, None) is not None:
            shutil.rmtree(volume / "x")

    monkeypatch.setattr(os, "mkdir", removed_at_once)
    with open_volume(volume) as root:
        root.make_folder("x/y").close()
    assert (volume / "x" / "y").is_dir()
