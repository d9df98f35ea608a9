"""A disk that fails costs a Checkpointer one checkpoint, and never the training."""

import errno
import os
import signal
from pathlib import Path

import pytest
from tests.client.checkpointer.saved_steps import Make, save, visible

import keepstep.checkpoints.local_checkpoints
import keepstep.checkpoints.staged_save
import keepstep.publishing
import keepstep.session


def test_a_failing_fsync_costs_the_checkpoint_and_not_the_training(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        save(checkpointer, 2)
    assert visible(directory) == ["checkpoint-1"]
    assert f"checkpoint lost: path={directory / 'checkpoint-2'}" in caplog.text
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
    assert f"checkpoint lost: path={directory / 'checkpoint-2'}" in caplog.text


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


def test_a_checkpoint_that_cannot_be_moved_to_its_name_is_moved_at_the_next_start(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(keepstep.checkpoints.staged_save, "_replace", _no_space)
        save(checkpointer, 2)
    assert "checkpoint-2" not in visible(directory)
    assert make().resume() == directory / "checkpoint-2"
    assert visible(directory) == ["checkpoint-1", "checkpoint-2"]


def test_a_record_that_cannot_be_written_stops_the_rotation_and_is_written_at_the_next_start(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    save(checkpointer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(keepstep.checkpoints.staged_save, "write_record", _no_space)
        patch.setattr(keepstep.publishing, "write_record", _no_space)
        save(checkpointer, 3)
    assert "checkpoint not recorded" in caplog.text
    assert {"checkpoint-1", "checkpoint-2", "checkpoint-3"} <= set(visible(directory))
    assert make().resume() == directory / "checkpoint-3"


def test_a_step_saved_again_whose_record_fails_is_the_newer_one_at_the_next_start(
    make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(keepstep.checkpoints.staged_save, "write_record", _no_space)
        patch.setattr(keepstep.publishing, "write_record", _no_space)
        for content in ("unrecorded", "unrecorded too"):
            with checkpointer.save(1) as path:
                (path / "state").write_text(content)
    resumed = make().resume()
    assert resumed == directory / "checkpoint-1"
    assert (resumed / "state").read_text() == "unrecorded too"
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
