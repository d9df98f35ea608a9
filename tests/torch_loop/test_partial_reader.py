"""A reader that has a checkpoint brought in pieces, and reads each as it arrives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mooring.agent_client.restores import FileRange
from mooring.resuming import PartialCheckpoint
from mooring.torch_loop import partial_reader
from mooring.torch_loop.storage import Storage


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
