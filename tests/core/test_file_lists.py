"""Lists of files in columns: they are what the objects are, and take little memory."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.play import staged_file

from keepstep_agent.core.agent.checkpoint import RankFiles
from keepstep_agent.core.agent.events import Announced, Staged
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.file_lists import FileEntries, PathList, SnapshotContent, StagedFiles, staged_files
from keepstep_agent.core.model import FileEntry, Kind, Owner, PackPlace, RankManifest, SaveInfo, StagedFile
from keepstep_agent.core.settings.values import MIB
from keepstep_agent.core.stored.manifest import decode_manifest, encode_manifest
from keepstep_agent.core.stored.packs_and_parts import PACK_BYTES
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event

_FILES = 20_000
_PATHS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), unique=True)


@given(paths=_PATHS)
def test_paths_come_back_and_are_found_where_they_are(paths: list[str]) -> None:
    listed = PathList(sorted(paths))
    assert list(listed) == sorted(paths)
    assert [listed.position(path) for path in sorted(paths)] == list(range(len(paths)))
    assert list(listed.below("folder")) == [f"folder/{path}" for path in sorted(paths)]
    assert listed[: len(paths) // 2] == sorted(paths)[: len(paths) // 2]


def test_a_path_that_is_not_there_is_not_found() -> None:
    assert PathList(["a", "c"]).position("b") is None
    assert PathList().position("") is None


@given(paths=_PATHS)
def test_pinned_files_come_back_in_the_order_of_their_paths(paths: list[str]) -> None:
    files = [replace(staged_file(path, number), private=number % 2 == 1) for number, path in enumerate(paths)]
    assert list(staged_files(files)) == sorted(files, key=lambda file: file.path)


def test_a_path_that_comes_twice_and_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="comes twice"):
        staged_files([staged_file("a", 1), staged_file("a", 2)])
    with pytest.raises(ValueError, match="0 inodes of 1 files"):
        StagedFiles(
            folder="", paths=["a"], sizes_bytes=[1], mtimes_ns=[1], inodes=[], private=[0], changed_ns=[1], announced=""
        )


def test_entries_of_a_manifest_come_back_whatever_they_hold() -> None:
    owner = Owner(name="node-0", save="earlier", rank=3, path="elsewhere")
    plain = FileEntry(path="plain", size_bytes=1, part_size_bytes=1, checksums=(2**64 - 1,))
    entries = [
        plain,
        replace(plain, path="empty", size_bytes=0, checksums=()),
        replace(plain, path="parts", size_bytes=3, checksums=(1, 2, 3), modified_ns=-1),
        replace(plain, path="packed", place=PackPlace(number=0, offset_bytes=512)),
        replace(plain, path="shared", owner=owner),
        replace(plain, path="elsewhere", owner=owner, modified_ns=0),
        replace(plain, path="link", size_bytes=0, checksums=(), link="../plain"),
    ]
    assert list(FileEntries(entries)) == entries
    assert FileEntries(entries).owners == (("node-0", "earlier", 3),)


def test_what_an_agent_holds_of_a_file_takes_less_than_half_a_kibibyte_at_any_time() -> None:
    """From the pins to the manifest, as Python counts it; `tests/integration/test_many_files.py` has the kernel's."""
    tracemalloc.start()
    try:
        files = staged_files(_many())
        work = WorkId(Operation.STAGE, "save", 0)
        staged = Staged(at=1.0, work=work, files=files, part_size_bytes=8 * MIB, pack_size_bytes=PACK_BYTES)
        assert decode_event(encode_event(staged)) == staged
        progress = RankFiles(files, part_size_bytes=8 * MIB, pack_size_bytes=PACK_BYTES)
        for packed in progress.packs:
            progress.store_pack(packed.pack.number, [2**63] * len(packed.pack.files))
        assert not progress.unstored_count
        manifest = RankManifest(
            info=SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=1),
            rank=0,
            saved_at=1.0,
            files=FileEntries(file.entry() for file in progress),
            pack_sizes_bytes=tuple(packed.pack.size_bytes for packed in progress.packs),
        )
        assert decode_manifest(encode_manifest([manifest]), "key") == (manifest,)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes / _FILES < 512


def test_a_snapshot_takes_less_than_half_a_kibibyte_of_a_file_while_it_is_journaled() -> None:
    owner = Owner(name="node-0", save="earlier", rank=0, path="")
    tracemalloc.start()
    try:
        content = SnapshotContent(
            base=None,
            kept=FileEntries(
                FileEntry(
                    path=file.path,
                    size_bytes=file.size_bytes,
                    part_size_bytes=8 * MIB,
                    checksums=(2**63,),
                    place=PackPlace(number=1, offset_bytes=2**20),
                    owner=replace(owner, path=file.path),
                    modified_ns=2**60,
                )
                for file in _many()
            ),
            files=(),
        )
        info = SaveInfo(save="save", name="node-0", step=1, kind=Kind.SNAPSHOT, world_size=1)
        announced = Announced(at=1.0, info=info, rank=0, path="/out", files=(), local_world_size=1, snapshot=content)
        record = encode_event(announced)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes / _FILES < 512
    assert decode_event(record) == announced


def _many() -> Iterator[StagedFile]:
    for number in range(_FILES):
        yield staged_file(f"part-{number // 1000:03d}/sample-{number:06d}.bin", 240, inode=2**32 + number)
