"""A Checkpointer without an agent: saving, resuming and rotating on the local disk."""

import logging
import os
from pathlib import Path

import pytest
from tests.client.checkpointer.saved_steps import Make, save, visible

from keepstep import Checkpointer, Kind
from keepstep.checkpoints.records import Record, RecordedFile, read_records, write_record


def save_half(checkpointer: Checkpointer, step: int) -> None:
    with checkpointer.save(step) as path:
        (path / "state").write_text("half")
        raise KeyboardInterrupt


def test_without_any_environment_everything_lies_below_one_local_directory(
    make_checkpointer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(make_checkpointer(volume=None), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert visible(tmp_path / "checkpoints") == ["checkpoint-1"]


def test_a_fresh_run_has_nothing_to_resume_from(make: Make) -> None:
    assert make().resume() is None


def test_what_was_saved_is_resumed_from(make: Make, directory: Path) -> None:
    save(make(), 7)
    path = make().resume()
    assert path == directory / "checkpoint-7"
    assert (path / "state").read_text() == "state of 7"


def test_nothing_has_the_final_name_before_the_block_ends(make: Make, directory: Path) -> None:
    with make().save(3) as path:
        (path / "state").write_text("x")
        assert all(name.startswith(".saving-") for name in visible(directory))
    assert visible(directory) == ["checkpoint-3"]


def test_the_users_exception_goes_through_and_leaves_nothing(make: Make, directory: Path) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with pytest.raises(KeyboardInterrupt):
        save_half(checkpointer, 2)
    assert visible(directory) == ["checkpoint-1"]
    assert [record.step for record in read_records(directory / ".keepstep/records")] == [1]


def test_a_save_is_due_every_so_many_steps_and_not_at_the_step_resumed_from(make: Make) -> None:
    checkpointer = make()
    due = [step for step in range(1, 31) if checkpointer.should_save(step, every=10)]
    assert due == [10, 20, 30]
    save(checkpointer, 30)
    again = make()
    again.resume()
    assert not again.should_save(30, every=10)
    assert again.should_save(40, every=10)
    assert not make().should_save(0, every=10)
    assert not make().should_save(10, every=0)


def test_the_same_step_saved_again_replaces_the_checkpoint(make: Make, directory: Path) -> None:
    save(make(), 5)
    with make().save(5) as path:
        (path / "other").write_text("second")
    assert visible(directory) == ["checkpoint-5"]
    assert [path.name for path in (directory / "checkpoint-5").iterdir()] == ["other"]
    resumed = make().resume()
    assert resumed is not None
    assert (resumed / "other").read_text() == "second"


def test_a_damaged_checkpoint_is_skipped_for_an_older_one(
    make: Make, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    save(checkpointer, 2)
    (directory / "checkpoint-2" / "state").write_text("cut")
    assert make().resume() == directory / "checkpoint-1"
    assert sum("checkpoint skipped: name=checkpoint-2" in message for message in caplog.messages) == 1


def test_the_record_of_a_directory_that_is_gone_is_forgotten(make: Make, directory: Path) -> None:
    save(make(), 1)
    (directory / "checkpoint-1" / "state").unlink()
    (directory / "checkpoint-1").rmdir()
    assert make().resume() is None
    assert not list((directory / ".keepstep/records").iterdir())


def test_two_complete_checkpoints_stay_while_nobody_else_has_them(make: Make, directory: Path) -> None:
    checkpointer = make(keep_local=1)
    for step in (1, 2, 3, 4):
        save(checkpointer, step)
    assert visible(directory) == ["checkpoint-3", "checkpoint-4"]


def test_a_checkpoint_that_restore_brought_as_a_file_is_resumed_from_and_rotated(make: Make, directory: Path) -> None:
    restored = directory / "model-5.pt"
    directory.mkdir()
    restored.write_bytes(b"12345")
    record = Record(
        name=restored.name,
        step=5,
        save="save-5",
        kind=Kind.PERIODIC,
        world_size=1,
        saved_at=1.0,
        files=(RecordedFile(path="", size_bytes=5),),
        committed=True,
    )
    write_record(directory / ".keepstep" / "records", record)
    checkpointer = make(keep_local=1)
    assert checkpointer.resume() == restored
    for step in (6, 7):
        save(checkpointer, step)
    assert visible(directory) == ["checkpoint-6", "checkpoint-7"]


def test_what_has_no_record_is_never_rotated(make: Make, directory: Path) -> None:
    foreign = directory / "checkpoint-0"
    foreign.mkdir(parents=True)
    checkpointer = make()
    for step in (1, 2, 3):
        save(checkpointer, step)
    assert visible(directory) == ["checkpoint-0", "checkpoint-2", "checkpoint-3"]


def test_rotation_never_takes_what_was_just_saved_behind_an_older_runs_later_step(make: Make, directory: Path) -> None:
    save(make(), 500)
    checkpointer = make()
    for step in (10, 20, 30):
        save(checkpointer, step)
    assert visible(directory) == ["checkpoint-20", "checkpoint-30", "checkpoint-500"]


def test_a_damaged_checkpoint_does_not_count_as_kept(make: Make, directory: Path) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    save(checkpointer, 2)
    (directory / "checkpoint-2" / "state").unlink()
    save(checkpointer, 3)
    assert make().resume() == directory / "checkpoint-3"
    assert (directory / "checkpoint-1").exists()


def test_leftovers_of_a_killed_process_are_removed_at_the_next_start(make: Make, directory: Path) -> None:
    save(make(), 5)
    for name in (".saving-0badf00d-c000001", ".removing-checkpoint-4-0badf00d"):
        (directory / name).mkdir()
        (directory / name / "state").write_text("x")
    make().resume()
    assert visible(directory) == ["checkpoint-5"]


def test_a_file_whose_name_is_not_utf_8_ends_no_training_and_is_resumed_from(make: Make, directory: Path) -> None:
    with make().save(1) as path:
        Path(os.fsdecode(os.fsencode(path) + b"/caf\xe9.pt")).write_text("x")
    resumed = make().resume()
    assert resumed == directory / "checkpoint-1"
    assert [os.fsencode(path.name) for path in resumed.iterdir()] == [b"caf\xe9.pt"]


def test_no_agent_is_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = make()
    for step in (1, 2, 3):
        save(checkpointer, step)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no agent" in warnings[0].message


def test_finish_returns_when_nothing_asked_to_stop(make: Make) -> None:
    checkpointer = make()
    save(checkpointer, 1, Kind.FINAL)
    checkpointer.finish()
    checkpointer.finish()
    assert not checkpointer.stopping


def test_a_duration_saves_when_it_has_passed_and_not_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("keepstep.checkpointer.time.monotonic", lambda: now[0])
    checkpointer = make()
    saved = []
    for step in range(1, 100):
        now[0] += 7.0
        if checkpointer.should_save(step, every="1m"):
            save(checkpointer, step)
            saved.append(step)
    assert saved == [9, 18, 27, 36, 45, 54, 63, 72, 81, 90, 99]
