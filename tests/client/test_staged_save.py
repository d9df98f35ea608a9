"""A save gets its place whatever lies there, and removes nothing that it did not write."""

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep import operating_system
from keepstep.checkpoints import staged_save
from keepstep.checkpoints.local_checkpoints import LocalCheckpoints
from keepstep.checkpoints.records import Kind, Record, read_records
from keepstep.checkpoints.staged_save import StagedSave, files_below


class Volume:
    """A volume whose frameworks save below `out`. `numbers` make save ids and times."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "out"
        self._numbers = iter(range(1, 100))
        self.local = LocalCheckpoints(
            volume=root,
            directory=root / "checkpoints",
            run_directory=root / "checkpoints",
            records=root / ".keepstep" / "records",
            saving=root / ".keepstep" / "saving",
            nonce="nonce",
        )

    def written(self, path: Path, **contents: str) -> tuple[StagedSave, Record]:
        """Return a save of `path`, a folder with these files or one file called `file`, that is written and durable."""
        number = next(self._numbers)
        save = self.local.staged(f"save-{number}", path, by_framework=True)
        save.make()
        for name, content in contents.items():
            place = save.written if name == "file" else save.written / name.replace("__", "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
        record = Record(
            name=path.name,
            step=number,
            save=f"save-{number}",
            kind=Kind.PERIODIC,
            world_size=1,
            saved_at=float(number),
            files=save.sync(),
            directory=self.local.directory_of(path),
        )
        return save, record

    def save(self, path: Path, **contents: str) -> None:
        save, record = self.written(path, **contents)
        assert save.put_in_place(record, self.local.records) is not None

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, the newest first."""
        return [record.step for record in self.local.whole(by_framework=True)]


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path / "volume")


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in sorted(files_below(folder))}


