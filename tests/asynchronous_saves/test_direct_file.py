"""A large file is written past the page cache, with the bytes that it would have had."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from keepstep.asynchronous_saves import direct_file
from keepstep.asynchronous_saves.safetensors_file import write_tensors

MIB = 1024 * 1024


def large() -> dict[str, Any]:
    return {"weights": [torch.randn(MIB), torch.randn(3, 700_001), torch.ones(5)], "text": "x" * 1000, "nothing": None}


def in_memory(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def save_directly(value: Any, path: Path, wrote: Callable[[int], object] = lambda _: None) -> None:
    path.touch()
    file: Any
    with direct_file.opened(str(path), 16 * MIB, wrote) as file:
        if file is None:
            pytest.skip("this filesystem has no O_DIRECT")
        torch.save(value, file)


def test_a_large_file_is_the_one_that_torch_writes_into_an_open_file(tmp_path: Path) -> None:
    value = large()
    save_directly(value, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == in_memory(value)


def test_its_pages_are_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct: list[int] = []
    write = os.write

    def seen(descriptor: int, data: Any) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", seen)
    save_directly(large(), tmp_path / "state.pt")
    assert sum(direct) > (tmp_path / "state.pt").stat().st_size - 4 * MIB


def test_what_the_filesystem_refuses_goes_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []
    write = os.write

    def refusing(descriptor: int, data: Any) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "not like this")
        # The kernel may take less than it was given.
        return write(descriptor, data[: MIB + 1])

    monkeypatch.setattr(os, "write", refusing)
    value = large()
    save_directly(value, tmp_path / "state.pt")
    assert len(refused) == 1
    assert (tmp_path / "state.pt").read_bytes() == in_memory(value)


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        save_directly(large(), tmp_path / "state.pt")


def test_who_hears_how_it_grows_can_end_it(tmp_path: Path) -> None:
    heard: list[int] = []

    def wrote(count: int) -> None:
        heard.append(count)
        if sum(heard) >= 8 * MIB:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        save_directly(large(), tmp_path / "state.pt", wrote)
    assert (tmp_path / "state.pt").stat().st_size == sum(heard) == 8 * MIB


def test_a_small_file_and_one_without_direct_writes_are_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    with direct_file.opened(str(tmp_path / "a"), direct_file.LARGE_BYTES - 1, print) as file:
        assert file is None

    def refusing(*_: Any, **__: Any) -> int:
        raise OSError(errno.EINVAL, "no such flag here")

    monkeypatch.setattr(os, "open", refusing)
    with direct_file.opened(str(tmp_path / "a"), 16 * MIB, print) as file:
        assert file is None


TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32,
    torch.float64, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("metadata", [None, {}, {"näme": 'a "text"'}])
def test_safetensors_are_the_bytes_of_their_library(metadata: dict[str, str] | None) -> None:
    tensors = {f"{name}/{dtype}": torch.arange(6).view(2, 3).to(dtype) for dtype in TYPES for name in "bä"}
    tensors |= {"a number": torch.tensor(3.0), "nothing": torch.empty(0, 4), '"': torch.ones(1)}
    file = io.BytesIO()
    write_tensors(tensors, file, metadata)
    assert file.getvalue() == safetensors.torch.save(tensors, metadata)
