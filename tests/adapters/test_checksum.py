"""What is summed up of a region, and of which file."""

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.regions import make_file, region_of, touch, truncate

from keepstep_agent.adapters.checksum import (
    CHUNK_BYTES,
    crc64nvme,
    region_checksum,
    region_crc32c,
    region_md5,
    region_sha256,
)
from keepstep_agent.adapters.transfer.upload_body import PIECE_BYTES
from keepstep_agent.core.errors import ErrorKind, VolumeError


def test_checksums_of_a_region_cover_exactly_its_bytes(tmp_path: Path) -> None:
    """Of more than one chunk, the last not whole."""
    path = make_file(tmp_path / "file", 3 * CHUNK_BYTES)
    region = region_of(path, 1_000, 2 * CHUNK_BYTES + 777)
    content = path.read_bytes()[1_000 : 1_000 + region.size_bytes]

    assert region_checksum(region) == crc64nvme(content)
    assert crc64nvme(content[100:], crc64nvme(content[:100])) == crc64nvme(content)
    assert region_md5(region) == hashlib.md5(content).hexdigest()
    assert region_sha256(region) == hashlib.sha256(content).hexdigest()
    assert 0 <= region_crc32c(region, region_checksum(region)) < 2**32


def test_crc64nvme_is_the_published_one() -> None:
    assert crc64nvme(b"123456789") == 0xAE8B14860A799888


@pytest.mark.parametrize(
    ("change", "kind"),
    [(truncate, ErrorKind.FILE_CHANGED), (touch, ErrorKind.FILE_CHANGED), (Path.unlink, ErrorKind.FILE_MISSING)],
)
def test_the_checksum_of_another_file_than_was_staged_is_refused(
    change: Callable[[Path], None], kind: ErrorKind, tmp_path: Path
) -> None:
    path = make_file(tmp_path / "file", 3 * PIECE_BYTES)
    region = region_of(path)
    change(path)

    with pytest.raises(VolumeError) as caught:
        region_checksum(region)

    assert caught.value.kind is kind


@pytest.mark.parametrize("look", [1, 2])
def test_a_volume_that_is_taken_away_is_the_volumes_error(
    look: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the bytes are read, and after."""
    region = region_of(make_file(tmp_path / "file", PIECE_BYTES))
    really_look, looks = os.fstat, iter(range(1, 10))

    def stale(descriptor: int) -> os.stat_result:
        if next(looks) == look:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return really_look(descriptor)

    monkeypatch.setattr(os, "fstat", stale)

    with pytest.raises(VolumeError) as caught:
        region_checksum(region)

    assert caught.value.kind is ErrorKind.VOLUME_UNUSABLE
    assert region.file in str(caught.value)


_FORK = """
import os
from keepstep_agent.adapters import checksum
buffer = checksum._buffers.get()
buffer[0] = 1
if not os.fork():
    buffer[0] = 2
    os._exit(0)
os.wait()
print(buffer[0])
"""


def test_a_forked_process_reads_into_buffers_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.stdout, done.stderr) == ("1\n", "")
