"""Tells from a file's own format whether it is whole: what a snapshot may take, and what restore may leave in place.

torch.save, Keras    a zip ends with the list of its members
safetensors          the file is as long as its header says
HDF5                 the file is not shorter than its superblock says; that alone does not prove that it is whole,
                     because a program may write into it again
JSON                 it is whole JSON; only trainer_state.json must be
SQLite, LMDB         survive a power cut, so the bytes of any one instant are whole, with the log or journal beside them

Reads little of each file. A format that does not show its end proves nothing.
"""

import re
import struct
from typing import BinaryIO, Final

import msgspec

from keepstep_agent.core.limits import SAFETENSORS_HEADER_BYTES, TRAINER_STATE_BYTES
from keepstep_agent.core.mirror.file_states import Proof
from keepstep_agent.core.mirror.output_scan import DATABASE_SUFFIXES

_ZIP_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar", ".keras", ".npz", ".zip")
_ALWAYS_ZIP_SUFFIXES: Final = (".keras", ".npz", ".zip")
_HDF5_SUFFIXES: Final = (".h5", ".hdf5")
_HDF5_START: Final = b"\x89HDF\r\n\x1a\n"
_ZIP_START: Final = b"PK\x03\x04"
_ZIP_ENTRY: Final = b"PK\x01\x02"
# Signature, eight bytes that are skipped, size and offset of the list of members, length of the comment at the end.
_ZIP_END: Final = struct.Struct("<4s8xLLH")
_ZIP_END_SIGNATURE: Final = b"PK\x05\x06"
_ZIP_COMMENT_BYTES: Final = 65_535
# In large files. The locator: signature, offset of the end record. The end record: signature, size and offset of the
# list of members.
_ZIP64_LOCATOR: Final = struct.Struct("<4s4xQ4x")
_ZIP64_LOCATOR_SIGNATURE: Final = b"PK\x06\x07"
_ZIP64_END: Final = struct.Struct("<4s36xQQ")
_ZIP64_END_SIGNATURE: Final = b"PK\x06\x06"
_HDF5_SUPERBLOCK_BYTES: Final = 64
# Where the three addresses begin whose last is the end of the file: before it the base and another one.
_HDF5_END_AT_V0: Final = 24
_HDF5_END_AT_V2: Final = 12
_TRAINER_STATE: Final = "trainer_state.json"
_SQLITE_START: Final = b"SQLite format 3\0"
_SQLITE_HEADER_BYTES: Final = 100
# From byte 16 on: size of a page, number of changes, number of pages, and the number of changes when it was written.
_SQLITE_SIZES: Final = struct.Struct(">H6xLL60xL")
_SQLITE_JOURNAL: Final = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
_SQLITE_LOGS: Final = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
_LMDB_MAGIC_AT: Final = 16
_LMDB_MAGIC: Final = (b"\xde\xc0\xef\xbe", b"\xbe\xef\xc0\xde")
_READ_BYTES: Final = 1024 * 1024

_TENSOR_END: Final = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,19}\s*,\s*(\d{1,19})\s*\]')
_TENSOR_END_BYTES: Final = 256
"""Longer than any text that the pattern matches, with the spaces that writers of the format use."""


def prove(file: BinaryIO, name: str, size_bytes: int) -> Proof:
    """Return what the file's format shows. `file` is at its start. Raises OSError if the file cannot be read."""
    try:
        return _prove_format(file, name, size_bytes)
    except OSError:
        raise
    # Half-written bytes can make a parser fail anywhere.
    except Exception:
        return Proof.BROKEN


def _prove_format(file: BinaryIO, name: str, size_bytes: int) -> Proof:
    if name.endswith(".safetensors"):
        return _prove_safetensors(file, size_bytes)
    if name.endswith(_ZIP_SUFFIXES):
        return _prove_zip(file, name, size_bytes)
    if name.endswith(_HDF5_SUFFIXES):
        return _prove_hdf5(file, size_bytes)
    if name.endswith(".json"):
        return _prove_json(file, name, size_bytes)
    if name.endswith(DATABASE_SUFFIXES):
        return _prove_log_of_sqlite(file, name, size_bytes)
    return _prove_database(file, size_bytes)


def _prove_zip(file: BinaryIO, name: str, size_bytes: int) -> Proof:
    """Judge a file of torch.save: a zip ends with its list of members; an older pickle or a tar shows nothing."""
    if size_bytes == 0:
        return Proof.BROKEN
    if file.read(len(_ZIP_START)) != _ZIP_START:
        return Proof.BROKEN if name.endswith(_ALWAYS_ZIP_SUFFIXES) else Proof.NONE
    return Proof.WHOLE if _zip_ends(file, size_bytes) else Proof.BROKEN


