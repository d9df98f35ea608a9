"""The loop in one process: when it saves and what, how it resumes, and how it ends."""

import functools
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.torch_loop.small import EPOCH, Small, make_loader, resumed

from keepstep import Checkpointer, Kind, VolumeError
from keepstep.checkpoints.records import read_records
from keepstep.torch_loop import TorchLoop

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

Make = Callable[..., Checkpointer]
STOPPED = Path(__file__).with_name("stopped_while_saving.py")


class Trained(Small):
    """The small training, by a TorchLoop."""

    def __init__(self, checkpointer: Checkpointer, *, seed: int = 0) -> None:
        loader = make_loader("stateful", workers=0, augments=True)
        super().__init__(loader, seed=seed)
        self.loop = TorchLoop(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            loader=loader,
            checkpointer=checkpointer,
        )

    def run(self, *, steps: int | None = None, epochs: int | None = None, every: int = 0) -> list[str]:
        for batch in self.loop.batches(steps=steps, epochs=epochs):
            self.backward(batch)
            self.step()
            self.loop.step(every=every)
        return self.losses


def saved(directory: Path) -> dict[int, Kind]:
    return {record.step: record.kind for record in read_records(directory / ".keepstep" / "records")}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_it_saves_when_it_is_due_and_at_the_end(asynchronous: bool, make_checkpointer: Make, directory: Path) -> None:
    trained = Trained(make_checkpointer(asynchronous=asynchronous))
    for batch in trained.loop.batches(steps=8):
        trained.backward(batch)
        trained.step()
        trained.loop.step(every=3)
    trained.loop.finish()
    assert saved(directory) == {3: Kind.PERIODIC, 6: Kind.PERIODIC, 8: Kind.FINAL}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_last_step_that_cannot_be_saved_is_tried_once_more_and_left(
    asynchronous: bool, make_checkpointer: Make, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make_checkpointer(asynchronous=asynchronous)
    trained = Trained(checkpointer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def train() -> None:
        for batch in trained.loop.batches(steps=8):
            trained.backward(batch)
            trained.step()
            if trained.loop.steps_done == 3:
                checkpointer.wait()
                os.kill(os.getpid(), signal.SIGTERM)
                # Enough for what is no checkpoint.
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
            trained.loop.step(every=2)

    try:
        with pytest.raises(SystemExit) as left:
            train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left.value.code == 75
    assert saved(directory) == {2: Kind.PERIODIC}
    assert "leaving at step 5, which is not stored: the steps after 2 are lost" in caplog.messages
    assert sum("given up" in message for message in caplog.messages) == 2


def test_with_a_recovery_point_there_is_no_interval_in_steps(
    make_checkpointer: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(make_checkpointer())
    for batch in trained.loop.batches(steps=8):
        trained.backward(batch)
        trained.step()
        trained.loop.step(recovery_point="1h", max_overhead=0.01)
        if trained.loop.steps_done == 4:
            # Without an agent the client keeps it.
            later = time.monotonic() + 3601
            monkeypatch.setattr(time, "monotonic", functools.partial(float, later))
    monkeypatch.undo()
    trained.loop.finish()
    assert saved(directory) == {5: Kind.PERIODIC, 8: Kind.FINAL}


def test_the_last_step_is_not_saved_twice(make_checkpointer: Make, directory: Path) -> None:
    trained = Trained(make_checkpointer())
    trained.run(steps=6, every=3)
    trained.loop.finish()
    assert saved(directory) == {3: Kind.PERIODIC, 6: Kind.PERIODIC}


def test_a_run_that_is_complete_trains_and_saves_nothing_when_it_is_started_again(
    make_checkpointer: Make, directory: Path
) -> None:
    first = Trained(make_checkpointer())
    first.run(steps=5)
    first.loop.finish()
    before = (directory / "checkpoint-5" / ".metadata").stat()
    again = Trained(make_checkpointer())
    assert again.run(steps=5) == []
    again.loop.finish()
    assert (directory / "checkpoint-5" / ".metadata").stat().st_ino == before.st_ino


def test_started_again_it_goes_on_bit_identical(make_checkpointer: Make) -> None:
    whole = Small(make_loader("stateful", workers=0, augments=True))
    whole.train(2 * EPOCH + 3)
    first = Trained(make_checkpointer())
    losses = list(first.run(steps=EPOCH + 2, every=5))
    first.loop.finish()
    second = Trained(make_checkpointer(), seed=99)
    assert second.loop.steps_done == EPOCH + 2
    assert second.loop.epoch == 1
    assert losses + second.run(steps=2 * EPOCH + 3) == whole.losses
    second.loop.finish()


def test_it_trains_as_many_epochs_as_it_is_told(make_checkpointer: Make) -> None:
    trained = Trained(make_checkpointer())
    assert len(trained.run(epochs=2)) == 2 * EPOCH
    trained.loop.finish()


def test_a_volume_with_no_room_costs_a_warning(
    make_checkpointer: Make, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    trained = Trained(make_checkpointer())
    with monkeypatch.context() as failing:
        failing.setattr(Path, "mkdir", full)
        trained.run(steps=4, every=4)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in warnings if "not saved, training goes on" in text]) == 1
    trained.run(steps=6, every=6)
    trained.loop.finish()
    assert saved(directory) == {6: Kind.PERIODIC}


def test_a_last_step_that_cannot_be_saved_is_not_lost_in_silence(
    make_checkpointer: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = signal.getsignal(signal.SIGTERM)
    checkpointer = make_checkpointer()
    trained = Trained(checkpointer)
    trained.run(steps=5, every=4)
    checkpointer.wait()
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(VolumeError, match="the final checkpoint of step 5 was lost"):
        trained.loop.finish()
    assert signal.getsignal(signal.SIGTERM) == before
    assert saved(directory) == {4: Kind.PERIODIC}


def test_sigterm_while_a_save_is_written_leaves_both_checkpoints_whole(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    environment = {**os.environ, "KEEPSTEP_CHECKPOINT_DIRECTORY": str(directory)}
    result = subprocess.run(
        [sys.executable, str(STOPPED)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert saved(directory) == {5: Kind.PERIODIC, 6: Kind.JUST_IN_TIME}, result.stderr
    # It went on training while checkpoint 5 was written, and wrote 6 after it.
    assert result.stdout.split() == ["5", "begun", "6", "stopped", "5", "written", "6", "written"]
    whole = Small(make_loader("plain", workers=0, augments=True))
    whole.train(10)
    for step in (5, 6):
        rest = resumed(directory / f"checkpoint-{step}", make_loader("plain", workers=0, augments=True))
        assert rest.train(10) == whole.losses[step:]
        assert rest.everything() == whole.everything()
