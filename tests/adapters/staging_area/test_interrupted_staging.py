"""Errors of the filesystem, other writers and kills leave a whole stage or none."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.adapters.staging_area.staged_files import pinned_contents, refusal, stage_request, staged_names
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.volume import staging_area
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import ErrorKind, VolumeError


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_a_refused_hard_link_falls_back_to_a_copy_and_says_so_once(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(_source: str, _target: str, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with capture_logs() as logs:
        files = area.stage(stage_request(checkpoint))
    assert all(file.private for file in files)
    assert pinned_contents(volume, files)["model/weights.pt"] == b"weights" * 1000
    assert [entry["reason"] for entry in logs if entry["event"] == "hard_link_refused"] == [os.strerror(code)]


def test_a_volume_whose_kernel_cannot_copy_ranges_is_copied_all_the_same(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    files = area.stage(stage_request(checkpoint, private=True))
    assert pinned_contents(volume, files)["model/weights.pt"] == b"weights" * 1000


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
    assert refusal(area, stage_request(checkpoint)).kind is kind
    assert staged_names(volume) == []
    monkeypatch.undo()
    assert len(area.stage(stage_request(checkpoint))) == 3


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
    assert pinned_contents(volume, area.stage(stage_request(checkpoint)))["model/weights.pt"] == b"weights" * 1000


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
    assert refusal(area, stage_request(checkpoint, private=private)).kind in {
        ErrorKind.FILE_MISSING,
        ErrorKind.VOLUME_UNUSABLE,
    }
    assert staged_names(volume) == []


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
                files = area.stage(stage_request(checkpoint, "model/weights.pt", save=save, private=number % 2 == 1))
            except VolumeError as error:
                outcomes.add(error.kind)
                continue
            area.check(save, 3, files)
            (file,) = files
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
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.ports import StagedDescriptor, StageRequest

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
        pins = volume / ".keepstep" / "staged" / "killed" / "rank-00000"
        with subprocess.Popen(command, stdout=subprocess.PIPE) as stager:
            assert stager.stdout is not None
            stager.stdout.readline()
            give_up = monotonic() + HANG_SECONDS
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
            assert staged_names(volume) == []
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
            together.wait(HANG_SECONDS)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_beside_another)
    started = process_time()
    files = area.stage(stage_request(folder))
    assert len(files) == 10_000
    assert process_time() - started < 30
    monkeypatch.undo()
    area.release("save-1")


def test_a_rank_is_staged_although_another_ones_failed_stage_removes_the_folder_of_the_save(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder = volume / ".keepstep" / "staged" / "save-1"
    mkdir = os.mkdir
    removals = iter(range(1))

    def mkdir_beside_another_rank(path: str, *arguments: Any, **options: Any) -> None:
        mkdir(path, *arguments, **options)
        if path == save_folder.name and next(removals, None) is not None:
            save_folder.rmdir()

    monkeypatch.setattr(os, "mkdir", mkdir_beside_another_rank)
    assert len(area.stage(stage_request(checkpoint))) == 3
    assert next(removals, None) is None
