"""Which of a client's checkpoints no agent has, by the records that the real client writes."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from keepstep.checkpoints.records import Kind, Record, RecordedFile, write_record
from keepstep_agent.adapters import records as records
from keepstep_agent.adapters.records import RecordedPaths, unannounced
from keepstep_agent.adapters.volume.content_check import content_signature
from keepstep_agent.core.limits import (
    CLIENT_RECORD_BYTES,
    CLIENT_RECORDS,
    FILES_PER_RANK,
    LOCAL_RANKS,
    STEP,
    WORLD_SIZE,
)
from keepstep_api.names import CHECKPOINT_DIRECTORY, MOST_OTHERS, RECORDS_DIRECTORY, STATE_DIRECTORY
from keepstep_api.records import record_file


def keep(
    volume: Path,
    step: int,
    *,
    saved_at: float,
    size_bytes: int = 3,
    announced: bool = False,
    committed: bool = False,
    directory: str | None = None,
    ranks: tuple[int, ...] = (),
    others: tuple[str, ...] = (),
) -> None:
    """A checkpoint with its record, whole if `size_bytes` is 3. `saved_at` is by another clock than the volume's."""
    folder = volume / (directory or CHECKPOINT_DIRECTORY) / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(bytes(3))
    record = Record(
        name=folder.name,
        step=step,
        save=f"a-{step}",
        kind=Kind.PERIODIC,
        world_size=1 + max(ranks, default=0),
        saved_at=saved_at,
        files=(RecordedFile(path="state", size_bytes=size_bytes),),
        announced=announced,
        committed=committed,
        directory=directory or "",
        ranks=ranks,
        others=others,
    )
    write_record(volume / STATE_DIRECTORY / RECORDS_DIRECTORY, record)


def steps(volume: Path, *known: str) -> list[int]:
    return [one.step for one in unannounced(volume, volume / CHECKPOINT_DIRECTORY, known=known)]


def test_what_was_saved_since_an_agent_had_one_comes_with_the_newest_last(tmp_path: Path) -> None:
    keep(tmp_path, 100, saved_at=1.0)
    keep(tmp_path, 200, saved_at=2.0, announced=True)
    keep(tmp_path, 400, saved_at=4.0)
    keep(tmp_path, 300, saved_at=3.0)
    assert steps(tmp_path) == [300, 400]
    assert steps(tmp_path, "a-300") == [400]
    assert steps(tmp_path, "a-400") == []


@pytest.mark.parametrize(("committed", "announced"), [(True, False), (False, True)])
def test_what_was_restored_or_announced_is_not_among_them(tmp_path: Path, committed: bool, announced: bool) -> None:
    keep(tmp_path, 100, saved_at=1.0, committed=committed, announced=announced)
    assert steps(tmp_path) == []


def test_a_run_that_went_back_to_an_earlier_step_counts_by_time(tmp_path: Path) -> None:
    keep(tmp_path, 500, saved_at=1.0, announced=True)
    keep(tmp_path, 150, saved_at=2.0)
    assert steps(tmp_path) == [150]


def test_what_is_damaged_gone_or_unreadable_is_left_out(tmp_path: Path) -> None:
    keep(tmp_path, 100, saved_at=1.0)
    keep(tmp_path, 200, saved_at=2.0, size_bytes=4)
    keep(tmp_path, 300, saved_at=3.0)
    (tmp_path / CHECKPOINT_DIRECTORY / "checkpoint-300" / "state").unlink()
    for name, content in (("checkpoint-7.json", "{"), ("checkpoint-8.json", "[]"), ("checkpoint-9.json", "{}")):
        (tmp_path / STATE_DIRECTORY / RECORDS_DIRECTORY / name).write_text(content)
    assert steps(tmp_path) == [100]


def test_what_a_framework_wrote_elsewhere_is_found_where_it_lies(tmp_path: Path) -> None:
    keep(tmp_path, 100, saved_at=1.0)
    keep(tmp_path, 200, saved_at=2.0, directory="outputs/run 1")
    keep(tmp_path, 300, saved_at=3.0, directory=".")
    found = unannounced(tmp_path, tmp_path / CHECKPOINT_DIRECTORY, known=())
    folders = [CHECKPOINT_DIRECTORY, "outputs/run 1", "."]
    places = [tmp_path / folder / f"checkpoint-{100 * number}" for number, folder in enumerate(folders, start=1)]
    assert [one.path for one in found] == places


