"""What a program gives to `torch.save` and safetensors within a save is written behind it, and nothing else is."""

import functools
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from keepstep.asynchronous_saves.background_writer import BackgroundSave, BackgroundWriter
from keepstep.asynchronous_saves.host_memory import HostMemory
from keepstep.asynchronous_saves.save_functions import handing_in

STATE: dict[str, Any] = {"weight": torch.arange(1000.0), "step": 3}


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter()
    yield writer
    writer.wait()


@pytest.fixture
def save(writer: BackgroundWriter, tmp_path: Path) -> BackgroundSave:
    return writer.begin(tmp_path)


def as_torch_writes_it(value: Any, path: Path) -> bytes:
    path.parent.mkdir()
    torch.save(value, path)
    return path.read_bytes()


def test_what_torch_saves_is_written_when_the_program_goes_on(save: BackgroundSave, tmp_path: Path) -> None:
    weight = STATE["weight"].clone()
    with handing_in(save):
        torch.save({"weight": weight, "step": 3}, tmp_path / "state.pt")
        assert (tmp_path / "state.pt").stat().st_size == 0
        weight.zero_()
    save.wait()
    assert save.has_files
    assert (tmp_path / "state.pt").read_bytes() == as_torch_writes_it(STATE, tmp_path / "alone" / "state.pt")


def test_the_usual_format_may_be_asked_for_by_name(save: BackgroundSave, tmp_path: Path) -> None:
    with handing_in(save):
        torch.save(STATE, tmp_path / "state.pt", _use_new_zipfile_serialization=True)
        assert (tmp_path / "state.pt").stat().st_size == 0
    save.wait()
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 3


def test_what_safetensors_saves_is_written_by_any_name_of_the_function(save: BackgroundSave, tmp_path: Path) -> None:
    # The first use replaces the function in every module, so this module's own name for it too.
    with handing_in(save):
        save_file({"a": STATE["weight"], "b": torch.ones(2, 3)}, tmp_path / "one", {"format": "pt"})
        safetensors.torch.save_file({"a": STATE["weight"]}, str(tmp_path / "two"))
        assert [(tmp_path / name).stat().st_size for name in ("one", "two")] == [0, 0]
    save.wait()
    assert safetensors.torch.load_file(tmp_path / "one")["b"].tolist() == [[1, 1, 1]] * 2
    with safetensors.safe_open(tmp_path / "one", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert safetensors.torch.load_file(tmp_path / "two")["a"].equal(STATE["weight"])


@pytest.fixture
def _no_ranks(recwarn: pytest.WarningsRecorder) -> None:
    """DCP warns that there is one process."""
    warnings.simplefilter("ignore", UserWarning)


def save_distributed(directory: Path, weight: torch.Tensor) -> None:
    state = {"weight": weight, "other": torch.arange(9, dtype=torch.int8), "step": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)


def same_tensors(directory: Path, other: Path) -> bool:
    """Whether two checkpoints have the same file of tensors. The path of each is in its metadata."""
    return (directory / "__0_0.distcp").read_bytes() == (other / "__0_0.distcp").read_bytes()


@pytest.mark.usefixtures("_no_ranks")
def test_a_distributed_checkpoint_is_the_same_byte_by_byte(save: BackgroundSave, tmp_path: Path) -> None:
    weight = torch.randn(10_000_000)
    save_distributed(tmp_path.parent / "alone", weight)
    with handing_in(save):
        save_distributed(tmp_path / "state", weight)
        # Not by Path, which would wait for its content.
        assert os.stat(tmp_path / "state" / "__0_0.distcp").st_size == 0  # noqa: PTH116
        weight.zero_()
    save.wait()
    assert save.written_bytes == save.size_bytes > 40_000_000
    assert same_tensors(tmp_path / "state", tmp_path.parent / "alone")
    loaded = {"weight": torch.zeros(10_000_000)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "state"), no_dist=True)
    assert loaded["weight"].count_nonzero() > 9_000_000


