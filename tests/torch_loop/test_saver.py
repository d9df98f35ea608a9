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
from keepstep.checkpoint_writer import CheckpointWriter
from keepstep.torch_loop import TrainingState
from keepstep.torch_loop.saver import Saver
from keepstep.torch_loop.storage import Storage

Make = Callable[[], Checkpointer]


class HeldStorage(Storage):
    """Writes nothing before `release` is set, and says what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.order: list[str] = []

    def save(self, state: dict[str, Any], directory: Path, **options: Any) -> None:
        assert self.release.wait(HANG_SECONDS)
        super().save(state, directory, **options)
        self.order.append("written")


class Told(Saver):
    """Says when it copies."""

    def __init__(self, storage: HeldStorage) -> None:
        super().__init__(storage)
        self._held = storage

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        self._held.order.append("copied")
        return super()._copy(state)


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
    saver.close()
    assert small.everything() != at_3
    rest = resumed(directory / "checkpoint-3", make_loader("plain", workers=0, augments=True))
    assert rest.everything() == at_3
    assert rest.train(6) == trained(6).losses[3:]


def test_the_copy_is_not_made_anew_before_the_last_save_is_written(make_checkpointer: Make, directory: Path) -> None:
    checkpointer, small, storage = make_checkpointer(), trained(3), HeldStorage()
    saver = Told(storage)
    saver.save(checkpointer.begin(3), small.state.capture)
    at_3 = small.everything()
    small.train(4)
    at_4 = small.everything()
    with pytest.raises(AssertionError, match="in use"):
        saver.save(checkpointer.begin(4), small.state.capture)
    waiting = threading.Thread(target=saver.wait)
    waiting.start()
    assert storage.order == ["copied"]
    storage.release.set()
    waiting.join(HANG_SECONDS)
    saver.save(checkpointer.begin(4), small.state.capture)
    saver.close()
    assert storage.order == ["copied", "written", "copied", "written"]
    assert resumed(directory / "checkpoint-3").everything() == at_3
    assert resumed(directory / "checkpoint-4").everything() == at_4


def test_a_second_copy_takes_no_new_memory(make_checkpointer: Make) -> None:
    checkpointer, small, storage = make_checkpointer(), trained(2), HeldStorage()
    storage.release.set()
    written: list[list[int]] = []

    class Seen(Saver):
        def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
            copied = super()._copy(state)
            optimizer = copied["optimizer"]["state"]
            written.append([values["exp_avg"].data_ptr() for values in optimizer.values()])
            return copied

    saver = Seen(storage)
    saver.warm_up(small.state.capture)
    saver.wait()
    made = {memory.data_ptr() for memory in saver._stager._state_dict_stager._cached_storage_mapping.values()}
    for step in (3, 4):
        saver.wait()
        small.train(step)
        saver.save(checkpointer.begin(step), small.state.capture)
    saver.close()
    assert written[0] == written[1]
    assert set(written[0]) <= made


def test_it_does_not_write_into_shared_memory() -> None:
    assert not Saver(Storage())._stager._config.use_shared_memory


def test_a_save_that_cannot_be_written_costs_a_warning(
    make_checkpointer: Make, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer, small = make_checkpointer(), trained(3)
    saver = Saver(small.state.storage)
    with monkeypatch.context() as failing:
        failing.setattr(dcp.FileSystemWriter, "write_data", full)
        saver.save(checkpointer.begin(3), small.state.capture)
        saver.wait()
    assert saver.saved_step is None
    assert [path.name for path in directory.iterdir()] == [".keepstep"]
    warnings = [record.message for record in caplog.records if record.name == "keepstep" and "step=3" in record.message]
    assert len(warnings) == 1
    assert "given up, training goes on" in warnings[0]
    assert "No space left" in warnings[0]
    small.train(4)
    saver.save(checkpointer.begin(4), small.state.capture)
    saver.close()
    assert saver.saved_step == 4
    assert resumed(directory / "checkpoint-4").everything() == small.everything()


@pytest.mark.parametrize("how", ["save", "save_now"])
def test_an_error_that_nobody_thought_of_costs_a_warning(
    how: str,
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
        getattr(saver, how)(checkpointer.begin(3), small.state.capture)
        saver.wait()
    assert saver.saved_step is None
    assert [path.name for path in directory.iterdir()] == [".keepstep"]
    assert "given up, training goes on: step=3" in caplog.text
    assert "not this one" in caplog.text
    saver.save(checkpointer.begin(4), small.state.capture)
    saver.close()
    assert saver.saved_step == 4


@pytest.mark.parametrize("how", ["save", "save_now"])
def test_a_state_that_cannot_be_had_costs_a_warning(
    how: str, make_checkpointer: Make, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def capture() -> dict[str, Any]:
        raise MemoryError("no room for it")

    saver = Saver(Storage())
    getattr(saver, how)(make_checkpointer().begin(1), capture)
    saver.close()
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
    addresses: list[set[int]] = []

    class Seen(Saver):
        def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
            copied = super()._copy(state)
            tensors = [value.to_local() for value in copied["model"].values()]
            tensors += [values["exp_avg"].to_local() for values in copied["optimizer"]["state"].values()]
            addresses.append({tensor.data_ptr() for tensor in tensors})
            return copied

    saver = Seen(storage)
    weights = {}
    train_sharded(model, state)
    saver.warm_up(state.capture)
    saver.wait()
    made = {memory.data_ptr() for memory in saver._stager._state_dict_stager._cached_storage_mapping.values()}
    for step in (1, 2):
        train_sharded(model, state)
        saver.wait()
        weights[step] = [parameter.full_tensor().clone() for parameter in model.parameters()]
        storage.release.clear()
        saver.save(checkpointer.begin(step), state.capture)
        train_sharded(model, state)
        storage.release.set()
    saver.close()
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) == 8
    assert addresses[0] <= made
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