def _zip_ends(file: BinaryIO, size_bytes: int) -> bool:
    """Whether the list of members at the end of a zip is whole.

    Reads only the start of the list, which may be larger than the agent's memory.
    """
    tail_begins = max(0, size_bytes - _ZIP_END.size - _ZIP_COMMENT_BYTES)
    file.seek(tail_begins)
    tail = file.read(size_bytes - tail_begins)
    found = tail.rfind(_ZIP_END_SIGNATURE)
    if found < 0:
        return False
    _, list_bytes, list_begins, comment_bytes = _ZIP_END.unpack_from(tail, found)
    list_ends = tail_begins + found
    if list_ends + _ZIP_END.size + comment_bytes != size_bytes:
        return False
    locator_begins = list_ends - _ZIP64_LOCATOR.size
    signature, end_begins = _ZIP64_LOCATOR.unpack(_read_at(file, locator_begins, _ZIP64_LOCATOR.size))
    if signature == _ZIP64_LOCATOR_SIGNATURE:
        signature, list_bytes, list_begins = _ZIP64_END.unpack(_read_at(file, end_begins, _ZIP64_END.size))
        if signature != _ZIP64_END_SIGNATURE:
            return False
        list_ends = end_begins
    if list_begins + list_bytes != list_ends:
        return False
    return list_bytes == 0 or _read_at(file, list_begins, len(_ZIP_ENTRY)) == _ZIP_ENTRY


def _read_at(file: BinaryIO, offset_bytes: int, count: int) -> bytes:
    file.seek(offset_bytes)
    return file.read(count)


def _prove_safetensors(file: BinaryIO, size_bytes: int) -> Proof:
    start = file.read(8)
    if len(start) < 8:
        return Proof.BROKEN
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > min(SAFETENSORS_HEADER_BYTES, size_bytes):
        return Proof.BROKEN
    ends = _largest_end(file, header_bytes)
    return Proof.WHOLE if size_bytes == 8 + header_bytes + ends else Proof.BROKEN


def _largest_end(file: BinaryIO, header_bytes: int) -> int:
    """Return where the last tensor ends according to the header. Raises ValueError if it is no header.

    Searches the header instead of decoding it, because decoding takes many times its size in memory. The pattern cannot
    match inside a name or a text, where its quotes would be escaped.
    """
    largest = 0
    rest = b""
    first, last = b"", b""
    while header_bytes and (read := file.read(min(_READ_BYTES, header_bytes))):
        header_bytes -= len(read)
        first = first or read[:1]
        last = read.rstrip()[-1:] or last
        text = rest + read
        largest = max(largest, *(int(end) for end in _TENSOR_END.findall(text)), 0)
        rest = text[-_TENSOR_END_BYTES:]
    if (first, last) != (b"{", b"}"):
        raise ValueError("it is not a JSON object")
    return largest


def _prove_hdf5(file: BinaryIO, size_bytes: int) -> Proof:
    """Compare the file's size with the end that its superblock names, which HDF5 writes when the file is closed."""
    start = file.read(_HDF5_SUPERBLOCK_BYTES)
    if not start.startswith(_HDF5_START) or len(start) < _HDF5_SUPERBLOCK_BYTES:
        return Proof.BROKEN
    version = start[8]
    offset_bytes, end_at = (start[13], _HDF5_END_AT_V0) if version <= 1 else (start[9], _HDF5_END_AT_V2)
    if version == 1:
        end_at += 4
    end = int.from_bytes(start[end_at + 2 * offset_bytes : end_at + 3 * offset_bytes], "little")
    return Proof.NONE if end <= size_bytes else Proof.BROKEN


def _prove_json(file: BinaryIO, name: str, size_bytes: int) -> Proof:
    if size_bytes > TRAINER_STATE_BYTES:
        return Proof.NONE
    # Python writes these for a loss that is not a number, but they are not JSON.
    text = file.read(size_bytes).replace(b"NaN", b"0").replace(b"Infinity", b"0")
    try:
        # Raw checks the syntax and builds no objects: the trainer may write anything.
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        # Others write lines of JSON, or with comments, into files of that name.
        return Proof.BROKEN if name == _TRAINER_STATE else Proof.NONE
    return Proof.WHOLE


def _prove_log_of_sqlite(file: BinaryIO, name: str, size_bytes: int) -> Proof:
    start = file.read(len(_SQLITE_JOURNAL))
    is_log = start[:4] in _SQLITE_LOGS if name.endswith("-wal") else start in (_SQLITE_JOURNAL, bytes(len(start)))
    return Proof.ANY_INSTANT if size_bytes == 0 or is_log else Proof.NONE


def _prove_database(file: BinaryIO, size_bytes: int) -> Proof:
    start = file.read(_SQLITE_HEADER_BYTES)
    if start[_LMDB_MAGIC_AT : _LMDB_MAGIC_AT + 4] in _LMDB_MAGIC:
        return Proof.ANY_INSTANT
    if not start.startswith(_SQLITE_START) or len(start) < _SQLITE_HEADER_BYTES:
        return Proof.NONE
    page_bytes, changes, pages, pages_valid_for = _SQLITE_SIZES.unpack_from(start, 16)
    page_bytes = 65_536 if page_bytes == 1 else page_bytes
    # A copy that is still being made is shorter. So is a database whose log is being moved into it, for a moment.
    is_short = changes == pages_valid_for and size_bytes < pages * page_bytes
    return Proof.NONE if is_short else Proof.ANY_INSTANT
