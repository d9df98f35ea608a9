"""What a file's own format says of its end, read without more memory than a piece of it."""

import io
import json
import sqlite3
import tracemalloc
import zipfile
from contextlib import closing
from pathlib import Path

import pytest

from keepstep_agent.adapters.output import file_formats
from keepstep_agent.adapters.output.file_formats import prove
from keepstep_agent.core.limits import TRAINER_STATE_BYTES
from keepstep_agent.core.mirror.file_states import Proof

_MANY_TENSORS = b"{" + b",".join(b'"%07d":{}' % number for number in range(200_000)) + b"}"


def _safetensors() -> bytes:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(256)


def _proof(folder: Path, name: str, content: bytes) -> Proof:
    path = folder / name
    path.write_bytes(content)
    with path.open("rb") as file:
        return prove(file, name, len(content))


def _zip(members: int, *, comment: bytes = b"") -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        for number in range(members):
            archive.writestr(f"{number}", b"x")
        archive.comment = comment
    return into.getvalue()


def test_a_zip_is_whole_by_its_end_however_many_members_it_has(tmp_path: Path) -> None:
    # Beyond 65,535 members the end has another form.
    for content in (_zip(1), _zip(1, comment=b"PK"), _zip(70_000)):
        assert _proof(tmp_path, "model.pt", content) is Proof.WHOLE
        assert _proof(tmp_path, "model.pt", content[:-1]) is Proof.BROKEN
        assert _proof(tmp_path, "model.pt", content + b"x") is Proof.BROKEN
        assert _proof(tmp_path, "model.pt", content[:4] + content[5:]) is Proof.BROKEN


def test_a_safetensors_header_is_read_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for read_bytes in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(file_formats, "_READ_BYTES", read_bytes)
        assert _proof(tmp_path, "model.safetensors", _safetensors()) is Proof.WHOLE
        assert _proof(tmp_path, "model.safetensors", _safetensors()[:-1]) is Proof.BROKEN


def test_what_a_text_in_a_safetensors_header_says_of_offsets_counts_for_nothing(tmp_path: Path) -> None:
    text = json.dumps({"w": {"data_offsets": [0, 999]}})
    header = json.dumps({"__metadata__": {"a": text}, "data_offsets": {"data_offsets": [0, 3]}}).encode() + b"  "
    content = len(header).to_bytes(8, "little") + header + bytes(3)
    assert _proof(tmp_path, "model.safetensors", content) is Proof.WHOLE
    without_end = content.replace(b"}}  ", b"    ")
    assert _proof(tmp_path, "model.safetensors", without_end) is Proof.BROKEN


@pytest.mark.parametrize(
    ("content", "proof"),
    [
        (b'{"loss": NaN, "best": -Infinity, "name": "NaN"}\n', Proof.WHOLE),
        (b'{"loss": NaN', Proof.BROKEN),
        (b"", Proof.BROKEN),
        (b" " * TRAINER_STATE_BYTES + b"{}", Proof.NONE),
    ],
    ids=["not-numbers", "cut", "empty", "large"],
)
def test_a_trainer_state_is_whole_by_its_end_and_none_is_decoded_that_is_too_large(
    tmp_path: Path, content: bytes, proof: Proof
) -> None:
    assert _proof(tmp_path, "trainer_state.json", content) is proof


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.json", b"[" + b"{}," * 2_000_000 + b"{}]"),
        ("model.safetensors", len(_MANY_TENSORS).to_bytes(8, "little") + _MANY_TENSORS),
    ],
    ids=["trainer-state", "safetensors"],
)
def test_no_look_at_a_file_takes_many_times_its_bytes(tmp_path: Path, name: str, content: bytes) -> None:
    tracemalloc.start()
    try:
        _proof(tmp_path, name, content)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4 * len(content)


def test_no_look_at_a_zip_takes_many_times_its_bytes(tmp_path: Path) -> None:
    content = _zip(70_000)
    tracemalloc.start()
    try:
        assert _proof(tmp_path, "model.pt", content) is Proof.WHOLE
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < len(content)


def _hdf5(version: int) -> bytes:
    """A superblock of the format's older or newer form, and 100 bytes."""
    start = b"\x89HDF\r\n\x1a\n" + bytes([version])
    size_bytes = 196
    if version == 0:
        start += bytes([0, 0, 0, 0, 8, 8, 0]) + bytes(8)
    else:
        start += bytes([8, 8, 0])
    content = start + bytes(16) + size_bytes.to_bytes(8, "little")
    return content.ljust(size_bytes, b"x")


@pytest.mark.parametrize("version", [0, 2])
def test_an_hdf5_file_is_broken_if_it_is_shorter_than_its_superblock_says(tmp_path: Path, version: int) -> None:
    content = _hdf5(version)
    # Its program may write into it again, which shows nowhere.
    assert _proof(tmp_path, "model.weights.h5", content) is Proof.NONE
    for cut in (0, 20, len(content) - 1):
        assert _proof(tmp_path, "model.weights.h5", content[:cut]) is Proof.BROKEN


def test_a_keras_archive_that_is_no_zip_is_broken_and_a_tar_shows_nothing(tmp_path: Path) -> None:
    assert _proof(tmp_path, "model.keras", _zip(3)) is Proof.WHOLE
    assert _proof(tmp_path, "model.keras", b"x" * 100) is Proof.BROKEN
    assert _proof(tmp_path, "model.pth.tar", b"x" * 100) is Proof.NONE
    assert _proof(tmp_path, "model.pth.tar", _zip(3)[:-1]) is Proof.BROKEN


def test_a_json_file_is_whole_if_it_parses_and_only_a_trainer_state_must(tmp_path: Path) -> None:
    assert _proof(tmp_path, "progress.json", b'{"step": 1, "loss": NaN}') is Proof.WHOLE
    assert _proof(tmp_path, "progress.json", b'{"step": 1, "lo') is Proof.NONE
    assert _proof(tmp_path, "progress.json", b'{"step": 1}\n{"step": 2}\n') is Proof.NONE
    assert _proof(tmp_path, "trainer_state.json", b'{"step": 1, "lo') is Proof.BROKEN


def test_a_sqlite_database_and_its_log_are_whole_at_any_instant(tmp_path: Path) -> None:
    database = tmp_path / "study.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE one (value TEXT)")
        connection.execute("INSERT INTO one VALUES ('x')")
        connection.commit()
        assert _proof(tmp_path / "..", f"{tmp_path.name}/study.db-wal", Path(f"{database}-wal").read_bytes()) is (
            Proof.ANY_INSTANT
        )
    content = database.read_bytes()
    assert _proof(tmp_path, "any name", content) is Proof.ANY_INSTANT
    # A copy that is being made.
    assert _proof(tmp_path, "any name", content[:-1]) is Proof.NONE
    assert _proof(tmp_path, "study.db-wal", b"no log") is Proof.NONE
    assert _proof(tmp_path, "study.db-journal", b"") is Proof.ANY_INSTANT


def test_an_lmdb_environment_is_whole_at_any_instant(tmp_path: Path) -> None:
    assert _proof(tmp_path, "data.mdb", bytes(16) + b"\xde\xc0\xef\xbe" + bytes(100)) is Proof.ANY_INSTANT
