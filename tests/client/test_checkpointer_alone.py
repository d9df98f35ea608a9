"""A Checkpointer without an agent: saving, resuming and rotating on the local disk."""

import errno
import gc
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import mooring.checkpoints.local_checkpoints
import mooring.session
from mooring import Checkpointer, Kind, UsageError
from mooring.checkpoints.local_checkpoints import LocalCheckpoints
from mooring.checkpoints.records import Record, RecordedFile, read_records, write_record

Make = Callable[..., Checkpointer]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def make(make_checkpointer: Make, directory: Path) -> Make:
    return lambda **arguments: make_checkpointer(volume=None, directory=directory, **arguments)


def save(checkpointer: Checkpointer, step: int, kind: Kind | None = None) -> None:
    with checkpointer.save(step, kind) as path:
        (path / "state").write_text(f"state of {step}")


def save_half(checkpointer: Checkpointer, step: int) -> None:
    with checkpointer.save(step) as path:
        (path / "state").write_text("half")
        raise KeyboardInterrupt


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".mooring")


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
        assert all(name.startswith(".saving-checkpoint-3-") for name in visible(directory))
    assert visible(directory) == ["checkpoint-3"]


def test_the_users_exception_goes_through_and_leaves_nothing(make: Make, directory: Path) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with pytest.raises(KeyboardInterrupt):
        save_half(checkpointer, 2)
    assert visible(directory) == ["checkpoint-1"]
    assert [record.step for record in read_records(directory / ".mooring/records")] == [1]


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
    assert not list((directory / ".mooring/records").iterdir())


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
    write_record(directory / ".mooring" / "records", record)
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


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(make: Make, directory: Path) -> None:
    save(make(), 5)
    (directory / "checkpoint-5").rename(directory / ".replaced-checkpoint-5-0badf00d")
    assert make().resume() == directory / "checkpoint-5"


def test_leftovers_of_a_killed_process_are_removed_at_the_next_start(make: Make, directory: Path) -> None:
    save(make(), 5)
    for name in (".saving-checkpoint-6-0badf00d", ".removing-checkpoint-4-0badf00d", ".replaced-checkpoint-5-0badf00d"):
        (directory / name).mkdir()
        (directory / name / "state").write_text("x")
    make().resume()
    assert visible(directory) == ["checkpoint-5"]


