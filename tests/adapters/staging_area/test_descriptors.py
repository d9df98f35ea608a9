"""What is staged is found again by its descriptors, and those that cannot be right are left out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.adapters.staging_area.staged_files import DESCRIPTOR, refusal, stage_request, staged_names

from keepstep_agent.adapters.volume import announced_files, pinning
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.limits import (
    ANNOUNCEMENT_CHARACTERS,
    DESCRIPTOR_BYTES,
    FILES_PER_RANK,
    LOCAL_RANKS,
    SAVE_BYTES,
)


def test_scan_returns_descriptors_and_files_of_everything_staged(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    first = area.stage(stage_request(checkpoint, rank=0))
    second = area.stage(stage_request(checkpoint, save="save-2", rank=12, private=True))
    assert list(LocalStagingArea(volume).scan()) == [(DESCRIPTOR, first), (DESCRIPTOR, second)]


def test_scan_of_an_untouched_volume_is_empty(area: LocalStagingArea) -> None:
    assert list(area.scan()) == []


def test_scan_removes_what_is_half_staged_and_leaves_unreadable_descriptors_aside(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    files = area.stage(stage_request(checkpoint))
    staged = volume / ".keepstep" / "staged"
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
    area.stage(stage_request(checkpoint, rank=0))
    area.stage(stage_request(checkpoint, rank=1))
    kept = area.stage(stage_request(checkpoint, save="save-2"))
    area.release("save-1")
    area.release("save-1")
    assert [pins for _, pins in area.scan()] == [kept]
    assert (checkpoint / "state.json").read_bytes() == b"{}"
    assert not (volume / ".keepstep" / "staged" / "save-1").exists()


def test_the_descriptor_is_plain_json(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    area.stage(stage_request(checkpoint))
    value = json.loads((volume / ".keepstep" / "staged" / "save-1" / "rank-00003.json").read_bytes())
    assert value["descriptor"] == {"announcements": ["täst" * 20], "part_size_bytes": 7, "pack_size_bytes": 0}
    assert value["files"]["paths"] == ["empty", "model/weights.pt", "state.json"]


def _change_descriptor(volume: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = volume / ".keepstep" / "staged" / "save-1" / "rank-00003.json"
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def _first(**columns: object) -> Callable[[dict[str, Any]], None]:
    """With these values for the first file."""

    def change(value: dict[str, Any]) -> None:
        for name, first in columns.items():
            value["files"][name][0] = first

    return change


def _many_files(value: dict[str, Any]) -> None:
    value["files"] |= {name: column * (FILES_PER_RANK // 3 + 1) for name, column in value["files"].items() if column}


def _described(**members: object) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["descriptor"].update(members)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_first(sizes_bytes=SAVE_BYTES + 1), id="a size beyond the limit"),
        pytest.param(_first(sizes_bytes=-1), id="a negative size"),
        pytest.param(_first(sizes_bytes=2**40), id="a size that the pin has not"),
        pytest.param(_first(mtimes_ns=10**30), id="a time that no filesystem has"),
        pytest.param(_first(paths="a" * 5000), id="a long path"),
        pytest.param(_first(paths="emptz"), id="a pin that is not there"),
        pytest.param(_first(paths="model"), id="a pin that is a folder"),
        pytest.param(_first(paths="z"), id="paths that are not sorted"),
        pytest.param(_first(paths="state.json"), id="a path that comes twice"),
        pytest.param(lambda value: value["files"]["inodes"].pop(), id="a column that is shorter"),
        pytest.param(lambda value: value["files"].update(folder="elsewhere"), id="pins in another folder"),
        pytest.param(_many_files, id="many files"),
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
    area.stage(stage_request(checkpoint))
    kept = area.stage(stage_request(checkpoint, save="save-2"))
    _change_descriptor(volume, change)
    with capture_logs() as logs:
        assert [pins for _, pins in area.scan()] == [kept]
    (line,) = logs
    assert line["event"] == "staging.descriptor_unreadable"
    assert len(line["reason"]) < 1000


def test_pins_that_have_more_bytes_together_than_a_save_may_are_left_out(
    volume: Path, area: LocalStagingArea, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    area.stage(stage_request(checkpoint))
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
            assert refusal(area, stage_request(checkpoint)).kind is ErrorKind.BAD_REQUEST
        assert staged_names(volume) == []
    assert len(area.stage(stage_request(checkpoint))) == 3


def test_a_descriptor_of_other_pins_is_staged_anew(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(stage_request(checkpoint))
    _change_descriptor(volume, _first(sizes_bytes=2**40))
    again = area.stage(stage_request(checkpoint))
    assert [file.fingerprint for file in again] == [file.fingerprint for file in files]
