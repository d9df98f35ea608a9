"""Saves that are written while training goes on: what they contain, and what becomes of one that fails."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.harness.bounds import HANG_SECONDS
from tests.torch_loop.small import Small, make_loader, resumed
from torch.distributed.fsdp import fully_shard

from keepstep import Checkpointer
from keepstep.asynchronous_saves import host_memory
from keepstep.asynchronous_saves.host_copy import copied_bytes
from keepstep.checkpoint_writer import CheckpointWriter
from keepstep.checkpoints.records import Kind
from keepstep.torch_loop import TrainingState
from keepstep.torch_loop.saver import Saver
from keepstep.torch_loop.storage import Storage

Make = Callable[[], Checkpointer]


class HeldStorage(Storage):
    """Writes nothing before `release` is set, and says what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.release = threading.Event()
        self.order: list[str] = []

    def save(self, state: dict[str, Any], directory: Path, **options: Any) -> None:
        self.begun.set()
        assert self.release.wait(HANG_SECONDS)
        super().save(state, directory, **options)
        self.order.append("written")


def trained(steps: int) -> Small:
    small = Small(make_loader("plain", workers=0, augments=True))
    small.train(steps)
    return small


def test_what_is_trained_while_a_save_is_written_is_not_in_it(make_checkpointer: Make, directory: Path) -> None:
    checkpointer, small, storage = make_checkpointer(), trained(3), HeldStorage()
    saver = Saver(storage)
    saver.save(checkpointer.begin(3), small.state.capture)
    at_3 = small.everything()
    small.train(6)
    storage.release.set()
    assert checkpointer.wait()
    assert saver.saved_step == 3
    assert small.everything() != at_3
    rest = resumed(directory / "checkpoint-3", make_loader("plain", workers=0, augments=True))
    assert rest.everything() == at_3
    assert rest.train(6) == trained(6).losses[3:]


def test_the_copy_is_not_made_anew_before_the_last_save_is_written(make_checkpointer: Make, directory: Path) -> None:
    checkpointer, small, storage = make_checkpointer(), trained(3), HeldStorage()
    saver = Saver(storage)
    saver.save(checkpointer.begin(3), small.state.capture)
    at_3 = small.everything()
    small.train(4)
    at_4 = small.everything()
    assert storage.order == []
    threading.Timer(0.2, storage.release.set).start()
    second = checkpointer.begin(4)
    assert storage.order == ["written"]
    saver.save(second, small.state.capture)
    assert checkpointer.wait()
    assert resumed(directory / "checkpoint-3").everything() == at_3
    assert resumed(directory / "checkpoint-4").everything() == at_4


def test_no_copy_takes_more_memory_than_was_made_for_it(make_checkpointer: Make) -> None:
    small, checkpointer = trained(2), make_checkpointer()
    checkpointer.reserve(copied_bytes(small.state.capture()))
    memory = checkpointer._writer._memory
    made_bytes = memory.size_bytes
    assert made_bytes > 0
    saver = Saver(Storage())
    for step in (3, 4):
        small.train(step)
        saver.save(checkpointer.begin(step), small.state.capture)
        assert memory.copies
    assert checkpointer.wait()
    assert checkpointer._writer._memory is memory
    assert memory.size_bytes == made_bytes


def test_a_save_without_memory_for_a_copy_is_written_at_once(
    make_checkpointer: Make, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 0)
    checkpointer, small = make_checkpointer(), trained(3)
    saver = Saver(Storage())
    saver.save(checkpointer.begin(3), small.state.capture)
    assert saver.saved_step == 3
    assert resumed(directory / "checkpoint-3").everything() == small.everything()


