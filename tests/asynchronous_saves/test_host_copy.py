"""A copy of a state is written as the state itself would have been, and shows nothing of what happens later."""

import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from keepstep.asynchronous_saves import host_copy
from keepstep.asynchronous_saves.host_copy import copy_tensors_to_host, copy_to_host
from keepstep.asynchronous_saves.host_memory import HostMemory


def copied(value: Any) -> Any:
    copy = copy_to_host(value, HostMemory())
    assert copy is not None
    return copy.value


def written(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}


def tied() -> dict[str, Any]:
    weight = torch.randn(6, 4)
    return {"one": weight, "same": weight, "row": weight[2], "turned": weight.t(), "other": torch.zeros(3)}


VALUES: dict[str, Callable[[], Any]] = {
    "a trained model": trained,
    "tied weights and views": tied,
    "a module": lambda: torch.nn.Linear(3, 3),
    "parameters": lambda: [torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(2))],
    "half precision": lambda: {"a": torch.ones(5, dtype=torch.bfloat16), "b": torch.ones(5, dtype=torch.float16)},
    "other types": lambda: [torch.tensor([True, False]), torch.tensor([1 + 2j]), torch.tensor(3, dtype=torch.int64)],
    "a float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8),
    "nothing in it": lambda: {"a": torch.empty(0), "b": torch.empty(0, 7)},
    "conjugate and negative": lambda: [torch.tensor([1j]).conj(), torch.tensor([1j]).conj().imag],
    "storages": lambda: [torch.ones(3).untyped_storage(), torch.ones(2).to(torch.int32)],
    "random states": lambda: {"torch": torch.get_rng_state(), "numpy": np.random.get_state()},
    "an array": lambda: {"a": np.arange(100_000)},
    "plain values": lambda: OrderedDict(a=[1, "a", None, (1.5, b"x" * 1000)], b={"c": {1, 2}}, d="a"),
    "text that is there twice": lambda: (lambda text: {"a": text, "b": text, text: 1})("".join(["long ", "text"])),
}


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:Sparse CSR", "ignore:.*TypedStorage")
@pytest.mark.parametrize("make", list(VALUES))
def test_the_file_of_a_copy_is_the_file_of_the_value_byte_by_byte(make: str) -> None:
    value = VALUES[make]()
    assert written(copied(value)) == written(value)


def test_values_whose_pickle_depends_on_which_texts_are_one_object_are_equal_all_the_same() -> None:
    value: dict[str, Any] = {"array": np.arange(10), "number": np.float32(3), "type": np.dtype("<i4")}
    copy = copied(value)
    assert copy["array"].tolist() == value["array"].tolist()
    assert (copy["number"], copy["type"]) == (value["number"], value["type"])


def test_what_changes_later_is_not_in_the_copy() -> None:
    value: dict[str, Any] = {"weight": torch.ones(4), "steps": [1], "nested": {"name": "a"}}
    before = written(value)
    copy = copied(value)
    value["weight"].add_(1)
    value["steps"].append(2)
    value["nested"]["name"] = "b"
    assert written(copy) == before


class Counted(HostMemory):
    """Knows what was taken of it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def take(self, sizes: Sequence[int]) -> list[Any] | None:
        self.sizes.extend(sizes)
        return super().take(sizes)


class Full(HostMemory):
    def take(self, sizes: Sequence[int]) -> list[Any] | None:
        return None


def test_a_storage_is_copied_once_however_often_it_is_shared() -> None:
    memory = Counted()
    copy = copy_to_host(tied(), memory)
    assert copy is not None
    assert memory.sizes == [6 * 4 * 4, 3 * 4]
    assert copy.size_bytes == sum(memory.sizes)
    copy.value["one"][2, 1] = 7.0
    assert copy.value["same"][2, 1] == copy.value["row"][1] == copy.value["turned"][1, 2] == 7.0


def test_what_was_copied_before_is_copied_again_only_if_it_has_changed() -> None:
    memory = Counted()
    value: dict[str, Any] = {"kept": torch.ones(5_000_000), "changed": torch.ones(3_000_000), "step": 1}
    first = copy_to_host(value, memory)
    # In the last of the parts that are compared.
    value["changed"][-1], value["step"] = 2.0, 2
    second = copy_to_host(value, memory)
    tensors = copy_tensors_to_host({"kept": value["kept"]}, memory)
    assert first is not None
    assert second is not None
    assert tensors is not None
    assert memory.sizes == [20_000_000, 12_000_000, 12_000_000]
    assert [first.value["changed"][-1].item(), second.value["changed"][-1].item()] == [1.0, 2.0]
    assert written(second.value) == written(value)
    assert first.value["kept"].data_ptr() == second.value["kept"].data_ptr() == tensors.value["kept"].data_ptr()

    memory.reset()
    copy_to_host(value, memory)
    assert memory.sizes[3:] == [20_000_000, 12_000_000], "the memory may have something else in it by now"


def test_where_there_is_no_room_there_is_no_copy() -> None:
    assert copy_to_host(tied(), Full()) is None
    assert copy_tensors_to_host({"a": torch.ones(2)}, Full()) is None


def test_a_tensor_for_safetensors_is_copied_without_the_rest_of_its_storage() -> None:
    flat = torch.arange(10.0)
    memory = Counted()
    copies = copy_tensors_to_host({"a": flat[:2], "b": flat[2:4].view(2, 1), "c": torch.nn.Parameter(flat[8:])}, memory)
    flat.zero_()
    assert copies is not None
    assert memory.sizes == [8, 8, 8]
    assert {name: copy.tolist() for name, copy in copies.value.items()} == {"a": [0, 1], "b": [[2], [3]], "c": [8, 9]}


def test_the_file_of_a_copy_names_the_device_that_the_value_was_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # This stands for a copy from a GPU, which a machine that runs this test need not have.
    tag = torch.serialization.location_tag
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:1")
    memory = HostMemory()
    (storage,) = memory.take([16]) or [None]
    host_copy._keep_location(SimpleNamespace(device=torch.device("cuda:1")), storage)  # type: ignore[arg-type]
    tensor = torch.empty(0).set_(storage)
    address = tensor.data_ptr()
    del storage
    assert tag(tensor[1:].untyped_storage()) == "cuda:1"
    assert tag(torch.ones(4).untyped_storage()) == "cpu"
    # What lies there later is something else.
    del tensor
    memory.reset()
    (storage,) = memory.take([16]) or [None]
    assert storage.data_ptr() == address
    assert tag(storage) == "cpu"


def test_the_copy_of_a_sharded_tensor_belongs_to_the_same_mesh() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        value = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        copy = copied(value)
        value.to_local().zero_()
        assert isinstance(copy, DTensor)
        assert copy.device_mesh is mesh
        assert torch.equal(copy.full_tensor(), torch.arange(8.0))
    finally:
        dist.destroy_process_group()
