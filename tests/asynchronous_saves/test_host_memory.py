"""The memory for copies is kept from save to save, and is not taken where there is too little."""

import gc
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from keepstep.asynchronous_saves import host_memory
from keepstep.asynchronous_saves.host_memory import HostMemory, free_memory_bytes

MIB = 1024 * 1024


def addresses(memory: HostMemory, *sizes: int) -> list[int]:
    taken = memory.take(sizes)
    assert taken is not None
    assert [storage.nbytes() for storage in taken] == list(sizes)
    return [storage.data_ptr() for storage in taken]


def test_a_state_of_the_same_size_gets_the_same_memory_again() -> None:
    memory = HostMemory()
    first = addresses(memory, 5 * MIB, 0, 3), addresses(memory, MIB)
    size_bytes = memory.size_bytes
    memory.reset()
    assert (addresses(memory, 5 * MIB, 0, 3), addresses(memory, MIB)) == first
    assert memory.size_bytes == size_bytes


def test_pieces_do_not_overlap_and_are_aligned() -> None:
    memory = HostMemory()
    memory.reserve(MIB)
    places = sorted(zip(addresses(memory, 3, 65, 64, MIB, 1), (3, 65, 64, MIB, 1), strict=True))
    assert all(start % 64 == 0 for start, _ in places)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(places))


def test_what_was_reserved_is_used_by_the_first_copy() -> None:
    memory = HostMemory()
    memory.reserve(4 * MIB)
    addresses(memory, MIB, 2 * MIB)
    assert memory.size_bytes == 4 * MIB


@pytest.mark.parametrize("free_bytes", [0, 300 * MIB])
def test_a_copy_leaves_memory_to_everything_else(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: free_bytes)
    memory = HostMemory()
    memory.reserve(100 * MIB)
    assert memory.take([100 * MIB]) is None
    assert memory.size_bytes == 0


def test_where_nobody_says_how_much_is_free_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: None)
    assert HostMemory().take([MIB]) is not None


def test_memory_for_a_gpu_is_pinned_until_no_copy_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: pinned.update({address: size}) or 0, cudaHostUnregister=pinned.pop
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    memory = HostMemory()
    memory.reserve(MIB)
    taken = memory.take([MIB, 2 * MIB])
    assert sorted(pinned.values()) == [MIB, 2 * MIB]
    del memory
    assert len(pinned) == 2
    del taken
    gc.collect()
    assert not pinned


def cgroup(folder: Path, limit: str, current: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


@pytest.mark.parametrize(
    ("pod", "container", "free"),
    [("max", "1000", 500), ("800", "1000", 400), ("max", "max", 4096 * 1024)],
    ids=["container", "pod", "machine"],
)
def test_what_is_free_is_the_least_of_the_machine_and_of_all_cgroups(
    pod: str, container: str, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup(tmp_path / "cgroup" / "pod", pod, current=600, inactive=200)
    cgroup(tmp_path / "cgroup" / "pod" / "container", container, current=600, inactive=100)
    (tmp_path / "own").write_text("1:name=systemd:/other\n0::/pod/container\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4096 kB\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(host_memory, "_MEMORY_OF_MACHINE", tmp_path / "meminfo")
    assert free_memory_bytes() == free


def test_a_system_that_does_not_say_what_is_free_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", tmp_path / "none")
    monkeypatch.setattr(host_memory, "_MEMORY_OF_MACHINE", tmp_path / "none")
    assert free_memory_bytes() is None