def test_a_failing_fsync_costs_the_checkpoint_and_not_the_training(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        save(checkpointer, 2)
    assert visible(directory) == ["checkpoint-1"]
    assert "checkpoint lost: name=checkpoint-2" in caplog.text
    save(checkpointer, 3)
    assert visible(directory) == ["checkpoint-1", "checkpoint-3"]


def test_a_volume_that_does_not_even_say_what_is_on_it_costs_the_checkpoint_and_not_the_training(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        # Path.is_dir raises all but a few errors, as EIO of a dead mount.
        patch.setattr(Path, "is_dir", _no_space)
        save(checkpointer, 2)
    assert "checkpoint lost: name=checkpoint-2" in caplog.text


def test_a_just_in_time_save_that_is_lost_is_tried_again_at_the_next_step(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make()
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.should_save(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        save(checkpointer, 1)
    assert not checkpointer.stopping
    assert checkpointer.should_save(2)
    save(checkpointer, 2)
    assert checkpointer.stopping
    assert visible(directory) == ["checkpoint-2"]


def test_whoever_cannot_have_a_checkpointer_keeps_sigterm(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ImportError("grpc was built for another Python")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(mooring.session, "Agent", broken)
    with pytest.raises(ImportError):
        make()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_published_checkpoint_that_is_taken_back_gives_its_name_to_the_one_before(directory: Path) -> None:
    local = LocalCheckpoints(directory, directory / ".mooring/records", "nonce")
    for content in ("first", "second"):
        (local.begin("checkpoint-1") / "state").write_text(content)
        local.publish("checkpoint-1")
    local.take_back("checkpoint-1")
    assert (directory / "checkpoint-1" / "state").read_text() == "first"
    assert visible(directory) == ["checkpoint-1"]


def test_a_rename_that_fails_leaves_the_earlier_checkpoint_of_that_name(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    rename = Path.rename

    def fail_for_new(path: Path, target: Path) -> Path:
        if path.name.startswith(".saving-"):
            raise OSError(errno.EIO, "rename failed")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    save(checkpointer, 1)
    assert visible(directory) == ["checkpoint-1"]
    assert make().resume() == directory / "checkpoint-1"


def test_a_record_that_cannot_be_written_stops_the_rotation_alone(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    save(checkpointer, 2)
    monkeypatch.setattr(mooring.checkpoints.local_checkpoints, "write_record", _no_space)
    save(checkpointer, 3)
    assert visible(directory) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert "not recorded" in caplog.text


def test_a_step_saved_again_without_a_record_leaves_the_recorded_one_to_resume_from(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(mooring.checkpoints.local_checkpoints, "write_record", _no_space)
        for content in ("unrecorded", "unrecorded too"):
            with checkpointer.save(1) as path:
                (path / "state").write_text(content)
    resumed = make().resume()
    assert resumed == directory / "checkpoint-1"
    assert (resumed / "state").read_text() == "state of 1"
    assert visible(directory) == ["checkpoint-1"]


def test_a_file_whose_name_is_not_utf_8_ends_no_training_and_is_resumed_from(make: Make, directory: Path) -> None:
    with make().save(1) as path:
        Path(os.fsdecode(os.fsencode(path) + b"/caf\xe9.pt")).write_text("x")
    resumed = make().resume()
    assert resumed == directory / "checkpoint-1"
    assert [os.fsencode(path.name) for path in resumed.iterdir()] == [b"caf\xe9.pt"]


def test_a_save_of_nothing_is_no_checkpoint(make: Make, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make().save(1):
        pass
    assert visible(directory) == []
    assert "checkpoint lost" in caplog.text


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


@pytest.mark.parametrize(("step", "kind"), [(-1, None), (1, "finale")])
def test_arguments_that_make_no_sense_are_refused_before_anything_is_written(
    make: Make, directory: Path, step: int, kind: str | None
) -> None:
    checkpointer = make()
    with pytest.raises(UsageError), checkpointer.save(step, kind):
        pass
    assert visible(directory) == []


def test_a_rank_above_0_without_a_process_group_is_told_what_to_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="rank 1 would save alone") as raised:
        make().resume()
    assert "rank0_only=True" in raised.value.hint


def test_one_process_may_save_for_all(make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    save(make(rank0_only=True), 1)
    assert visible(directory) == ["checkpoint-1"]


def test_keeping_no_checkpoint_is_refused(make: Make) -> None:
    with pytest.raises(UsageError):
        make(keep_local=0)


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("use", [lambda save: save / "state.pt", os.fspath], ids=["joined", "as a path"])
def test_a_save_that_is_used_without_with_is_refused(make: Make, directory: Path, use: Callable[..., object]) -> None:
    with pytest.raises(UsageError) as raised:
        use(make().save(1))
    assert "with checkpointer.save(1)" in raised.value.hint
    assert visible(directory) == []


def test_a_save_that_is_never_entered_is_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make().save(3)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if "`with`" in record.getMessage()] != []


def test_a_checkpoint_that_nobody_read_is_said_when_an_earlier_step_is_saved(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    save(make(), 100)
    fresh = make()
    save(fresh, 1)
    save(fresh, 2)
    assert [record.args for record in caplog.records if "nothing has read it" in record.msg] == [(100, 1)]


@pytest.mark.parametrize("resumes", [True, False])
def test_who_resumes_or_is_past_what_is_here_hears_nothing(
    make: Make, caplog: pytest.LogCaptureFixture, resumes: bool
) -> None:
    save(make(), 100)
    fresh = make()
    if resumes:
        fresh.resume()
    save(fresh, 1 if resumes else 101)
    assert "nothing has read it" not in caplog.text


def test_a_duration_saves_when_it_has_passed_and_not_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("mooring.checkpointer.time.monotonic", lambda: now[0])
    checkpointer = make()
    saved = []
    for step in range(1, 100):
        now[0] += 7.0
        if checkpointer.should_save(step, every="1m"):
            save(checkpointer, step)
            saved.append(step)
    assert saved == [9, 18, 27, 36, 45, 54, 63, 72, 81, 90, 99]


def test_an_interval_that_makes_no_sense_is_refused_at_the_first_step(make: Make) -> None:
    with pytest.raises(UsageError):
        make().should_save(1, every="soon")


def test_a_volume_that_cannot_be_read_at_the_first_save_raises_nothing_in_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.EIO, "the volume is gone")

    checkpointer = make()
    monkeypatch.setattr(mooring.checkpoints.local_checkpoints, "read_records", fail)
    save(checkpointer, 1)
