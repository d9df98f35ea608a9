"""What is pinned outlives the trainer's copy, is what was announced, and never comes from outside the volume."""

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import pytest
from structlog.testing import capture_logs

from mooring_agent.adapters.volume import announced_files, pinning, staging_area
from mooring_agent.adapters.volume.content_check import content_signature
from mooring_agent.adapters.volume.staging_area import LocalStagingArea
from mooring_agent.core.errors import ErrorKind, MooringError, RequestError, VolumeError
from mooring_agent.core.limits import ANNOUNCEMENT_CHARACTERS, DESCRIPTOR_BYTES, FILES_PER_RANK, LOCAL_RANKS, SAVE_BYTES
from mooring_agent.core.model import StagedFile
from mooring_agent.ports import StagedDescriptor, StageRequest

DESCRIPTOR = StagedDescriptor(announcements=("täst" * 20,), part_size_bytes=7)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    volume = tmp_path / "volume"
    volume.mkdir()
    return volume


@pytest.fixture
def area(volume: Path) -> LocalStagingArea:
    return LocalStagingArea(volume)


@pytest.fixture
def checkpoint(volume: Path) -> Path:
    folder = volume / "checkpoints" / "checkpoint-1"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights.pt").write_bytes(b"weights" * 1000)
    (folder / "state.json").write_bytes(b"{}")
    (folder / "empty").write_bytes(b"")
    return folder


def _request(source: Path, *files: str, save: str = "save-1", rank: int = 3, private: bool = False) -> StageRequest:
    return StageRequest(save=save, rank=rank, path=str(source), files=files, private=private, descriptor=DESCRIPTOR)


def _staged_names(volume: Path) -> list[str]:
    staged = volume / ".mooring" / "staged"
    return sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*")) if staged.exists() else []


def _refusal(area: LocalStagingArea, request: StageRequest) -> MooringError:
    with pytest.raises(MooringError) as caught:
        area.stage(request)
    assert caught.value.hint
    return caught.value


def _contents(volume: Path, files: tuple[StagedFile, ...]) -> dict[str, bytes]:
    return {file.path: (volume / file.pin).read_bytes() for file in files}


