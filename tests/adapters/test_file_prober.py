"""What an examination of a file shows: its format, whether somebody has it open for writing, and how it grew."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep_agent.adapters.output.file_prober import FileProber, is_open_for_writing
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.core.mirror.file_states import Evidence, Proof


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "volume/out"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def prober(out: Path) -> FileProber:
    return FileProber(OutputDirectories(out.parent, [str(out)]))


def examine(prober: FileProber, name: str, *, grew: bool = False) -> Evidence:
    return prober.examine({f"out/{name}": grew})[f"out/{name}"]


def is_open(path: Path) -> bool | None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return is_open_for_writing(descriptor)
    finally:
        os.close(descriptor)


def test_formats_are_proven_and_what_is_broken_or_cannot_be_read_has_a_reason(out: Path, prober: FileProber) -> None:
    (out / "a.safetensors").write_bytes(b"x")
    (out / "b.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (out / "c").write_bytes(b"x")
    (out / "d").symlink_to("c")
    found = prober.examine(dict.fromkeys(["out/a.safetensors", "out/b.safetensors", "out/c", "out/d", "out/e"], False))
    assert {path: evidence.proof for path, evidence in found.items()} == {
        "out/a.safetensors": Proof.BROKEN,
        "out/b.safetensors": Proof.WHOLE,
        "out/c": Proof.NONE,
        "out/d": Proof.BROKEN,
    }
    assert found["out/a.safetensors"].reason == "its format shows that it is not complete"
    assert found["out/d"].reason.startswith("it cannot be read: ")


def test_files_of_dcp_are_whole_once_the_file_is_there_that_is_written_last(out: Path, prober: FileProber) -> None:
    (out / "__0_0.distcp").write_bytes(b"x")
    assert examine(prober, "__0_0.distcp").proof is Proof.NONE
    (out / ".metadata").write_bytes(b"x")
    os.utime(out / ".metadata", ns=(1, 1))
    assert examine(prober, "__0_0.distcp").proof is Proof.NONE
    os.utime(out / ".metadata")
    assert examine(prober, "__0_0.distcp").proof is Proof.WHOLE


HOLDS = """
import mmap, sys
file = open(sys.argv[1], "r+b")
mapped = mmap.mmap(file.fileno(), 0)
file.close()
print("mapped", flush=True)
sys.stdin.read()
"""


def test_the_kernel_tells_whether_another_process_writes_to_a_file(out: Path) -> None:
    path = out / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    if is_open(path) is None:
        pytest.skip("this filesystem has no leases: there an agent waits until a file is quiet")
    assert is_open(path) is False
    with path.open("rb"):
        assert is_open(path) is False
    with path.open("r+b"):
        assert is_open(path) is True
    with subprocess.Popen([sys.executable, "-c", HOLDS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"mapped\n"
        assert is_open(path) is True
        other.stdin.close()
    assert is_open(path) is False


WRITES_OFTEN = """
import sys
for number in range(20_000):
    with open(sys.argv[1], "wb") as file:
        file.write(b"x")
"""


def test_a_program_that_opens_a_file_while_it_is_examined_meets_no_error_and_no_signal_ends_us(out: Path) -> None:
    path = out / "file"
    path.write_bytes(b"x")
    with subprocess.Popen([sys.executable, "-c", WRITES_OFTEN, path]) as other:
        while other.poll() is None:
            is_open(path)
    assert other.returncode == 0


@pytest.mark.parametrize("size_bytes", [10, 200_000, 5_000_000])
def test_a_file_only_grew_if_its_earlier_bytes_are_unchanged(out: Path, prober: FileProber, size_bytes: int) -> None:
    path = out / "file"
    path.write_bytes(os.urandom(size_bytes))
    assert examine(prober, "file").only_grew is None
    assert examine(prober, "file", grew=True).only_grew is None
    with path.open("ab") as file:
        file.write(b"more")
    assert examine(prober, "file", grew=True).only_grew is True
    with path.open("r+b") as file:
        file.write(b"other")
    assert examine(prober, "file", grew=True).only_grew is False
    path.unlink()
    path.write_bytes(os.urandom(size_bytes + 10))
    assert not examine(prober, "file", grew=True).only_grew
