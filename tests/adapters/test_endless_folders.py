"""A folder that never ends, or that grows as it is walked: every walk has an end, and says what it left out."""

import os
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

    def listed(folder: shared_volume.Folder) -> "list[os.DirEntry[str]]":
        found = entries(folder)
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
