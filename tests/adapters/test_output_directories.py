"""Looking at output directories, and pinning what a look has shown."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.mirror.output_scan import OutputScan
from keepstep_agent.core.model import PinMethod, SourceFile
from keepstep_agent.ports import StagedDescriptor, StageRequest


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    (folder / "out/step-1").mkdir(parents=True)
    (folder / "out/step-1/model").write_bytes(b"model")
    (folder / "out/train.log").write_bytes(b"log")
    return folder


def look(volume: Path, *directories: Path, left_out: frozenset[str] = frozenset()) -> OutputScan:
    return OutputDirectories(volume, [str(one) for one in directories or (volume / "out",)]).scan(left_out, {})


def stage(
    volume: Path,
    method: PinMethod,
    *paths: str,
    scan: OutputScan | None = None,
    groups: Mapping[str, int] | None = None,
) -> StagedFiles:
    found = (scan or look(volume)).files
    request = StageRequest(
        save="save",
        rank=0,
        path=str(volume / "out"),
        files=(),
        private=False,
        descriptor=StagedDescriptor(announcements=()),
        sources=tuple(
            SourceFile(path=path, fingerprint=found[path], method=method, group=(groups or {}).get(path))
            for path in paths
        ),
    )
    return LocalStagingArea(volume, [str(volume / "out")]).stage(request)


def test_a_look_shows_every_file_and_link_by_the_name_of_its_directory(volume: Path, tmp_path: Path) -> None:
    (volume / "out/latest").symlink_to("step-1")
    other = tmp_path / "elsewhere/logs"
    other.mkdir(parents=True)
    (other / "a").write_text("a")
    os.mkfifo(volume / "out/fifo")
    found = look(volume, volume / "out", other)
    assert set(found.files) == {"out/step-1/model", "out/train.log", "logs/a"}
    assert found.links == {"out/latest": "step-1"}
    assert not found.missing
    assert not found.problems


def test_a_second_look_keeps_the_texts_of_the_first_and_all_of_it_if_nothing_changed(volume: Path) -> None:
    directories = OutputDirectories(volume, [str(volume / "out")])
    first = directories.scan((), {})
    assert directories.scan((), first.files).files is first.files
    (volume / "out/step-1/optimizer").write_bytes(b"optimizer")
    second = directories.scan((), first.files).files
    assert set(second) == {*first.files, "out/step-1/optimizer"}
    texts = {id(path) for path in first.files}
    assert [path for path in second if id(path) not in texts] == ["out/step-1/optimizer"]


def test_a_directory_that_is_not_there_yet_is_empty(volume: Path) -> None:
    found = look(volume, volume / "later")
    assert found.missing == {"later"}
    assert not found.files


def test_what_is_announced_and_keepsteps_own_folder_are_left_out(volume: Path) -> None:
    (volume / ".keepstep").mkdir()
    (volume / ".keepstep/journal").write_text("x")
    (volume / "out/.saving-checkpoint-2-abc").mkdir()
    (volume / "out/.saving-checkpoint-2-abc/model").write_text("half")
    assert set(look(volume, left_out=frozenset({"out/step-1"})).files) == {"out/train.log"}
    assert set(look(volume, left_out=frozenset({"out/step-1/model"})).files) == {"out/train.log"}
    assert set(look(volume, volume).files) == {"volume/out/step-1/model", "volume/out/train.log"}


def test_no_link_below_the_volume_is_followed(volume: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("key")
    (volume / "evil").symlink_to(secret)
    assert not look(volume, volume / "evil").files
    (volume / "out/evil").symlink_to(secret)
    assert "out/evil/key" not in look(volume).files


def test_a_look_that_shows_nothing_new_uses_the_fingerprints_of_the_last(volume: Path) -> None:
    directories = OutputDirectories(volume, [str(volume / "out")])
    first = directories.scan((), {})
    second = directories.scan((), first.files)
    assert second == first
    assert all(second.files[path] is first.files[path] for path in first.files)


@pytest.mark.parametrize("method", list(PinMethod))
def test_pins_keep_the_bytes_that_a_look_has_shown(volume: Path, method: PinMethod) -> None:
    staged = stage(volume, method, "out/step-1/model", "out/train.log")
    for path in ("step-1/model", "train.log"):
        (volume / "out" / path).unlink()
    assert [one.private for one in staged] == [method is not PinMethod.LINK] * 2
    assert [(volume / one.pin).read_bytes() for one in staged] == [b"model", b"log"]


@pytest.mark.parametrize("method", [PinMethod.LINK, PinMethod.COPY])
def test_a_file_that_changed_since_the_look_is_not_pinned(volume: Path, method: PinMethod) -> None:
    scan = look(volume)
    (volume / "out/step-1/model").write_bytes(b"other!")
    with pytest.raises(VolumeError) as raised:
        stage(volume, method, "out/step-1/model", scan=scan)
    assert raised.value.kind is ErrorKind.FILE_CHANGED
    assert not list((volume / ".keepstep/staged").iterdir())


def test_a_log_is_copied_as_it_is_though_it_grew_since_the_look(volume: Path) -> None:
    scan = look(volume)
    with (volume / "out/train.log").open("a") as log:
        log.write(" and more")
    (staged,) = stage(volume, PinMethod.COPY_AS_IS, "out/train.log", scan=scan)
    assert (volume / staged.pin).read_bytes() == b"log and more"


def test_a_file_that_is_gone_since_the_look_is_missing(volume: Path) -> None:
    scan = look(volume)
    (volume / "out/train.log").unlink()
    with pytest.raises(VolumeError) as raised:
        stage(volume, PinMethod.COPY_AS_IS, "out/train.log", scan=scan)
    assert raised.value.kind is ErrorKind.FILE_MISSING


def test_a_file_that_changed_since_the_look_costs_itself_and_its_group_alone(volume: Path) -> None:
    for name in ("a", "b", "c"):
        (volume / "out" / name).write_text(name)
    found = look(volume)
    (volume / "out/b").write_text("other")
    (volume / "out/train.log").unlink()
    groups = {"out/a": 1, "out/b": 1, "out/c": 2}
    for _ in range(2):
        staged = stage(volume, PinMethod.LINK, *groups, "out/train.log", scan=found, groups=groups)
        assert [file.path for file in staged] == ["out/c"]
    assert not (volume / ".keepstep/staged/save/rank-00000/out/a").exists()


def test_a_snapshot_that_only_leaves_files_out_pins_none(volume: Path) -> None:
    assert stage(volume, PinMethod.LINK) == ()


def test_what_the_program_has_replaced_does_not_count_as_unread(volume: Path) -> None:
    model = volume / "out/step-1/model"
    os.utime(model, ns=(10**18, 10**18))
    restored = {path: seen for path, seen in look(volume).files.items() if path == "out/step-1/model"}
    directories = OutputDirectories(volume, [str(volume / "out")])
    (volume / ".keepstep").mkdir()
    if not directories.unread(restored):
        pytest.skip("this filesystem does not keep the time of reads")
    (volume / "out/new").write_bytes(b"model")
    (volume / "out/new").rename(model)
    # A new file has one time for reads and writes, too.
    os.utime(model, ns=(2 * 10**18, 2 * 10**18))
    assert not directories.unread(restored)


def test_a_file_with_another_inode_is_settled_once_it_was_renamed(volume: Path) -> None:
    output = OutputDirectories(volume, [str(volume / "out")])
    before = output.scan((), {}).files
    model = volume / "out/step-1/model"
    model.write_bytes(b"written in place")
    assert not output.scan((), before).settled
    new = volume / "new"
    new.write_bytes(b"whole")
    os.utime(new, ns=(1, 1))
    new.rename(model)
    assert output.scan((), before).settled == {"out/step-1/model"}


def test_an_absolute_link_that_stays_inside_is_seen_as_a_relative_one(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to(volume)
    links = {
        "out/latest": volume / "out/step-1",
        "out/step-1/up": volume / "out/step-1/../train.log",
        "out/by-name": tmp_path / "name/out/step-1",
        "out/away": Path("/etc/passwd"),
        "out/beside": volume / "other",
    }
    for path, target in links.items():
        (volume / path).symlink_to(target)
    found = OutputDirectories(tmp_path / "name", [str(tmp_path / "name/out")]).scan((), {}).links
    assert found == {
        "out/latest": "step-1",
        "out/step-1/up": "../train.log",
        "out/by-name": "step-1",
        "out/away": "/etc/passwd",
        "out/beside": str(volume / "other"),
    }
