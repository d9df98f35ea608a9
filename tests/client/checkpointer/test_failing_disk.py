"""A disk that fails costs a Checkpointer one checkpoint, and never the training."""

import errno
import os
import signal
from pathlib import Path

import pytest
from tests.client.checkpointer.saved_steps import Make, save, visible

import keepstep.checkpoints.local_checkpoints
import keepstep.session
from keepstep.checkpoints.local_checkpoints import LocalCheckpoints


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
    monkeypatch.setattr(keepstep.session, "Agent", broken)
    with pytest.raises(ImportError):
        make()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_published_checkpoint_that_is_taken_back_gives_its_name_to_the_one_before(directory: Path) -> None:
    local = LocalCheckpoints(directory, directory / ".keepstep/records", "nonce")
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
    monkeypatch.setattr(keepstep.checkpoints.local_checkpoints, "write_record", _no_space)
    save(checkpointer, 3)
    assert visible(directory) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert "not recorded" in caplog.text


def test_a_step_saved_again_without_a_record_leaves_the_recorded_one_to_resume_from(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(keepstep.checkpoints.local_checkpoints, "write_record", _no_space)
        for content in ("unrecorded", "unrecorded too"):
            with checkpointer.save(1) as path:
                (path / "state").write_text(content)
    resumed = make().resume()
    assert resumed == directory / "checkpoint-1"
    assert (resumed / "state").read_text() == "state of 1"
    assert visible(directory) == ["checkpoint-1"]


def test_a_save_of_nothing_is_no_checkpoint(make: Make, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make().save(1):
        pass
    assert visible(directory) == []
    assert "checkpoint lost" in caplog.text


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_volume_that_cannot_be_read_at_the_first_save_raises_nothing_in_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.EIO, "the volume is gone")

    checkpointer = make()
    monkeypatch.setattr(keepstep.checkpoints.local_checkpoints, "read_records", fail)
    save(checkpointer, 1)
