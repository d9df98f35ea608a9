"""A folder that never ends, or that grows as it is walked: every walk has an end, and says what it left out."""

import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.endless_folder import endless_folder

from keepstep_agent.adapters.output.directory_hints import DirectoryHints
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.volume import announced_files, shared_volume
from keepstep_agent.adapters.volume.announced_files import resolve_files
from keepstep_agent.adapters.volume.disk import VolumeMeter
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.limits import FOLDER_ENTRIES

MOST = 1_000


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Path]:
    with endless_folder(tmp_path / "endless") as folder:
        yield folder


def test_a_listing_that_never_ends_is_cut_off(endless: Path) -> None:
    with (
        shared_volume.open_volume(endless) as root,
        pytest.raises(OSError, match=f"more than {FOLDER_ENTRIES:,} files"),
    ):
        root.entries()


def test_an_announcement_of_a_folder_that_never_ends_is_refused_by_its_name(endless: Path) -> None:
    with pytest.raises(KeepstepError, match=f"cannot read {endless}: more than") as caught:
        resolve_files(endless, str(endless), ())
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.hint


def test_an_output_directory_that_never_ends_is_named_and_costs_no_other(endless: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    (good / "model").write_bytes(b"1")
    volume = tmp_path / "volume"
    volume.mkdir()
    scan = OutputDirectories(volume, [str(endless), str(good)]).scan((), {})
    assert scan.files.keys() == {"good/model"}
    assert scan.problems == {"endless": f"it cannot be read: more than {FOLDER_ENTRIES:,} files in one folder"}


def test_the_meter_and_the_hints_end_too(endless: Path) -> None:
    assert VolumeMeter(endless).measure().free_bytes
    hints = DirectoryHints(endless, lambda: None, ignored=lambda path: False)
    hints.follow()
    hints.close()


def grow(folder: shared_volume.Folder, entries: "list[os.DirEntry[str]]") -> None:
    """Make two folders in each folder that the walk has not come to yet."""
    for entry in entries:
        for name in ("a", "b"):
            os.mkdir(f"{entry.name}/{name}", dir_fd=folder.descriptor)


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree that gets deeper in front of whoever lists it."""
    entries = shared_volume.Folder.entries

    def listed(folder: shared_volume.Folder, most_bytes: int) -> "list[os.DirEntry[str]]":
        found = entries(folder, most_bytes)
        grow(folder, found)
        return found

    monkeypatch.setattr(shared_volume.Folder, "entries", listed)
    monkeypatch.setattr(shared_volume, "WALKED_ENTRIES", MOST)
    (tmp_path / "tree/a").mkdir(parents=True)
    return tmp_path / "tree"


def test_a_tree_that_grows_as_it_is_walked_has_an_end(growing: Path) -> None:
    failed: dict[str, str] = {}
    with shared_volume.open_volume(growing) as root:
        walked = list(root.walk(lambda prefix, error: failed.update({prefix: str(error.strerror)})))
    assert len(walked) <= MOST
    assert failed[""] == f"more than {MOST:,} files and folders"


def test_an_announcement_of_a_tree_that_grows_is_refused(growing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before it is too deep.
    monkeypatch.setattr(announced_files, "WALKED_ENTRIES", 100)
    with pytest.raises(KeepstepError, match="more than 100 files and folders"):
        resolve_files(growing, str(growing), ())


WIDE = "\U0001f680" + "x" * 200
"""With one such character, Python takes four bytes for each."""


def test_names_that_take_much_memory_end_a_listing_before_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{WIDE}{number}" for number in range(20)]
    for name in names:
        (tmp_path / "deep" / name).mkdir(parents=True)
    (tmp_path / "deep" / names[0] / "file").touch()
    failed: dict[str, str] = {}
    # Enough for the folders, and for nothing below them.
    monkeypatch.setattr(shared_volume, "LISTED_NAMES_BYTES", sum(map(sys.getsizeof, ["deep", *names])))
    with shared_volume.open_volume(tmp_path) as root:
        list(root.walk(lambda prefix, error: failed.update({prefix: str(error.strerror)})))
    assert failed == {f"deep/{names[0]}/": "the names of 1 files are too long to be listed"}


@pytest.mark.parametrize("named", [True, False])
def test_an_announcement_with_paths_that_take_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    for number in range(20):
        (tmp_path / f"{WIDE}{number}").touch()
    files = [f"{WIDE}{number}" for number in range(20)] if named else []
    assert len(resolve_files(tmp_path, str(tmp_path), files)) == 20
    monkeypatch.setattr(announced_files, "LISTED_NAMES_BYTES", 10 * sys.getsizeof(WIDE))
    with pytest.raises(KeepstepError, match="too long") as caught:
        resolve_files(tmp_path, str(tmp_path), files)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert "shorter names" in caught.value.hint


def test_links_to_folders_count_with_the_paths_that_they_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / WIDE / WIDE).mkdir(parents=True)
    (tmp_path / WIDE / WIDE / "file").touch()
    (tmp_path / "checkpoint").mkdir()
    for number in range(20):
        (tmp_path / "checkpoint" / f"{number}").symlink_to(f"../{WIDE}/{WIDE}")
    assert len(resolve_files(tmp_path, str(tmp_path / "checkpoint"), ())) == 20
    monkeypatch.setattr(announced_files, "LISTED_NAMES_BYTES", 20 * sys.getsizeof(f"{WIDE}/{WIDE}"))
    with pytest.raises(KeepstepError, match="links are too long"):
        resolve_files(tmp_path, str(tmp_path / "checkpoint"), ())


def test_a_link_to_the_volume_itself_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "link").symlink_to("..")
    with pytest.raises(KeepstepError, match="the directory that contains it"):
        resolve_files(tmp_path, str(tmp_path / "checkpoint"), ())


def test_the_paths_of_folders_that_wait_their_turn_are_not_kept(tmp_path: Path) -> None:
    """A folder's path has no limit but that of its levels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for _ in range(20):
            Path(WIDE).mkdir()
            patch.chdir(WIDE)
        for number in range(1_000):
            Path(f"{number}").mkdir()
    tracemalloc.start()
    try:
        with pytest.raises(KeepstepError, match="has no files"):
            resolve_files(tmp_path, str(tmp_path), ())
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_link_into_a_folder_whose_name_is_not_utf_8_is_followed(tmp_path: Path) -> None:
    strange = tmp_path / os.fsdecode(b"\xff")
    strange.mkdir()
    (strange / "model").write_bytes(b"weights")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model").symlink_to(os.fsdecode(b"../\xff/model"))
    found = resolve_files(tmp_path, str(tmp_path / "checkpoint"), ())
    assert list(found.sources) == [os.fsdecode(b"\xff/model")]


def test_files_that_lie_elsewhere_count_with_both_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint").mkdir()
    for number in range(20):
        (tmp_path / f"{number}").touch()
        (tmp_path / "checkpoint" / f"{WIDE}{number}").symlink_to(f"../{number}")
    found = resolve_files(tmp_path, str(tmp_path / "checkpoint"), ())
    assert sorted(found.sources) == sorted(map(str, range(20)))
    monkeypatch.setattr(announced_files, "LISTED_NAMES_BYTES", 20 * sys.getsizeof(f"{WIDE}00"))
    with pytest.raises(KeepstepError, match="too long"):
        resolve_files(tmp_path, str(tmp_path / "checkpoint"), ())
