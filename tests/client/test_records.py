"""Records: what is written can be read, and what cannot be read is skipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoints.records import Kind, Record, RecordedFile, read_records, remove_record, write_record


def record(
    step: int,
    *,
    saved_at: float = 1.0,
    committed: bool = False,
    announced: bool = False,
    ranks: tuple[int, ...] = (),
    others: tuple[str, ...] = (),
) -> Record:
    return Record(
        name=f"checkpoint-{step}",
        step=step,
        save=f"a-{step}",
        kind=Kind.PERIODIC,
        world_size=1,
        saved_at=saved_at,
        files=(RecordedFile(path="deep/ä.pt", size_bytes=3),),
        committed=committed,
        announced=announced,
        ranks=ranks,
        others=others,
    )


@pytest.mark.parametrize(
    "fields", [{}, {"committed": True}, {"announced": True}, {"ranks": (2, 3)}, {"others": ("ä.log",)}]
)
def test_a_record_reads_back_as_it_was_written(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_record(tmp_path / "records", record(5, **fields))
    assert read_records(tmp_path / "records") == [record(5, **fields)]
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["checkpoint-5.json"]


def test_the_format_is_the_one_that_restore_writes(tmp_path: Path) -> None:
    write_record(tmp_path, record(5))
    assert json.loads((tmp_path / "checkpoint-5.json").read_text()) == {
        "format": 1,
        "name": "checkpoint-5",
        "step": 5,
        "save": "a-5",
        "kind": "periodic",
        "world_size": 1,
        "saved_at": 1.0,
        "files": [{"path": "deep/ä.pt", "size": 3}],
    }


def test_the_step_decides_what_is_newest_and_then_the_time(tmp_path: Path) -> None:
    for value in (record(9, saved_at=1.0), record(10, saved_at=0.5), record(100, saved_at=0.1)):
        write_record(tmp_path, value)
    assert [found.step for found in read_records(tmp_path)] == [100, 10, 9]
    assert record(5, saved_at=2.0).order > record(5, saved_at=1.0).order


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"name": "checkpoint-7"}', '{"name": "../../etc", "step": 7}']
)
def test_a_record_that_cannot_be_read_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    write_record(tmp_path, record(5))
    (tmp_path / "checkpoint-7.json").write_text(content)
    assert [found.step for found in read_records(tmp_path)] == [5]
    assert caplog.text.count("record skipped") == 1


def test_a_record_that_names_another_directory_is_skipped(tmp_path: Path) -> None:
    write_record(tmp_path, record(5))
    content = (tmp_path / "checkpoint-5.json").read_text().replace("checkpoint-5", "../somewhere")
    (tmp_path / "checkpoint-5.json").write_text(content)
    assert read_records(tmp_path) == []


def test_no_records_directory_is_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none") == []
    remove_record(tmp_path / "checkpoint-1.json")
