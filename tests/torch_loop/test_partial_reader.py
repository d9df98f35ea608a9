"""A reader that has a checkpoint brought in pieces, and reads each as it arrives."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from keepstep import UsageError
from keepstep.agent_client.restores import TOTAL_SECONDS, FileRange
from keepstep.resuming import PartialCheckpoint
from keepstep.torch_loop import partial_reader
from keepstep.torch_loop.storage import Storage


class Planner:
    """Gives each item its target, as DCP's own planner does."""

    def __init__(self, targets: dict[str, Any]) -> None:
        self.targets = targets

    def resolve_tensor(self, item: ReadItem) -> Any:
        return self.targets[item.storage_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: Any) -> None:
        pass


def test_the_ends_of_a_tensor_of_which_some_rows_are_needed_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_reader, "_WORTH_BYTES", 10_000)
    stored = {"a": torch.arange(20_000.0), "some": torch.arange(20_000.0).reshape(2000, 10)}
    Storage().save(stored, tmp_path)
    asked: list[Sequence[FileRange]] = []
    fetched: list[Sequence[FileRange]] = []

    def fetch(ranges: Sequence[FileRange]) -> Path:
        fetched.append(ranges)
        return tmp_path

    checkpoint = PartialCheckpoint(step=1, ask=asked.append, fetch=fetch)
    reader = partial_reader.PartialReader(
        checkpoint, FileSystemReader, lambda path: FileSystemReader(path).read_metadata(), None
    )
    metadata = reader.read_metadata()
    items = [
        ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=index,
            dest_offsets=torch.Size([0] * len(shape)),
            storage_index=index,
            storage_offsets=torch.Size([0] * len(shape)),
            lengths=torch.Size(shape),
        )
        for index in metadata.storage_data
        for shape in [[20_000] if index.fqn == "a" else [100, 10]]
    ]
    targets = {"a": torch.zeros(20_000), "some": torch.zeros(100, 10)}
    (plan,) = reader.prepare_global_plan([LoadPlan(items)])
    reader.read_data(plan, Planner(targets)).wait()  # type: ignore[arg-type]
    assert torch.equal(targets["a"], stored["a"])
    assert torch.equal(targets["some"], stored["some"][:100])
    ends, wholes, rows = asked
    assert fetched[1] == ends
    assert sum(length for _, _, length in ends) < 10_000
    assert sum(length for _, _, length in wholes) > 80_000
    assert 4_000 < sum(length for _, _, length in rows) < 10_000


def test_what_has_arrived_is_read_while_the_rest_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_reader, "_BATCH_BYTES", 1)
    stored: dict[str, Any] = {"one": torch.full((1000,), 1.0), "two": torch.full((1000,), 2.0)}
    Storage().save(stored, tmp_path)
    loaded: dict[str, Any] = {name: torch.zeros(1000) for name in stored}
    asked: list[FileRange] = []
    fetched: list[tuple[int, set[str]]] = []

    def fetch(ranges: Sequence[FileRange]) -> Path:
        ready = {name for name, tensor in loaded.items() if torch.equal(tensor, stored[name])}
        if (partial_reader.METADATA_FILE, 0, 0) not in ranges:
            assert asked, "the agent brings the next ones while something is read"
            fetched.append((len(ranges), ready))
        return tmp_path

    state = Storage().open(PartialCheckpoint(step=1, ask=asked.extend, fetch=fetch))
    assert state.items == set(stored)
    state.load(loaded)
    assert [(count, len(ready)) for count, ready in fetched] == [(1, 0), (1, 1)]
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def not_asked(ranges: Sequence[FileRange]) -> None:
    raise AssertionError("nothing is known yet")


def test_what_is_no_metadata_is_not_the_state_of_this_training(tmp_path: Path) -> None:
    (tmp_path / partial_reader.METADATA_FILE).write_bytes(b"anything")
    with pytest.raises(UsageError, match="the checkpoint of step 1 does not hold the state of this training"):
        Storage().open(PartialCheckpoint(step=1, ask=not_asked, fetch=lambda ranges: tmp_path))


def test_a_rank_that_is_lost_meanwhile_is_not_called_another_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever then began in an empty directory, as the hint says, would lose the checkpoint."""

    def lost(*arguments: object, **named: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lost)
    monkeypatch.setattr(Storage, "_patient_options", lambda _: {"process_group": "of two ranks"})
    with pytest.raises(RuntimeError, match="closed by peer"):
        Storage().open(PartialCheckpoint(step=1, ask=not_asked, fetch=lambda ranges: tmp_path))


def test_ranks_wait_for_one_behind_a_slow_store_as_long_as_that_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        storage = Storage()
        storage.save({"one": torch.ones(1)}, tmp_path)
        patience: list[float] = []
        make = dist.new_group

        def new_group(*, backend: str, timeout: timedelta) -> Any:
            patience.append(timeout.total_seconds())
            return make(backend=backend, timeout=timeout)

        monkeypatch.setattr(dist, "new_group", new_group)
        checkpoint = PartialCheckpoint(step=1, ask=lambda ranges: None, fetch=lambda ranges: tmp_path)
        storage.open(checkpoint).load({"one": torch.zeros(1)})
        assert patience == [TOTAL_SECONDS]
    finally:
        dist.destroy_process_group()
