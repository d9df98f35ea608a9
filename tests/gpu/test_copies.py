"""The copy of a GPU's state: consistent, in pinned memory, and in a file that is the one of a synchronous save."""

import gc
from pathlib import Path

import pytest
import torch

from keepstep import Checkpointer
from keepstep.asynchronous_saves.host_copy import copy_to_host
from keepstep.asynchronous_saves.host_memory import HostMemory, free_memory_bytes

pytestmark = pytest.mark.gpu
GIB = 1024**3


def test_the_file_is_that_of_a_synchronous_save(device: str, tmp_path: Path) -> None:
    state = {"weights": torch.randn(1000, 1000, device=device), "half": torch.ones(10, device=device).half()}
    files = []
    for asynchronous in (False, True):
        saver = Checkpointer(tmp_path / str(asynchronous), asynchronous=asynchronous)
        with saver.save(1) as folder:
            torch.save(state, folder / "state.pt")
        saver.finish()
        files.append((tmp_path / str(asynchronous) / "checkpoint-1" / "state.pt").read_bytes())
    assert files[0] == files[1]
    loaded = torch.load(tmp_path / "True" / "checkpoint-1" / "state.pt")
    assert loaded["weights"].device.type == device


def test_what_side_streams_do_afterwards_is_not_in_the_copy(gpu: str, tmp_path: Path) -> None:
    weights = torch.zeros(64, 1024, 1024, device=gpu)
    average = torch.zeros_like(weights)
    side = torch.cuda.Stream()
    saver = Checkpointer(tmp_path, keep_local=10)
    for step in range(1, 6):
        weights.fill_(float(step))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            average.mul_(0.5).add_(weights, alpha=0.5)
        torch.cuda.current_stream().wait_stream(side)
        with saver.save(step) as folder:
            torch.save({"weights": weights, "average": average}, folder / "state.pt")
        # While it is written, and before the next save waits for it.
        with torch.cuda.stream(side):
            average.add_(1000.0)
        weights.fill_(-1.0)
        side.synchronize()
        average.sub_(1000.0)
    saver.finish()
    for step in range(1, 6):
        state = torch.load(tmp_path / f"checkpoint-{step}" / "state.pt")
        assert bool((state["weights"] == step).all())
        assert state["average"].unique().numel() == 1
        assert state["average"][0, 0, 0] < step


def test_the_memory_is_pinned(gpu: str) -> None:
    torch.ones(1, device=gpu)
    memory = HostMemory()
    copy = copy_to_host({"weights": torch.ones(1 << 20, device=gpu)}, memory)
    assert copy is not None
    assert copy.value["weights"].is_pinned()


def test_memory_that_is_given_up_is_free_again(gpu: str) -> None:
    torch.ones(1, device=gpu)
    before = free_memory_bytes()
    assert before is not None
    for _ in range(12):
        memory = HostMemory()
        memory.reserve(GIB)
        assert memory.size_bytes == GIB
        del memory
        gc.collect()
    after = free_memory_bytes()
    assert after is not None
    assert before - after < 3 * GIB
