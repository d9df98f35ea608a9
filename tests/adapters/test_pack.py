"""Packs as bytes: any tool unpacks them, and no file that was changed gets into one."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.pack import read_pack
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.file_lists import Selected, staged_files
from keepstep_agent.core.model import Fingerprint, StagedFile
from keepstep_agent.core.stored.packs_and_parts import PACK_BYTES, Pack, padded, plan_packs

_LONG = f"{'f' * 150}/{'n' * 100}"


def _content() -> dict[str, bytes]:
    files = {f"layer-{index // 10}/weight {index}.bin": bytes([index]) * (index * 37) for index in range(70)}
    return files | {"empty": b"", "größe/日本": b"utf-8", _LONG: b"long"}


def _pinned(volume: Path, files: Mapping[str, bytes]) -> list[StagedFile]:
    for path, body in files.items():
        pin = volume / "pins" / path
        pin.parent.mkdir(parents=True, exist_ok=True)
        pin.write_bytes(body)
    return [_staged(volume, path) for path in files]


def _staged(volume: Path, path: str) -> StagedFile:
    pin = f"pins/{path}"
    status = (volume / pin).stat()
    fingerprint = Fingerprint(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)
    return StagedFile(path=path, pin=pin, fingerprint=fingerprint, private=False)


def _replace_by_a_copy(path: Path) -> None:
    """Of the same size and time."""
    copy = path.with_suffix(".copy")
    shutil.copy2(path, copy)
    copy.rename(path)


def _pack(volume: Path) -> Pack:
    (pack,) = plan_packs(staged_files(_pinned(volume, _content())), PACK_BYTES)
    return pack


def test_tar_unpacks_every_file_with_its_name_its_bytes_and_its_time(tmp_path: Path) -> None:
    pack = _pack(tmp_path)
    (tmp_path / "pack.tar").write_bytes(read_pack(pack, tmp_path).data)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    done = subprocess.run(
        ["tar", "--extract", "--file", tmp_path / "pack.tar", "--directory", unpacked],
        capture_output=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    assert done.stderr == b""
    found = {str(path.relative_to(unpacked)): path for path in unpacked.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == _content()
    assert {int(path.stat().st_mtime) for path in found.values()} == {
        file.fingerprint.mtime_ns // 10**9 for file in pack.files
    }


def test_the_offsets_and_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    pack = _pack(tmp_path)
    body = read_pack(pack, tmp_path)
    assert body.checksum == crc64nvme(body.data)
    for file, offset_bytes, checksum in zip(pack.files, pack.offsets_bytes, body.file_checksums, strict=True):
        content = body.data[offset_bytes : offset_bytes + file.size_bytes]
        assert content == _content()[file.path]
        assert checksum == crc64nvme(content)


def test_the_same_files_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    pack = _pack(tmp_path)
    assert read_pack(pack, tmp_path) == read_pack(pack, tmp_path)


@pytest.mark.parametrize("seconds", [-5, 8**11])
def test_a_time_that_no_header_can_hold_is_no_reason_not_to_pack(tmp_path: Path, seconds: int) -> None:
    for path in (tmp_path / file.pin for file in _pinned(tmp_path, _content())):
        os.utime(path, (seconds, seconds))
    staged = [_staged(tmp_path, path) for path in _content()]
    (pack,) = plan_packs(staged_files(staged), PACK_BYTES)
    with tarfile.open(fileobj=BytesIO(read_pack(pack, tmp_path).data)) as archive:
        assert archive.getnames() == sorted(_content())


@pytest.mark.parametrize("path", ["a", "é" * 50, "n" * 100, "f/" * 50 + "n", _LONG], ids=len)
@pytest.mark.parametrize("size_bytes", [0, 1, 100 << 10])
def test_a_header_is_byte_for_byte_the_one_that_pythons_tarfile_writes(
    tmp_path: Path, path: str, size_bytes: int
) -> None:
    """Whatever version goes on after a crash writes the same bytes under the same key."""
    (staged,) = _pinned(tmp_path, {path: b"x" * size_bytes})
    pack = Pack(
        number=0,
        files=Selected(staged_files([staged]), [0]),
        offsets_bytes=(512,),
        size_bytes=512 + padded(size_bytes) + 1024,
    )
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode, entry.mtime = size_bytes, 0o644, staged.fingerprint.mtime_ns // 10**9
    assert read_pack(pack, tmp_path).data[:512] == entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda path: path.write_bytes(b"other"), ErrorKind.FILE_CHANGED),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), ErrorKind.FILE_CHANGED),
        (lambda path: path.write_bytes(path.read_bytes() + b"!"), ErrorKind.FILE_CHANGED),
        (_replace_by_a_copy, ErrorKind.FILE_CHANGED),
        (lambda path: path.unlink(), ErrorKind.FILE_MISSING),
    ],
    ids=["rewritten", "shrunk", "grown", "another inode", "gone"],
)
def test_a_file_that_is_not_what_was_staged_gets_into_no_pack(spoil: object, kind: ErrorKind, tmp_path: Path) -> None:
    pack = _pack(tmp_path)
    assert callable(spoil)
    spoil(tmp_path / pack.files[30].pin)
    with pytest.raises(VolumeError) as caught:
        read_pack(pack, tmp_path)
    assert caught.value.kind is kind
    assert pack.files[30].path in str(caught.value)
    staged = pack.files[30].fingerprint
    said = f"{caught.value} {caught.value.hint}".replace(str(tmp_path), "")
    assert not any(str(number) in said for number in (staged.inode, staged.mtime_ns))