@pytest.mark.parametrize("begun", [True, False])
def test_a_save_that_is_given_up_for_the_just_in_time_one_writes_nothing_more(
    begun: bool, make_checkpointer: Make, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer, small, storage = make_checkpointer(), trained(3), HeldStorage()
    saver = Saver(storage)
    saving = checkpointer.begin(3)
    if not begun:
        checkpointer._writer.submit(lambda: storage.release.wait(HANG_SECONDS))
    saver.save(saving, small.state.capture)
    if begun:
        assert storage.begun.wait(HANG_SECONDS)
    assert checkpointer._writer.in_flight() is not None
    checkpointer._writer.give_up("there is no time")
    storage.release.set()
    assert checkpointer.wait()
    assert checkpointer._writer.in_flight() is None
    assert saver.saved_step is None
    assert [path.name for path in directory.iterdir()] == [".keepstep"]
    assert "checkpoint given up, training goes on: step=3 error=InterruptedError: there is no time" in caplog.text
    assert "volume is full" not in caplog.text
    small.train(4)
    saver.save(checkpointer.begin(4), small.state.capture)
    assert checkpointer.wait()
    assert resumed(directory / "checkpoint-4").everything() == small.everything()


def test_a_save_that_cannot_be_written_costs_a_warning(
    make_checkpointer: Make, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer, small = make_checkpointer(), trained(3)
    saver = Saver(small.state.storage)
    with monkeypatch.context() as failing:
        failing.setattr(dcp.FileSystemWriter, "write_data", full)
        saver.save(checkpointer.begin(3), small.state.capture)
        assert checkpointer.wait()
    assert saver.saved_step is None
    assert [path.name for path in directory.iterdir()] == [".keepstep"]
    warnings = [record.message for record in caplog.records if record.name == "keepstep" and "step=3" in record.message]
    assert len(warnings) == 1
    assert "given up, training goes on" in warnings[0]
    assert "No space left" in warnings[0]
    small.train(4)
    saver.save(checkpointer.begin(4), small.state.capture)
    assert checkpointer.wait()
    assert saver.saved_step == 4
    assert resumed(directory / "checkpoint-4").everything() == small.everything()


@pytest.mark.parametrize("kind", [Kind.PERIODIC, Kind.FINAL])
def test_an_error_that_nobody_thought_of_costs_a_warning(
    kind: Kind,
    make_checkpointer: Make,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> bool:
        raise ValueError("not this one")

    checkpointer, small = make_checkpointer(), trained(3)
    saver = Saver(small.state.storage)
    with monkeypatch.context() as failing:
        failing.setattr(CheckpointWriter, "complete", fail)
        saver.save(checkpointer.begin(3, kind), small.state.capture)
        assert checkpointer.wait()
    assert saver.saved_step is None
    assert [path.name for path in directory.iterdir()] == [".keepstep"]
    assert "given up, training goes on: step=3" in caplog.text
    assert "not this one" in caplog.text
    saver.save(checkpointer.begin(4), small.state.capture)
    assert checkpointer.wait()
    assert saver.saved_step == 4


@pytest.mark.parametrize("kind", [Kind.PERIODIC, Kind.FINAL])
def test_a_state_that_cannot_be_had_costs_a_warning(
    kind: Kind, make_checkpointer: Make, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def capture() -> dict[str, Any]:
        raise MemoryError("no room for it")

    saver = Saver(Storage())
    saver.save(make_checkpointer().begin(1, kind), capture)
    assert "no room for it" in caplog.text
    assert [path.name for path in directory.iterdir()] == [".keepstep"]


def full(*_: object) -> torch.futures.Future[list[object]]:
    raise OSError(28, "No space left on device")


@pytest.fixture
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_of_sharded_weights_too_a_copy_is_written_and_its_memory_kept(make_checkpointer: Make, directory: Path) -> None:
    checkpointer, storage = make_checkpointer(), HeldStorage()
    model, state = sharded(storage)
    saver = Saver(storage)
    weights = {}
    train_sharded(model, state)
    checkpointer.reserve(copied_bytes(state.capture()))
    memory = checkpointer._writer._memory
    made_bytes = memory.size_bytes
    for step in (1, 2):
        train_sharded(model, state)
        saving = checkpointer.begin(step)
        weights[step] = [parameter.full_tensor().clone() for parameter in model.parameters()]
        storage.release.clear()
        saver.save(saving, state.capture)
        train_sharded(model, state)
        storage.release.set()
    assert checkpointer.wait()
    assert made_bytes > 0
    assert checkpointer._writer._memory is memory
    assert memory.size_bytes == made_bytes
    for step, expected in weights.items():
        other, restored = sharded(Storage())
        restored.restore(directory / f"checkpoint-{step}")
        for parameter, value in zip(other.parameters(), expected, strict=True):
            assert torch.equal(parameter.full_tensor(), value)


def sharded(storage: Storage) -> tuple[Any, TrainingState]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    state = TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    state.storage = storage
    return model, state


def train_sharded(model: Any, state: TrainingState) -> None:
    model(torch.randn(4, 8)).square().mean().backward()
    state._optimizer.step()
    state._optimizer.zero_grad()