@pytest.mark.parametrize("exchanges", [True, False])
def test_files_of_other_names_stay_in_a_folder_that_is_saved_to(
    volume: Volume, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(operating_system, "exchange", lambda *_: False)
    place = volume.out / "step"
    (place / "below").mkdir(parents=True)
    (place / "empty").mkdir()
    (place / "below" / "note").write_text("the program's")
    with (place / "train.log").open("a") as log:
        volume.save(place, weights="1", below__part="1")
        volume.save(place, weights="2", below__part="2")
        log.write("a line")
    expected = {"weights": "2", "below/part": "2", "below/note": "the program's", "train.log": "a line"}
    assert contents(place) == expected
    assert (place / "empty").is_dir()
    assert volume.steps() == [2]


def test_a_folder_with_the_same_files_is_exchanged_in_one_step(volume: Volume) -> None:
    place = volume.out / "last"
    volume.save(place, weights="1", optimizer="1")
    before = place.stat().st_ino
    volume.save(place, weights="2", optimizer="2")
    assert place.stat().st_ino != before
    assert contents(place) == {"weights": "2", "optimizer": "2"}


def test_a_folder_of_other_rights_or_in_which_the_program_is_stays_the_same_folder(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = volume.out / "last"
    volume.save(place, weights="1")
    place.chmod(0o2770)
    before = place.stat()
    volume.save(place, weights="2")
    assert (place.stat().st_ino, place.stat().st_mode) == (before.st_ino, before.st_mode)
    monkeypatch.chdir(place)
    volume.save(place, weights="3")
    assert Path("weights").read_text() == "3"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_file_keeps_its_mode_and_a_link_leads_to_what_is_saved(
    volume: Volume, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(operating_system, "exchange", lambda *_: False)
    place = volume.out / "last"
    volume.save(place, weights="1")
    (place / "weights").chmod(0o600)
    volume.save(place, weights="2")
    assert stat.S_IMODE((place / "weights").stat().st_mode) == 0o600
    (place / "weights").rename(volume.out / "elsewhere")
    (place / "weights").symlink_to("../elsewhere")
    volume.save(place, weights="3")
    assert (place / "weights").is_symlink()
    assert (volume.out / "elsewhere").read_text() == "3"


def test_a_file_that_is_added_while_the_folders_are_exchanged_comes_along(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = volume.out / "last"
    volume.save(place, weights="1")
    exchange = operating_system.exchange

    def add_and_exchange(one: Path, other: Path) -> bool:
        (place / "note").write_text("just now")
        return exchange(one, other)

    monkeypatch.setattr(operating_system, "exchange", add_and_exchange)
    volume.save(place, weights="2")
    assert contents(place) == {"weights": "2", "note": "just now"}


def test_a_place_that_is_a_link_is_saved_to_where_it_leads(volume: Volume) -> None:
    volume.save(volume.out / "step-1", weights="1")
    (volume.out / "last").symlink_to("step-1")
    volume.save(volume.out / "last", weights="2")
    assert (volume.out / "last").is_symlink()
    assert contents(volume.out / "step-1") == {"weights": "2"}


@pytest.mark.parametrize("kind", ["a file in the place of a folder", "a folder in the place of a file"])
def test_what_is_of_another_kind_stays_and_the_save_fails_as_its_framework_would(volume: Volume, kind: str) -> None:
    place = volume.out / "last"
    if kind == "a file in the place of a folder":
        place.parent.mkdir(parents=True)
        place.write_text("the program's")
        save, record = volume.written(place, weights="1")
    else:
        place.mkdir(parents=True)
        (place / "note").write_text("the program's")
        save, record = volume.written(place, file="1")
    with pytest.raises(OSError, match="directory"):
        save.put_in_place(record, volume.local.records)
    assert (place if place.is_file() else place / "note").read_text() == "the program's"


def test_a_place_on_another_mount_gets_a_copy(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def refuse_to_cross(path: Path, target: Path) -> Path:
        if ".keepstep" in path.parts and ".keepstep" not in target.parts:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse_to_cross)
    volume.save(volume.out / "last", weights="1")
    volume.save(volume.out / "last.ckpt", file="2")
    assert contents(volume.out) == {"last/weights": "1", "last.ckpt": "2"}


def failing(volume: Volume, path: Path, monkeypatch: pytest.MonkeyPatch, **contents: str) -> None:
    """Save, where the files cannot be moved."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no move")

    save, record = volume.written(path, **contents)
    with monkeypatch.context() as patch:
        patch.setattr(staged_save, "_put", fail)
        with pytest.raises(OSError, match="no move"):
            save.put_in_place(record, volume.local.records)


def test_a_save_that_cannot_be_moved_gets_its_place_at_the_next_start(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(volume, volume.out / "last", monkeypatch, weights="1")
    assert volume.steps() == []
    volume.local.clean_up()
    assert volume.steps() == [1]
    assert not list((volume.root / ".keepstep" / "saving").iterdir())


@pytest.mark.parametrize("newer", ["a save", "the program"])
def test_a_save_that_could_not_be_moved_replaces_nothing_newer(
    volume: Volume, newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = volume.out / "last.ckpt"
    failing(volume, place, monkeypatch, file="1")
    if newer == "a save":
        volume.save(place, file="2")
    else:
        place.write_text("2")
        os.utime(place, (2**33, 2**33))
    volume.local.clean_up()
    assert place.read_text() == "2"
    assert volume.steps() == ([2] if newer == "a save" else [])


def test_a_save_whose_note_cannot_be_read_is_left_alone(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(volume, volume.out / "last", monkeypatch, weights="1")
    (folder,) = (volume.root / ".keepstep" / "saving").iterdir()
    (folder / ".complete").write_text("{")
    volume.local.clean_up()
    assert contents(folder / "last") == {"weights": "1"}
    assert "left alone" in caplog.text


def test_a_checkpoint_of_the_same_name_in_another_folder_keeps_its_record(volume: Volume) -> None:
    volume.save(volume.out / "a" / "last.ckpt", file="1")
    save, _ = volume.written(volume.out / "b" / "last.ckpt", file="2")
    save.put_in_place(None, volume.local.records)
    assert volume.steps() == [1]


def test_what_was_restored_keeps_the_files_that_a_save_lacks(volume: Volume) -> None:
    place = volume.root / "checkpoints" / "last"
    volume.save(place, weights="1", args="the program's")
    (record,) = read_records(volume.local.records)
    (volume.local.records / "last.json").write_bytes(
        Record(
            name="last",
            step=1,
            save="save-1",
            kind=Kind.PERIODIC,
            world_size=1,
            saved_at=1.0,
            files=record.files,
            committed=True,
        ).encode()
    )
    volume.save(place, weights="2")
    assert contents(place) == {"weights": "2", "args": "the program's"}


def test_what_lies_beside_a_checkpoint_follows_it(volume: Volume) -> None:
    save, _ = volume.written(volume.out / "step-1", weights="1")
    (save.folder / "latest").write_text("step-1")
    record = Record(
        name="step-1",
        step=1,
        save="save-1",
        kind=Kind.PERIODIC,
        world_size=1,
        saved_at=1.0,
        files=save.sync(),
        directory="out",
    )
    save.put_in_place(record, volume.local.records)
    assert contents(volume.out) == {"step-1/weights": "1", "latest": "step-1"}
    assert volume.steps() == [1]


def test_the_programs_files_belong_to_a_checkpoint_and_other_checkpoints_do_not(volume: Volume) -> None:
    volume.save(volume.out / "step-1", weights="1")
    volume.save(volume.out, weights="2")
    (volume.out / "train.log").write_text("lines")
    newest = read_records(volume.local.records)[0]
    assert newest.name == "out"
    assert volume.local.others(newest) == ("train.log",)


def test_a_checkpoint_that_the_program_renames_is_found_under_its_new_name(volume: Volume) -> None:
    volume.save(volume.out / "tmp", weights="1")
    os.utime(volume.out / "tmp" / "weights", (0, 0))
    (volume.out / "tmp").rename(volume.out / "step-1")
    (record,) = volume.local.whole(by_framework=True)
    assert (record.name, record.step) == ("step-1", 1)
    assert [record.name for record in read_records(volume.local.records)] == ["step-1"]


def test_another_file_that_gets_the_number_of_a_deleted_one_is_not_taken_for_it(volume: Volume) -> None:
    volume.save(volume.out / "one.ckpt", file="1")
    volume.save(volume.out / "two.ckpt", file="2")
    (deleted, kept) = reversed(read_records(volume.local.records))
    (volume.out / "one.ckpt").unlink()
    path = volume.local.records / "one.ckpt.json"
    path.write_bytes(replace(deleted, inode=kept.inode).encode())
    assert volume.steps() == [2]
    assert [record.name for record in read_records(volume.local.records)] == ["two.ckpt"]