def test_a_directory_is_pinned_by_hard_links_that_outlive_it(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    inode = (checkpoint / "state.json").stat().st_ino
    files = area.stage(_request(checkpoint))
    for path in sorted(checkpoint.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert _contents(volume, files) == {"empty": b"", "model/weights.pt": b"weights" * 1000, "state.json": b"{}"}
    assert [file.path for file in files] == ["empty", "model/weights.pt", "state.json"]
    assert files[2].pin == ".mooring/staged/save-1/rank-00003/state.json"
    assert files[2].fingerprint.inode == inode
    assert not any(file.private for file in files)
    area.check("save-1", 3, files)


def test_a_single_file_goes_by_its_own_name(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(_request(checkpoint / "model" / "weights.pt"))
    assert _contents(volume, files) == {"weights.pt": b"weights" * 1000}


def test_it_is_known_of_a_file_whether_it_was_announced_itself_also_when_the_journal_is_lost(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    (volume / "last.ckpt").mkdir()
    (volume / "last.ckpt" / "last.ckpt").write_bytes(b"in a folder of its name")
    (volume / "link.ckpt").symlink_to(checkpoint / "model" / "weights.pt")
    area.stage(_request(volume / "last.ckpt", save="folder"))
    area.stage(_request(volume / "last.ckpt" / "last.ckpt", save="file"))
    area.stage(_request(volume / "link.ckpt", save="link"))
    found = {files[0].pin.split("/")[2]: files[0].announced for _, files in LocalStagingArea(volume).scan()}
    assert found == {"folder": False, "file": True, "link": True}


def test_only_the_named_files_are_pinned(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(_request(checkpoint, "state.json", "model/weights.pt", "state.json"))
    assert [file.path for file in files] == ["model/weights.pt", "state.json"]


def test_a_private_stage_is_not_touched_by_rewriting_in_place(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    files = area.stage(_request(checkpoint, private=True))
    with (checkpoint / "model" / "weights.pt").open("r+b") as weights:
        weights.write(b"REWRITTEN")
    assert _contents(volume, files)["model/weights.pt"] == b"weights" * 1000
    assert all(file.private for file in files)
    area.check("save-1", 3, files)


def test_only_a_file_that_was_rewritten_in_place_is_copied(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    inode = (checkpoint / "model" / "weights.pt").stat().st_ino
    files = area.stage(replace(_request(checkpoint), rewritten_inodes=frozenset({inode})))
    assert {file.path: file.private for file in files} == {
        "empty": False,
        "model/weights.pt": True,
        "state.json": False,
    }
    with (checkpoint / "model" / "weights.pt").open("r+b") as weights:
        weights.write(b"REWRITTEN")
    assert _contents(volume, files)["model/weights.pt"] == b"weights" * 1000
    area.check("save-1", 3, files)


def test_what_is_not_the_content_that_was_meant_is_refused_and_leaves_nothing(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    signature = content_signature(volume, str(checkpoint))
    assert area.stage(replace(_request(checkpoint, save="meant"), signatures=frozenset({signature})))
    (checkpoint / "state.json").write_bytes(b"{1")
    error = _refusal(area, replace(_request(checkpoint), signatures=frozenset({signature})))
    assert error.kind is ErrorKind.FILE_CHANGED
    assert not any(name.startswith("save-1") for name in _staged_names(volume))


def test_of_files_that_are_named_one_by_one_others_may_change(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    files = ("model/weights.pt",)
    signatures = frozenset({content_signature(volume, str(checkpoint), files)})
    (checkpoint / "train.log").write_bytes(b"a line more")
    assert area.stage(replace(_request(checkpoint, save="meant"), files=files, signatures=signatures))
    (checkpoint / "model" / "weights.pt").write_bytes(b"other")
    assert _refusal(area, replace(_request(checkpoint), files=files, signatures=signatures)).kind is (
        ErrorKind.FILE_CHANGED
    )


def test_a_write_right_after_staging_is_never_in_the_same_tick_of_the_clock(
    area: LocalStagingArea, checkpoint: Path
) -> None:
    weights = checkpoint / "model" / "weights.pt"
    content = weights.read_bytes()
    for number in range(20):
        weights.write_bytes(content)
        files = area.stage(_request(checkpoint, save=f"save-{number}"))
        with weights.open("r+b") as file:
            file.write(b"REWRITTEN")
        with pytest.raises(VolumeError):
            area.check(f"save-{number}", 3, files)


def test_rewriting_in_place_is_found_out(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(_request(checkpoint))
    with (checkpoint / "model" / "weights.pt").open("ab") as weights:
        weights.write(b"more")
    with pytest.raises(VolumeError, match="weights") as caught:
        area.check("save-1", 3, files)
    assert caught.value.kind is ErrorKind.FILE_CHANGED
    # Trainers are told it, and one could write into a descriptor what the file was found to be.
    said = f"{caught.value} {caught.value.hint}".replace(str(volume), "")
    found = (checkpoint / "model" / "weights.pt").stat()
    assert not any(str(number) in said for number in (found.st_size, found.st_ino, found.st_mtime_ns))


def test_a_vanished_pin_is_found_out(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(_request(checkpoint))
    (volume / files[0].pin).unlink()
    with pytest.raises(VolumeError) as caught:
        area.check("save-1", 3, files)
    assert caught.value.kind is ErrorKind.FILE_MISSING


def test_staging_again_gives_the_first_answer_though_the_source_is_gone(
    area: LocalStagingArea, checkpoint: Path
) -> None:
    files = area.stage(_request(checkpoint))
    checkpoint.rename(checkpoint.with_name("rotated"))
    assert area.stage(_request(checkpoint)) == files


def test_scan_returns_descriptors_and_files_of_everything_staged(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    first = area.stage(_request(checkpoint, rank=0))
    second = area.stage(_request(checkpoint, save="save-2", rank=12, private=True))
    assert list(LocalStagingArea(volume).scan()) == [(DESCRIPTOR, first), (DESCRIPTOR, second)]


def test_scan_of_an_untouched_volume_is_empty(area: LocalStagingArea) -> None:
    assert list(area.scan()) == []


def test_scan_removes_what_is_half_staged_and_leaves_unreadable_descriptors_aside(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    files = area.stage(_request(checkpoint))
    staged = volume / ".mooring" / "staged"
    (staged / "save-1" / "rank-00004" / "deep").mkdir(parents=True)
    (staged / "save-1" / "rank-00004" / "deep" / "pin").write_bytes(b"half")
    (staged / "save-1" / "rank-00004.json.partial").write_bytes(b"{")
    (staged / "save-2" / "rank-00000").mkdir(parents=True)
    (staged / "stray").write_bytes(b"not ours")
    bad = {"cut.json": b"{", "list.json": b"[]", "old.json": b'{"format": 0}', "binary.json": b"\xff\xfe"}
    (staged / "save-3").mkdir()
    for name, content in bad.items():
        (staged / "save-3" / name).write_bytes(content)
    with capture_logs() as logs:
        found = list(area.scan())
    assert [pins for _, pins in found] == [files]
    assert sum(entry["event"] == "staging.descriptor_unreadable" for entry in logs) == len(bad)
    assert not (staged / "save-1" / "rank-00004").exists()
    assert not (staged / "save-1" / "rank-00004.json.partial").exists()
    assert not (staged / "save-2").exists()
    assert {entry.name for entry in (staged / "save-3").iterdir()} == set(bad)


def test_release_drops_every_rank_of_one_save_and_may_be_repeated(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    area.stage(_request(checkpoint, rank=0))
    area.stage(_request(checkpoint, rank=1))
    kept = area.stage(_request(checkpoint, save="save-2"))
    area.release("save-1")
    area.release("save-1")
    assert [pins for _, pins in area.scan()] == [kept]
    assert (checkpoint / "state.json").read_bytes() == b"{}"
    assert not (volume / ".mooring" / "staged" / "save-1").exists()


def test_a_path_outside_the_volume_is_refused(tmp_path: Path, area: LocalStagingArea) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    assert _refusal(area, _request(tmp_path / "secret")).kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert _refusal(area, _request(tmp_path)).kind is ErrorKind.PATH_OUTSIDE_VOLUME


def test_a_link_that_leaves_the_volume_is_refused_by_name(
    tmp_path: Path, volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (checkpoint / "model" / "link").symlink_to(tmp_path / "secret")
    error = _refusal(area, _request(checkpoint))
    assert error.kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert f"{checkpoint}/model/link" in str(error)
    assert f"{tmp_path}/secret" in str(error)
    assert _refusal(area, _request(checkpoint, "model/link")).kind is ErrorKind.PATH_OUTSIDE_VOLUME
    (volume / "way-out").symlink_to(tmp_path)
    assert _refusal(area, _request(volume / "way-out" / "secret")).kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert _refusal(area, _request(volume, "way-out/secret")).kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert _staged_names(volume) == []


def test_links_that_stay_inside_are_stored_as_the_files_they_name(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    (volume / "shared").mkdir()
    (volume / "shared" / "tokenizer").write_bytes(b"words")
    (checkpoint / "tokenizer").symlink_to("../../shared/tokenizer")
    (checkpoint / "folder").symlink_to(volume / "shared")
    (volume / "latest").symlink_to(checkpoint)
    files = area.stage(_request(volume / "latest"))
    contents = _contents(volume, files)
    assert (contents["tokenizer"], contents["folder/tokenizer"]) == (b"words", b"words")
    assert not any((volume / file.pin).is_symlink() for file in files)


def test_a_volume_that_is_itself_reached_by_a_link_works(tmp_path: Path, volume: Path, checkpoint: Path) -> None:
    (tmp_path / "mount").symlink_to(volume)
    area = LocalStagingArea(tmp_path / "mount")
    files = area.stage(_request(tmp_path / "mount" / "checkpoints" / "checkpoint-1"))
    assert _contents(volume, files)["state.json"] == b"{}"


@pytest.mark.parametrize("target", ["nowhere", "link", "."])
def test_links_that_lead_nowhere_or_in_circles_are_refused(
    area: LocalStagingArea, checkpoint: Path, target: str
) -> None:
    (checkpoint / "link").symlink_to(target)
    error = _refusal(area, _request(checkpoint))
    assert error.kind is (ErrorKind.FILE_MISSING if target == "nowhere" else ErrorKind.BAD_REQUEST)
    assert f"{checkpoint}/link" in str(error)


def test_moorings_own_folder_is_never_staged(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    area.stage(_request(checkpoint))
    (checkpoint / "back").symlink_to(volume / ".mooring" / "staged")
    for source in (volume, volume / ".mooring", volume / ".mooring" / "staged" / "save-1", checkpoint):
        assert _refusal(area, _request(source, save="save-2")).kind is ErrorKind.BAD_REQUEST
    request = _request(volume, ".mooring/staged/save-1/rank-00003.json", save="save-2")
    assert _refusal(area, request).kind is ErrorKind.BAD_NAME


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (("missing",), ErrorKind.FILE_MISSING),
        (("state.json/below",), ErrorKind.FILE_MISSING),
        (("model",), ErrorKind.BAD_REQUEST),
        (("../checkpoint-1/state.json",), ErrorKind.BAD_NAME),
        (("/etc/passwd",), ErrorKind.BAD_NAME),
    ],
)
def test_named_files_that_cannot_be_stored_are_refused(
    volume: Path, area: LocalStagingArea, checkpoint: Path, files: tuple[str, ...], kind: ErrorKind
) -> None:
    assert _refusal(area, _request(checkpoint, "state.json", *files)).kind is kind
    assert _staged_names(volume) == []


def test_missing_empty_and_relative_sources_are_refused(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    (volume / "hollow" / "folder").mkdir(parents=True)
    assert _refusal(area, _request(volume / "missing")).kind is ErrorKind.FILE_MISSING
    assert _refusal(area, _request(volume / "hollow")).kind is ErrorKind.CHECKPOINT_EMPTY
    assert _refusal(area, _request(Path("checkpoints"))).kind is ErrorKind.BAD_REQUEST
    assert _refusal(area, _request(checkpoint / "state.json", "state.json")).kind is ErrorKind.BAD_REQUEST


def test_save_ids_cannot_lead_out_of_the_staging_folder(area: LocalStagingArea, checkpoint: Path) -> None:
    assert _refusal(area, _request(checkpoint, save="../escape")).kind is ErrorKind.BAD_NAME
    with pytest.raises(RequestError):
        area.release("..")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix_socket:
        # sun_path is short: bind by a relative name.
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            unix_socket.bind(path.name)
        finally:
            os.chdir(before)


@pytest.mark.parametrize(("make", "kind"), [(_fifo, "fifo"), (_socket, "socket")])
def test_special_files_are_refused(
    area: LocalStagingArea, checkpoint: Path, make: Callable[[Path], None], kind: str
) -> None:
    make(checkpoint / "special")
    error = _refusal(area, _request(checkpoint))
    assert error.kind is ErrorKind.BAD_REQUEST
    assert kind in str(error)


@pytest.mark.parametrize("name", [b"not-utf8-\xff", b"new\nline", b"x" * 250 + b"/" + b"y" * 250 + b"/" + b"z" * 250])
def test_names_that_cannot_be_keys_are_refused(area: LocalStagingArea, checkpoint: Path, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(checkpoint) + b"/" + name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"content")
    assert _refusal(area, _request(checkpoint)).kind is ErrorKind.BAD_NAME


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_a_refused_hard_link_falls_back_to_a_copy_and_says_so_once(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(_source: str, _target: str, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with capture_logs() as logs:
        files = area.stage(_request(checkpoint))
    assert all(file.private for file in files)
    assert _contents(volume, files)["model/weights.pt"] == b"weights" * 1000
    assert [entry["reason"] for entry in logs if entry["event"] == "hard_link_refused"] == [os.strerror(code)]


def test_a_volume_whose_kernel_cannot_copy_ranges_is_copied_all_the_same(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    files = area.stage(_request(checkpoint, private=True))
    assert _contents(volume, files)["model/weights.pt"] == b"weights" * 1000


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, ErrorKind.DISK_FULL),
        (errno.EROFS, ErrorKind.VOLUME_UNUSABLE),
        (errno.EACCES, ErrorKind.VOLUME_UNUSABLE),
        (errno.ESTALE, ErrorKind.VOLUME_UNUSABLE),
        (errno.EMFILE, ErrorKind.VOLUME_UNUSABLE),
        (errno.ENOENT, ErrorKind.FILE_MISSING),
    ],
)
def test_a_stage_that_fails_midway_leaves_nothing(
    volume: Path,
    area: LocalStagingArea,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: ErrorKind,
) -> None:
    link = os.link

    def fail_on_the_last(source: str, target: str, **options: Any) -> None:
        if target == "state.json":
            raise OSError(code, os.strerror(code))
        link(source, target, **options)

    monkeypatch.setattr(os, "link", fail_on_the_last)
    assert _refusal(area, _request(checkpoint)).kind is kind
    assert _staged_names(volume) == []
    monkeypatch.undo()
    assert len(area.stage(_request(checkpoint))) == 3


@pytest.mark.parametrize("swap", ["file", "link", "parent"])
def test_of_a_name_that_is_replaced_between_opening_and_linking_the_open_file_is_pinned(
    tmp_path: Path,
    volume: Path,
    area: LocalStagingArea,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    swap: str,
) -> None:
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "weights.pt").write_bytes(b"secret")
    link = os.link

    def replace_first(source: str, target: str, **options: Any) -> None:
        file = checkpoint / "model" / "weights.pt"
        if target == "weights.pt":
            if swap == "parent":
                file.parent.rename(volume / "moved")
                file.parent.symlink_to(secret)
            else:
                file.rename(volume / "moved")
                file.symlink_to(secret / "weights.pt") if swap == "link" else file.write_bytes(b"other")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", replace_first)
    assert _contents(volume, area.stage(_request(checkpoint)))["model/weights.pt"] == b"weights" * 1000


@pytest.mark.parametrize("private", [False, True])
def test_a_folder_swapped_for_a_link_outside_after_the_scan_is_refused(
    tmp_path: Path,
    volume: Path,
    area: LocalStagingArea,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    private: bool,
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "weights.pt").write_bytes(b"secret")
    make_folders = staging_area._make_folders

    def swap_after(*arguments: Any) -> list[str]:
        folder = checkpoint / "model"
        folder.rename(tmp_path / "moved")
        folder.symlink_to(outside)
        return make_folders(*arguments)

    monkeypatch.setattr(staging_area, "_make_folders", swap_after)
    assert _refusal(area, _request(checkpoint, private=private)).kind in {
        ErrorKind.FILE_MISSING,
        ErrorKind.VOLUME_UNUSABLE,
    }
    assert _staged_names(volume) == []


def test_a_trainer_that_keeps_replacing_a_file_never_yields_a_mix(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    """Every version has its own length and letter: the pin must be one version, with that version's fingerprint."""
    target = checkpoint / "model" / "weights.pt"
    stop = threading.Event()

    def keep_replacing() -> None:
        version = 0
        while not stop.is_set():
            version = version % 26 + 1
            partial = target.with_suffix(".partial")
            partial.write_bytes(bytes([64 + version]) * version * 1000)
            partial.rename(target)

    trainer = threading.Thread(target=keep_replacing)
    trainer.start()
    outcomes: set[str] = set()
    try:
        for number in range(100):
            save = f"save-{number}"
            try:
                (file,) = area.stage(_request(checkpoint, "model/weights.pt", save=save, private=number % 2 == 1))
            except VolumeError as error:
                outcomes.add(error.kind)
                continue
            area.check(save, 3, [file])
            content = (volume / file.pin).read_bytes()
            assert len(content) == file.size_bytes
            assert len(set(content)) <= 1 or content == b"weights" * 1000
            outcomes.add("pinned")
    finally:
        stop.set()
        trainer.join()
    assert "pinned" in outcomes
    assert outcomes <= {"pinned", ErrorKind.FILE_CHANGED, ErrorKind.FILE_MISSING}


_STAGER = """
import sys
import tempfile
from pathlib import Path
from mooring_agent.adapters.volume.staging_area import LocalStagingArea
from mooring_agent.ports import StagedDescriptor, StageRequest

volume, source = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
LocalStagingArea(volume).stage(
    StageRequest(
        save="killed", rank=0, path=source, files=(), private=False, descriptor=StagedDescriptor(announcements=())
    )
)
print("staged", flush=True)
"""


def test_a_stage_that_is_killed_is_either_whole_or_removed_by_the_next_scan(volume: Path) -> None:
    folder = volume / "checkpoints" / "many"
    folder.mkdir(parents=True)
    for number in range(300):
        (folder / f"{number}.pt").write_bytes(b"x")
    for wait_for in (0, 1, 150, 300):
        command = [sys.executable, "-c", _STAGER, str(volume), str(folder)]
        pins = volume / ".mooring" / "staged" / "killed" / "rank-00000"
        with subprocess.Popen(command, stdout=subprocess.PIPE) as stager:
            assert stager.stdout is not None
            stager.stdout.readline()
            give_up = monotonic() + 10
            while stager.poll() is None and monotonic() < give_up:
                if pins.exists() and len(list(pins.iterdir())) >= wait_for:
                    break
            stager.send_signal(signal.SIGKILL)
        area = LocalStagingArea(volume)
        found = list(area.scan())
        assert [len(files) for _, files in found] in ([], [300])
        for _, files in found:
            area.check("killed", 0, files)
        if not found:
            assert _staged_names(volume) == []
        area.release("killed")


def test_ten_thousand_files_are_staged_in_seconds_not_minutes(
    volume: Path, area: LocalStagingArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what no busy machine or slow disk changes: our own work, and that fsyncs do not wait for each other."""
    folder = volume / "checkpoints" / "many"
    for shard in range(10):
        (folder / str(shard)).mkdir(parents=True)
        for number in range(1000):
            (folder / str(shard) / f"{number}.pt").write_bytes(b"x")
    fsync, fsyncs, together = os.fsync, itertools.count(), threading.Barrier(2)

    def fsync_beside_another(descriptor: int) -> None:
        if next(fsyncs) < together.parties:
            together.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_beside_another)
    started = process_time()
    files = area.stage(_request(folder))
    assert len(files) == 10_000
    assert process_time() - started < 30
    monkeypatch.undo()
    area.release("save-1")


@pytest.mark.parametrize("other", ["state.pt", "state.pt/0"], ids=["another file", "a folder"])
def test_a_rank_with_other_bytes_under_the_same_path_is_refused_and_leaves_nothing(
    other: str, volume: Path, area: LocalStagingArea
) -> None:
    for rank, name in enumerate(("state.pt", other)):
        path = volume / "checkpoints" / f"rank-{rank}" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"%d" % rank)
    first = area.stage(_request(volume / "checkpoints" / "rank-0", rank=0))
    second = _request(volume / "checkpoints" / "rank-1", rank=1)
    for _ in range(2):
        refused = _refusal(area, second)
        assert refused.kind is ErrorKind.CONTRADICTION
        assert "ranks 0 and 1" in str(refused)
    assert _staged_names(volume) == [
        "save-1",
        "save-1/rank-00000",
        "save-1/rank-00000.json",
        f"save-1/rank-00000/{first[0].path}",
    ]


def test_a_rank_is_staged_although_another_ones_failed_stage_removes_the_folder_of_the_save(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder = volume / ".mooring" / "staged" / "save-1"
    mkdir = os.mkdir
    removals = iter(range(1))

    def mkdir_beside_another_rank(path: str, *arguments: Any, **options: Any) -> None:
        mkdir(path, *arguments, **options)
        if path == save_folder.name and next(removals, None) is not None:
            save_folder.rmdir()

    monkeypatch.setattr(os, "mkdir", mkdir_beside_another_rank)
    assert len(area.stage(_request(checkpoint))) == 3
    assert next(removals, None) is None


def test_ranks_may_bring_the_same_bytes_under_the_same_path(volume: Path, area: LocalStagingArea) -> None:
    for rank in (0, 1):
        folder = volume / "checkpoints" / f"rank-{rank}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(b"{}")
        (folder / f"rank-{rank}.pt").write_bytes(b"%d" % rank)
        area.stage(_request(folder, rank=rank))
    # The very same file, too.
    area.stage(_request(volume / "checkpoints" / "rank-0", "config.json", rank=2))
    assert len(list(area.scan())) == 3


def test_the_descriptor_is_plain_json(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    area.stage(_request(checkpoint))
    value = json.loads((volume / ".mooring" / "staged" / "save-1" / "rank-00003.json").read_bytes())
    assert value["descriptor"] == {"announcements": ["täst" * 20], "part_size_bytes": 7, "pack_size_bytes": 0}
    assert [file["path"] for file in value["files"]] == ["empty", "model/weights.pt", "state.json"]


_AS_ONE_USER = """
import os, sys
from pathlib import Path
from mooring_agent.adapters.volume.pinning import Pinner
from mooring_agent.adapters.volume.shared_volume import open_volume

volume, group = Path(sys.argv[1]), int(sys.argv[2])
os.setgroups([])
os.setresgid(group, group, group)
os.setresuid(1000, 1000, 1000)
os.umask(0o077)
if group:
    (volume / "checkpoint").mkdir()
    (volume / "checkpoint" / "weights").write_bytes(b"weights")
else:
    (volume / "staged").mkdir()
    with open_volume(volume) as root, root.folder("checkpoint") as source, root.folder("staged") as target:
        print(Pinner(volume).pin(source, "weights", target, "0", private=False))
    (volume / "checkpoint" / "weights").unlink()
    (volume / "checkpoint").rmdir()
    print((volume / "staged" / "0").read_bytes().decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a user of two groups")
@pytest.mark.root
def test_a_trainer_of_the_same_user_and_another_group_has_its_files_linked_and_removed() -> None:
    """As in a pod that names runAsUser alone: each image's /etc/passwd says which group that user has, else it is 0."""
    # Not below tmp_path, into which only its owner may look.
    with tempfile.TemporaryDirectory() as name:
        volume = Path(name).resolve()
        volume.chmod(0o777)
        said = [
            subprocess.run([sys.executable, "-c", _AS_ONE_USER, volume, group], check=True, capture_output=True).stdout
            for group in ("1000", "0")
        ]
    assert said[1].decode().splitlines() == ["False", "weights"]


def _change_descriptor(volume: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = volume / ".mooring" / "staged" / "save-1" / "rank-00003.json"
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def _first(**members: object) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["files"][0].update(members)


def _described(**members: object) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["descriptor"].update(members)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_first(size=SAVE_BYTES + 1), id="a size beyond the limit"),
        pytest.param(_first(size=-1), id="a negative size"),
        pytest.param(_first(size=2**40), id="a size that the pin has not"),
        pytest.param(_first(mtime_ns=10**30), id="a time that no filesystem has"),
        pytest.param(_first(path="a" * 5000), id="a long path"),
        pytest.param(_first(path="nothing"), id="a pin that is not there"),
        pytest.param(_first(path="model"), id="a pin that is a folder"),
        pytest.param(lambda value: value.update(files=value["files"] * (FILES_PER_RANK // 3 + 1)), id="many files"),
        pytest.param(_described(announcements=["a" * 100] * (LOCAL_RANKS + 1)), id="many announcements"),
        pytest.param(_described(announcements=["ab"] * 100), id="short announcements"),
        pytest.param(_described(announcements=["a" * (ANNOUNCEMENT_CHARACTERS + 1)]), id="a long announcement"),
        pytest.param(_described(announcements=[[]]), id="an announcement that is a list"),
        pytest.param(_described(part_size_bytes=2**62), id="a part size beyond the limit"),
        pytest.param(lambda value: value.update(x="a" * DESCRIPTOR_BYTES), id="a long descriptor"),
    ],
)
def test_a_descriptor_beyond_a_limit_or_of_other_pins_is_left_out_and_said(
    volume: Path, area: LocalStagingArea, checkpoint: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    area.stage(_request(checkpoint))
    kept = area.stage(_request(checkpoint, save="save-2"))
    _change_descriptor(volume, change)
    with capture_logs() as logs:
        assert [pins for _, pins in area.scan()] == [kept]
    (line,) = logs
    assert line["event"] == "staging.descriptor_unreadable"
    assert len(line["reason"]) < 1000


def test_pins_that_have_more_bytes_together_than_a_save_may_are_left_out(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    area.stage(_request(checkpoint))
    monkeypatch.setattr(pinning, "SAVE_BYTES", 7001)
    assert list(area.scan()) == []
    monkeypatch.setattr(pinning, "SAVE_BYTES", 7002)
    assert len(list(area.scan())) == 1


def test_a_descriptor_that_could_not_be_read_again_is_refused_when_it_is_staged_and_leaves_nothing(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit, most in (
        (pinning, "DESCRIPTOR_BYTES", 100),
        (pinning, "SAVE_BYTES", 7001),
        (announced_files, "FILES_PER_RANK", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, most)
            assert _refusal(area, _request(checkpoint)).kind is ErrorKind.BAD_REQUEST
        assert _staged_names(volume) == []
    assert len(area.stage(_request(checkpoint))) == 3


def test_a_descriptor_of_other_pins_is_staged_anew(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(_request(checkpoint))
    _change_descriptor(volume, _first(size=2**40))
    again = area.stage(_request(checkpoint))
    assert [file.fingerprint for file in again] == [file.fingerprint for file in files]
