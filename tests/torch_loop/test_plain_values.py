"""Checkpoints come from a bucket that others may write: what a hostile one does on load, and what may be saved."""

import collections
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.torch_loop.small import Small, make_loader, resumed
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import WriteItem

from keepstep import Checkpointer, ErrorKind, UsageError
from keepstep.checkpoints.records import read_records
from keepstep.torch_loop import TorchLoop, TrainingState, plain_values
from keepstep.torch_loop.plain_values import PlainReader, decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

Make = Callable[[], Checkpointer]


class Hostile:
    """Its pickle makes a directory when it is loaded."""

    def __init__(self, ran: Path) -> None:
        self._ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._ran),)


class HostilePlanner(DefaultSavePlanner):
    """Writes a hostile pickle in the place of one item of the checkpoint."""

    def __init__(self, name: str, ran: Path) -> None:
        super().__init__()
        self._name, self._ran = name, ran

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn != self._name:
            return super().resolve_data(write_item)
        # What is bytes already is what a part of the training encoded; DCP puts its own pickle around it.
        inner = self._name == "shared" or self._name.startswith("ranks.")
        hostile: Any = Hostile(self._ran)
        return io.BytesIO(encode(encode(hostile) if inner else hostile))


def save_with_hostile_item(small: Small, directory: Path, name: str, ran: Path) -> None:
    dcp.save(
        small.state.capture(),
        storage_writer=dcp.FileSystemWriter(directory),
        planner=HostilePlanner(name, ran),
        no_dist=True,
    )


@pytest.fixture
def small() -> Small:
    made = Small(make_loader("plain", workers=0, augments=False))
    made.train(2)
    return made


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["shared", "ranks.0", "optimizer.param_groups.0.lr"])
def test_a_pickle_in_an_item_of_a_checkpoint_runs_nothing_and_is_named(small: Small, name: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    save_with_hostile_item(small, tmp_path / "checkpoint", name, ran)
    with pytest.raises(UsageError, match=rf"{name} is not a plain value, it names posix\.mkdir") as raised:
        resumed(tmp_path / "checkpoint")
    assert not ran.exists()
    assert raised.value.kind is ErrorKind.PICKLE_REFUSED
    assert "trust_pickle=True" in raised.value.hint


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_who_trusts_pickle_gets_what_torch_would_do(small: Small, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    name = "optimizer.param_groups.0.lr"
    save_with_hostile_item(small, tmp_path / "checkpoint", name, ran)
    trusting = TrainingState(small.model, small.optimizer, trust_pickle=True)
    trusting.restore(tmp_path / "checkpoint")
    assert ran.is_dir()


@pytest.mark.parametrize("metadata", ["hostile", "of another module", "a dict", "another file"])
def test_the_metadata_of_a_checkpoint_runs_nothing_and_leads_nowhere_else(
    small: Small, metadata: str, tmp_path: Path
) -> None:
    ran, directory = tmp_path / "ran", tmp_path / "checkpoint"
    small.state.save(directory)
    path = directory / ".metadata"
    read = PlainReader(directory).read_metadata()
    for stored in read.storage_data.values():
        stored.relative_path = "../secret"
    contents: dict[str, object] = {
        "hostile": Hostile(ran),
        "of another module": collections.OrderedDict,
        "a dict": {},
        "another file": read,
    }
    path.write_bytes(pickle.dumps(contents[metadata]))
    with pytest.raises(UsageError, match="does not hold the state of this training"):
        resumed(directory)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["os", "torch", "is_dataclass"])
def test_the_metadata_names_nothing_that_dcps_module_has_imported(small: Small, name: str, tmp_path: Path) -> None:
    small.state.save(tmp_path)
    module = b"torch.distributed.checkpoint.filesystem"
    (tmp_path / ".metadata").write_bytes(b"c" + module + b"\n" + name.encode() + b"\n.")
    with pytest.raises(pickle.UnpicklingError, match=name):
        PlainReader(tmp_path).read_metadata()


def test_everything_that_a_training_keeps_is_loaded_by_nothing_but_plain_values(tmp_path: Path) -> None:
    whole = Small(make_loader("stateful-random", workers=2, augments=False))
    whole.train(5)
    whole.state.save(tmp_path)
    assert resumed(tmp_path, make_loader("stateful-random", workers=2, augments=False)).everything() == (
        whole.everything()
    )


class Schedule:
    """A scheduler of the program's own."""

    def __init__(self, kept: object) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, object]:
        return {"last_epoch": 3, "kept": [self.kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"][0]


def state_with(kept: object, **options: Any) -> TrainingState:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return TrainingState(model, optimizer, scheduler=Schedule(kept), **options)


@pytest.mark.parametrize("kept", [collections.deque([1]), numpy.float64(0.5), numpy.zeros(2), Path("x"), len])
def test_what_could_not_be_loaded_is_refused_when_it_is_saved_by_its_name(kept: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"scheduler\.kept\.0 is a .*{type(kept).__qualname__}") as raised:
        state_with(kept).save(tmp_path)
    assert "trust_pickle=True" in raised.value.hint
    trusting = state_with(kept, trust_pickle=True)
    trusting.save(tmp_path)
    with pytest.raises(UsageError, match=r"shared is not a plain value"):
        state_with(None).restore(tmp_path)
    again = state_with(None, trust_pickle=True)
    again.restore(tmp_path)
    assert type(again._scheduler.kept) is type(kept)


@pytest.mark.parametrize(
    "kept",
    [None, 1.5, "a", b"b", (1, [2, {"c": {3}}]), 1j, torch.ones(2), torch.float16, collections.Counter("ab")],
    ids=repr,
)
def test_a_plain_value_comes_back_as_it_was(kept: object, tmp_path: Path) -> None:
    state_with(kept).save(tmp_path)
    again = state_with("another")
    again.restore(tmp_path)
    if isinstance(kept, torch.Tensor):
        assert torch.equal(again._scheduler.kept, kept)
    else:
        assert again._scheduler.kept == kept


def test_a_class_that_the_program_told_torch_is_safe_is_saved_and_loaded(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Schedule]):
        state_with(Schedule("inner")).save(tmp_path)
        again = state_with(None)
        again.restore(tmp_path)
    assert again._scheduler.kept.kept == "inner"


def test_a_learning_rate_that_is_no_plain_number_is_refused_by_its_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=numpy.float64(0.5))
    with pytest.raises(UsageError, match=r"optimizer\.param_groups\.0\.lr is a numpy\.float64"):
        TrainingState(model, optimizer).save(tmp_path)


