"""The program's own files beside those of a save: copied, or left out with a line, and never why a save fails."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.adapters.staging_area.staged_files import pinned_contents, stage_request, staged_names
from tests.harness.small_volume import mounted

from keepstep_agent.adapters.volume import other_files, pinning, staging_area
from keepstep_agent.adapters.volume.announced_files import AnnouncedFiles, resolve_files
from keepstep_agent.adapters.volume.content_check import content_signature
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.ports import StageRequest
from keepstep_api.names import RESERVE, STATE_DIRECTORY

_FILES = ("model/weights.pt", "state.json")
_CONTENTS = {"model/weights.pt": b"weights" * 1000, "state.json": b"{}"}


@pytest.fixture(autouse=True)
def _the_program_writes_beside_the_save(checkpoint: Path) -> None:
    (checkpoint / "logs").mkdir()
    (checkpoint / "logs" / "train.log").write_bytes(b"a line\n")
    (checkpoint / "args.json").write_bytes(b"{}")


def _request(checkpoint: Path, *others: str, **fields: Any) -> StageRequest:
    return replace(stage_request(checkpoint, *_FILES), others=others, **fields)


def _stage(area: LocalStagingArea, request: StageRequest) -> tuple[StagedFiles, list[dict[str, Any]]]:
    """The staged files, and the lines about what was left out."""
    with capture_logs() as log:
        files = area.stage(request)
    return files, [dict(line) for line in log if line["event"] == "staging.others_left_out"]


def test_they_are_copied_as_they_are_and_may_grow_be_rewritten_or_vanish_afterwards(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    files, left_out = _stage(area, _request(checkpoint, "logs/train.log", "args.json"))
    assert {file.path: file.private for file in files} == {
        **dict.fromkeys(_FILES, False),
        "logs/train.log": True,
        "args.json": True,
    }
    assert not left_out
    with (checkpoint / "logs" / "train.log").open("ab") as train_log:
        train_log.write(b"another line\n")
    (checkpoint / "args.json").unlink()
    area.check("save-1", 3, files)
    assert pinned_contents(volume, files) == {**_CONTENTS, "logs/train.log": b"a line\n", "args.json": b"{}"}
    # Also when the journal is lost.
    assert [found for _, found in LocalStagingArea(volume).scan()] == [files]


def test_what_the_program_writes_between_announcement_and_staging_does_not_fail_the_save(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    signatures = frozenset({content_signature(volume, str(checkpoint), _FILES)})
    (checkpoint / "logs" / "train.log").write_bytes(b"a line\nanother line\n")
    files, _ = _stage(area, _request(checkpoint, "logs/train.log", signatures=signatures))
    assert pinned_contents(volume, files)["logs/train.log"] == b"a line\nanother line\n"


def test_a_link_that_stays_inside_is_stored_as_the_file_it_names(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    (volume / "shared.log").write_bytes(b"shared")
    (checkpoint / "link.log").symlink_to("../../shared.log")
    files, _ = _stage(area, _request(checkpoint, "link.log"))
    assert pinned_contents(volume, files)["link.log"] == b"shared"


def _nothing(path: Path) -> None:
    pass


def _link_out_of_the_volume(path: Path) -> None:
    secret = path.parents[3] / "secret"
    secret.write_bytes(b"secret")
    path.symlink_to(secret)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [_nothing, _link_out_of_the_volume, _fifo, Path.mkdir, _loop])
def test_what_is_no_file_of_the_volume_is_left_out_with_one_line_and_the_rest_is_staged(
    volume: Path, area: LocalStagingArea, checkpoint: Path, make: Callable[[Path], None]
) -> None:
    make(checkpoint / "special")
    files, left_out = _stage(area, _request(checkpoint, "special", "logs/gone.log", "logs/train.log"))
    assert pinned_contents(volume, files) == {**_CONTENTS, "logs/train.log": b"a line\n"}
    (line,) = left_out
    assert (line["count"], line["first"], line["save"]) == (2, "special", "save-1")
    assert "special" in line["reason"]
    # Who stages again gets the same, and no second line.
    assert _stage(area, _request(checkpoint, "special", "logs/train.log")) == (files, [])


@pytest.mark.parametrize("path", ["../checkpoint-2/state.json", "/etc/passwd", ".keepstep/volume-id", "new\nline"])
def test_a_path_that_leads_elsewhere_is_left_out(
    volume: Path, area: LocalStagingArea, checkpoint: Path, path: str
) -> None:
    files, left_out = _stage(area, _request(checkpoint, path))
    assert pinned_contents(volume, files) == _CONTENTS
    assert [line["count"] for line in left_out] == [1]


def test_one_that_is_swapped_for_a_link_out_once_it_is_found_is_not_followed(
    tmp_path: Path, volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")

    def swap_after(volume: Path, path: str, files: tuple[str, ...]) -> AnnouncedFiles:
        found = resolve_files(volume, path, files)
        if files == ("args.json",):
            (checkpoint / "args.json").unlink()
            (checkpoint / "args.json").symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr(other_files, "resolve_files", swap_after)
    files, left_out = _stage(area, _request(checkpoint, "args.json"))
    assert pinned_contents(volume, files) == _CONTENTS
    assert [line["count"] for line in left_out] == [1]


def _on_copy(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Something happens during each copy, on a volume that knows no reflinks."""

    def no_reflink(*_arguments: object) -> None:
        happens()
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "ioctl", no_reflink)


