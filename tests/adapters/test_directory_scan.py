"""What a file's own format says of its end, read without more memory than a piece of it."""

import io
import json
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from mooring_agent.adapters.volume import directory_scan
from mooring_agent.adapters.volume.directory_scan import DirectoryScanner
from mooring_agent.core.limits import TRAINER_STATE_BYTES
from mooring_agent.core.watch.checkpoint_layouts import Proof

_MANY_TENSORS = b"{" + b",".join(b'"%07d":{}' % number for number in range(200_000)) + b"}"


def _safetensors() -> bytes:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(256)


def _proof(folder: Path, name: str, content: bytes) -> Proof:
    """What the format of the one file of a checkpoint says of its end."""
    checkpoint = folder / "checkpoint-1"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / name).write_bytes(content)
    snapshot = DirectoryScanner(folder, folder).look("checkpoint-1")
    (checkpoint / name).unlink()
    assert snapshot is not None
    return snapshot.files[0].proof


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
        monkeypatch.setattr(directory_scan, "_READ_BYTES", read_bytes)
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