def test_a_loop_refuses_at_its_first_step_and_not_when_the_pod_ends(make_checkpointer: Make, directory: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = Schedule(Path("x"))
    loop = TorchLoop(model, optimizer, scheduler=schedule, checkpointer=make_checkpointer())
    with pytest.raises(UsageError, match=r"scheduler\.kept\.0 is a pathlib\.PosixPath"):
        loop.step(every=100)
    trusting = TorchLoop(model, optimizer, scheduler=schedule, checkpointer=make_checkpointer(), trust_pickle=True)
    trusting.step(every=1)
    trusting.finish()
    assert [record.step for record in read_records(directory / ".keepstep" / "records")] == [1]


def test_a_part_that_is_refused_later_costs_that_checkpoint_and_says_what_to_do(
    make_checkpointer: Make, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = Schedule(None)
    loop = TorchLoop(model, optimizer, scheduler=schedule, checkpointer=make_checkpointer())
    loop.step(every=1)
    schedule.kept = Path("x")
    loop.step(every=1)
    schedule.kept = None
    loop.step(every=1)
    loop.finish()
    assert sorted(record.step for record in read_records(directory / ".keepstep" / "records")) == [1, 3]
    warning = next(message for message in caplog.messages if "given up" in message)
    assert "step=2" in warning
    assert "scheduler.kept.0" in warning
    assert "trust_pickle=True" in warning


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("shared", [{}, [1], {"step": 1, "epoch": 0, "batch": 0, "scheduler": 5, "world_size": "x"}])
def test_plain_values_that_no_training_saved_are_refused_in_a_sentence(shared: object, tmp_path: Path) -> None:
    state = {**state_with(None).capture(), "shared": encode(shared)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(UsageError, match="does not hold the state of this training"):
        state_with(None).restore(tmp_path)


def test_damaged_bytes_are_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="shared is not a plain value"):
        decode(b"garbage", "shared")


class _Asked:
    """Pickled as a call of `getattr`."""

    def __init__(self, *arguments: object) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return getattr, self._arguments


def test_a_member_of_an_enum_is_read_as_python_3_11_2_pickles_it_and_nothing_else_so() -> None:
    asked = pickle.dumps(_Asked(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    found = plain_values._MetadataUnpickler(io.BytesIO(asked)).load()
    assert found is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for owner, name in ((_MEM_FORMAT_ENCODING, "mro"), (_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__")):
        with pytest.raises(pickle.UnpicklingError):
            plain_values._MetadataUnpickler(io.BytesIO(pickle.dumps(_Asked(owner, name)))).load()