@pytest.mark.parametrize("size_bytes", [7, 100], ids=["rewritten with as many bytes", "grown"])
def test_one_that_changes_while_it_is_copied_is_left_out_and_leaves_no_copy(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    train_log = checkpoint / "logs" / "train.log"

    def written_just_before(volume: Path, path: str, files: tuple[str, ...]) -> AnnouncedFiles:
        found = resolve_files(volume, path, files)
        train_log.write_bytes(b"a line\n")
        return found

    def write_again() -> None:
        """On a kernel whose clock ticks every 10 ms."""
        before_ns = train_log.stat().st_mtime_ns
        train_log.write_bytes(bytes(size_bytes))
        if time.time_ns() - before_ns < 10_000_000:
            os.utime(train_log, ns=(before_ns, before_ns))

    monkeypatch.setattr(other_files, "resolve_files", written_just_before)
    _on_copy(monkeypatch, write_again)
    files, left_out = _stage(area, _request(checkpoint, "logs/train.log"))
    assert pinned_contents(volume, files) == _CONTENTS
    assert "written to" in left_out[0]["reason"]
    assert not any(name.endswith("train.log") for name in staged_names(volume))


def test_a_volume_that_is_full_before_they_are_copied_holds_the_save_without_them(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is reserved for the files of the last save is not spent for these.
    reserve = volume / STATE_DIRECTORY / RESERVE
    reserve.parent.mkdir()
    reserve.touch()
    copies = iter(range(1))

    def full_at_the_second() -> None:
        if next(copies, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _on_copy(monkeypatch, full_at_the_second)
    files, left_out = _stage(area, _request(checkpoint, "args.json", "logs/train.log"))
    assert pinned_contents(volume, files) == _CONTENTS
    assert [(line["count"], line["first"]) for line in left_out] == [(2, "args.json")]
    assert not any(name.endswith("args.json") for name in staged_names(volume))
    assert reserve.exists()


@pytest.mark.root
def test_on_a_full_disk_a_large_one_costs_nobody_the_save(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", 4 * 1024**2) as volume:
        checkpoint = volume / "checkpoint-1"
        checkpoint.mkdir()
        (checkpoint / "weights.pt").write_bytes(bytes(1000))
        (checkpoint / "train.log").write_bytes(bytes(3 * 1024**2))
        request = replace(stage_request(checkpoint, "weights.pt"), others=("train.log",))
        files, left_out = _stage(LocalStagingArea(volume), request)
        assert pinned_contents(volume, files) == {"weights.pt": bytes(1000)}
        assert len(left_out) == 1
        # What was copied of it gives its room back.
        (volume / "next").write_bytes(bytes(512 * 1024))


def test_more_than_a_checkpoint_may_have_are_left_out(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_area, "FILES_PER_RANK", 3)
    files, left_out = _stage(area, _request(checkpoint, "args.json", "logs/train.log"))
    assert pinned_contents(volume, files) == {**_CONTENTS, "args.json": b"{}"}
    assert [line["first"] for line in left_out] == ["logs/train.log"]


def test_more_bytes_than_a_rank_may_have_are_left_out(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "SAVE_BYTES", sum(map(len, _CONTENTS.values())))
    files, left_out = _stage(area, _request(checkpoint, "logs/train.log"))
    assert pinned_contents(volume, files) == _CONTENTS
    assert len(left_out) == 1


def test_a_file_of_the_save_that_cannot_be_staged_still_fails_it(area: LocalStagingArea, checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()
    with pytest.raises(KeepstepError) as refused:
        area.stage(_request(checkpoint, "args.json"))
    assert refused.value.kind is ErrorKind.FILE_MISSING