@pytest.mark.usefixtures("_no_ranks")
@pytest.mark.parametrize("pieces", [0, 1])
def test_without_memory_for_all_of_it_a_distributed_checkpoint_is_written_at_once(
    pieces: int, save: BackgroundSave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(10_000_000)
    save_distributed(tmp_path.parent / "alone", weight)
    take, taken = HostMemory.take, itertools.count()
    monkeypatch.setattr(HostMemory, "take", lambda memory, sizes: take(memory, sizes) if next(taken) < pieces else None)
    with handing_in(save):
        save_distributed(tmp_path / "state", weight)
        weight.zero_()
    save.wait()
    assert same_tensors(tmp_path / "state", tmp_path.parent / "alone")


def save_to_file(path: Path) -> None:
    with path.open("wb") as file:
        torch.save(STATE, file)


@pytest.mark.parametrize(
    "saves",
    [
        lambda folder: torch.save(STATE, folder.parent / "elsewhere.pt"),
        lambda folder: save_to_file(folder / "file.pt"),
        lambda folder: torch.save(STATE, folder / "old.pt", _use_new_zipfile_serialization=False),
        lambda folder: torch.save(STATE, folder / "protocol.pt", pickle_protocol=2),
    ],
    ids=["outside", "open file", "old format", "protocol"],
)
def test_other_calls_write_at_once_as_they_always_do(
    saves: Callable[[Path], None], writer: BackgroundWriter, tmp_path: Path
) -> None:
    folder = tmp_path / "save"
    folder.mkdir()
    save = writer.begin(folder)
    with handing_in(save):
        saves(folder)
        assert not save.has_files
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert torch.load(path, weights_only=True)["step"] == 3


def test_other_threads_write_for_themselves(save: BackgroundSave, tmp_path: Path) -> None:
    with handing_in(save):
        other = threading.Thread(target=torch.save, args=(STATE, tmp_path / "other.pt"))
        other.start()
        other.join()
    assert not save.has_files
    assert torch.load(tmp_path / "other.pt", weights_only=True)["step"] == 3


def test_after_the_save_the_functions_write_at_once(save: BackgroundSave, tmp_path: Path) -> None:
    with handing_in(save):
        pass
    torch.save(STATE, tmp_path / "later.pt")
    assert not save.has_files
    assert torch.load(tmp_path / "later.pt", weights_only=True)["step"] == 3


WEIGHT = torch.ones(4, 4)
WRONG: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "cannot be pickled": (lambda folder: torch.save(lambda: 1, folder / "a"), AttributeError),
    "no such folder": (lambda folder: torch.save(STATE, folder / "none" / "a"), RuntimeError),
    "shared memory": (lambda folder: save_file({"a": WEIGHT, "b": WEIGHT}, folder / "a"), RuntimeError),
    "with holes": (lambda folder: save_file({"a": WEIGHT.t()[1:]}, folder / "a"), ValueError),
    "no tensors": (lambda folder: save_file({"a": 1}, folder / "a"), Exception),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_what_cannot_be_saved_is_said_at_once(wrong: str, save: BackgroundSave, tmp_path: Path) -> None:
    saves, error = WRONG[wrong]
    with pytest.raises(error), handing_in(save):
        saves(tmp_path)
    assert not save.has_files


def saved_and_given_up(path: Path) -> None:
    torch.save(STATE, path)
    raise KeyError


def test_what_the_program_gives_up_is_not_written(save: BackgroundSave, tmp_path: Path) -> None:
    with pytest.raises(KeyError), handing_in(save):
        saved_and_given_up(tmp_path / "a.pt")
    save.wait()
    assert (tmp_path / "a.pt").stat().st_size == 0


def test_a_program_that_puts_its_own_function_in_place_of_torchs_is_left_alone(
    save: BackgroundSave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, paths = torch.save, []

    # As such programs do, but for what marks a function of ours.
    @functools.wraps(plain, updated=())
    def encrypted(value: Any, path: Any) -> None:
        paths.append(os.fspath(path))
        Path(path).write_bytes(b"secret")

    monkeypatch.setattr(torch, "save", encrypted)
    with handing_in(save):
        torch.save({"weight": torch.zeros(4 << 20)}, tmp_path / "state.pt")
        assert (tmp_path / "state.pt").read_bytes() == b"secret"
    save.wait()
    assert paths == [str(tmp_path / "state.pt")]
    assert (tmp_path / "state.pt").read_bytes() == b"secret"