def test_a_checkpoint_that_is_one_file_is_whole_when_that_file_is(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step=7.ckpt"
    checkpoint.write_bytes(bytes(3))
    record = Record(
        name="step=7.ckpt",
        step=7,
        save="a-7",
        kind=Kind.PERIODIC,
        world_size=1,
        saved_at=1.0,
        files=(RecordedFile(path="", size_bytes=3),),
        directory=".",
    )
    write_record(tmp_path / STATE_DIRECTORY / RECORDS_DIRECTORY, record)
    (found,) = unannounced(tmp_path, tmp_path / CHECKPOINT_DIRECTORY, known=())
    assert (found.step, found.files) == (7, ())
    assert found.signature == content_signature(tmp_path, str(checkpoint))
    checkpoint.write_bytes(bytes(2))
    assert steps(tmp_path) == []


def test_a_folder_that_the_program_uses_too_is_whole_when_the_recorded_files_are(tmp_path: Path) -> None:
    keep(tmp_path, 100, saved_at=1.0, others=("train.log", "gone.log"))
    folder = tmp_path / CHECKPOINT_DIRECTORY / "checkpoint-100"
    signature = content_signature(tmp_path, str(folder), ("state",))
    # Written after the record.
    (folder / "train.log").write_bytes(b"a line\n")
    (folder / "deeper").mkdir()
    (found,) = unannounced(tmp_path, tmp_path / CHECKPOINT_DIRECTORY, known=())
    assert (found.files, found.others) == (("state",), ("train.log", "gone.log"))
    assert found.signature == signature


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_client_whose_clock_is_not_the_volumes_has_its_checkpoint_found(tmp_path: Path, hours: int) -> None:
    keep(tmp_path, 100, saved_at=time.time() + 3600 * hours)
    assert steps(tmp_path) == [100]


def test_what_was_written_to_after_it_was_recorded_is_left_out_with_the_reason(tmp_path: Path) -> None:
    keep(tmp_path, 100, saved_at=1.0)
    # By the client's clock it is older than that.
    keep(tmp_path, 200, saved_at=time.time() + 3600)
    # The next save has begun in the same place, and its program was killed.
    state = tmp_path / CHECKPOINT_DIRECTORY / "checkpoint-200" / "state"
    recorded = (tmp_path / STATE_DIRECTORY / RECORDS_DIRECTORY / "checkpoint-200.json").stat()
    os.utime(state, ns=(recorded.st_mtime_ns + 1, recorded.st_mtime_ns + 1))
    with capture_logs() as log:
        assert steps(tmp_path) == [100]
    (dropped,) = log
    assert (dropped["event"], dropped["log_level"]) == ("unannounced.dropped", "warning")
    assert dropped["path"] == str(state.parent)
    assert dropped["reason"] == "state was written to after it was recorded"


def test_a_record_says_whose_parts_it_has_or_nothing(tmp_path: Path) -> None:
    keep(tmp_path, 100, saved_at=1.0, ranks=(2, 3))
    keep(tmp_path, 200, saved_at=2.0)
    found = unannounced(tmp_path, tmp_path / CHECKPOINT_DIRECTORY, known=())
    assert [one.ranks for one in found] == [(2, 3), ()]


def test_a_recorded_path_is_where_the_checkpoint_was_written(tmp_path: Path) -> None:
    watched = tmp_path / CHECKPOINT_DIRECTORY
    keep(tmp_path, 100, saved_at=1.0)
    keep(tmp_path, 200, saved_at=2.0, directory="outputs")
    keep(tmp_path, 300, saved_at=3.0, directory=CHECKPOINT_DIRECTORY)
    folder = tmp_path / STATE_DIRECTORY / RECORDS_DIRECTORY
    (folder / "checkpoint-400.json").write_text("{")
    paths = RecordedPaths(tmp_path, watched)
    expected = {watched / "checkpoint-100", tmp_path / "outputs/checkpoint-200"}
    expected |= {watched / "checkpoint-300", watched / "checkpoint-400"}
    assert paths.find() == expected
    (folder / "checkpoint-100.json").unlink()
    (folder / record_file("outputs", "checkpoint-200")).unlink()
    keep(tmp_path, 200, saved_at=2.0, directory="elsewhere/below")
    expected -= {watched / "checkpoint-100", tmp_path / "outputs/checkpoint-200"}
    assert paths.find() == expected | {tmp_path / "elsewhere/below/checkpoint-200"}


def change_record(volume: Path, step: int, change: dict[str, Any]) -> str:
    """Return its file's name, which goes with the directory."""
    path = volume / STATE_DIRECTORY / RECORDS_DIRECTORY / f"checkpoint-{step}.json"
    path = path.rename(path.with_name(record_file(change.get("directory", ""), path.stem)))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return path.name


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"ranks": [0] * (LOCAL_RANKS + 1)},
        {"ranks": [200_000] * 1000, "world_size": WORLD_SIZE},
        {"ranks": [1]},
        {"ranks": [-1]},
        {"world_size": 10**20},
        {"world_size": WORLD_SIZE + 1},
        {"world_size": 0},
        {"step": -5},
        {"step": STEP + 1},
        {"save": "../../../x"},
        {"save": ""},
        {"save": "a" * 129},
        {"name": "checkpoint-2"},
        {"kind": "other"},
        {"saved_at": float("nan")},
        {"saved_at": float("inf")},
        {"saved_at": -1.0},
        {"directory": "a/" * 3000},
        {"files": []},
        {"files": [{"path": "state", "size": -1}]},
        {"files": [{"path": "a" * 5000, "size": 3}]},
        {"files": [{"path": "state", "size": 3}] * (FILES_PER_RANK + 1)},
        {"committed": "yes"},
        {"others": "train.log"},
        {"others": ["a" * 5000]},
        {"others": ["train.log"] * (MOST_OTHERS + 1)},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_record_beyond_a_limit_is_refused_with_one_line_and_hides_no_other(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    for step in (100, 200, 300):
        keep(tmp_path, step, saved_at=float(step))
    name = change_record(tmp_path, 200, change)
    with capture_logs() as log:
        assert steps(tmp_path) == [100, 300]
    (line,) = log
    assert (line["event"], line["log_level"]) == ("unannounced.record_unreadable", "warning")
    assert line["record"] == name


def test_a_record_that_is_too_long_is_not_decoded(tmp_path: Path) -> None:
    keep(tmp_path, 100, saved_at=1.0)
    keep(tmp_path, 200, saved_at=2.0)
    change_record(tmp_path, 200, {"unknown": "a" * CLIENT_RECORD_BYTES})
    assert steps(tmp_path) == [100]


def test_as_many_files_as_a_rank_may_have_fit_into_the_record_that_a_client_writes(tmp_path: Path) -> None:
    files = tuple(RecordedFile(path=f"{number:040}", size_bytes=10**9) for number in range(FILES_PER_RANK))
    record = Record(
        name="many", step=1, save="a-1", kind=Kind.PERIODIC, world_size=1, saved_at=1.0, files=files, directory="."
    )
    write_record(tmp_path / STATE_DIRECTORY / RECORDS_DIRECTORY, record)
    with capture_logs() as log:
        assert steps(tmp_path) == []
    # It was read whole: what is wrong with it is what lies there.
    (dropped,) = log
    assert dropped["event"] == "unannounced.dropped"
    assert dropped["reason"].startswith(files[0].path)


def test_of_more_records_than_are_read_the_newest_count(tmp_path: Path) -> None:
    for step in range(1, CLIENT_RECORDS + 6):
        keep(tmp_path, step, saved_at=float(step))
        path = tmp_path / STATE_DIRECTORY / RECORDS_DIRECTORY / f"checkpoint-{step}.json"
        # The files are older than any of them.
        os.utime(path, ns=(time.time_ns() + step * 10**9,) * 2)
    assert steps(tmp_path) == list(range(6, CLIENT_RECORDS + 6))


def test_of_more_files_than_a_rank_may_have_those_of_the_newest_records_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FILES_PER_RANK", 2)
    for step in (100, 200, 300):
        keep(tmp_path, step, saved_at=float(step))
    with capture_logs() as log:
        assert steps(tmp_path) == [200, 300]
    (line,) = log
    assert (line["event"], line["record"]) == ("unannounced.too_many_files", "checkpoint-100.json")
