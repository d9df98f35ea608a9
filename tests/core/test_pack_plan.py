"""Files -> packs, each of which is a tar archive of that very layout."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.play import staged_file

from keepstep_agent.core.file_lists import StagedFiles, staged_files
from keepstep_agent.core.settings.values import MIB
from keepstep_agent.core.stored.packs_and_parts import HEADER_BYTES, PACK_BYTES, fits_header, plan_packs


def _files(*sizes: int, stem: str = "part/") -> StagedFiles:
    return staged_files(staged_file(f"{stem}{index:05d}", size) for index, size in enumerate(sizes))


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=65, max_size=200),
    pack_size_bytes=st.integers(8192, 200_000),
)
def test_every_file_lies_in_one_pack_and_no_pack_is_larger_than_asked(sizes: list[int], pack_size_bytes: int) -> None:
    files = _files(*sizes)
    packs = plan_packs(files, pack_size_bytes)
    assert [pack.number for pack in packs] == list(range(len(packs)))
    assert [file for pack in packs for file in pack.files] == list(files)
    assert all(pack.size_bytes <= pack_size_bytes for pack in packs)


@given(sizes=st.lists(st.integers(0, 3000), min_size=65, max_size=90), pack_size_bytes=st.integers(1, 100_000))
def test_a_pack_is_laid_out_as_an_archive_is(sizes: list[int], pack_size_bytes: int) -> None:
    for pack in plan_packs(_files(*sizes), pack_size_bytes):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT, bufsize=HEADER_BYTES) as archive:
            for file in pack.files:
                entry = tarfile.TarInfo(file.path)
                entry.size = file.size_bytes
                archive.addfile(entry, io.BytesIO(bytes(file.size_bytes)))
            end_bytes = archive.offset
        stream.seek(0)
        with tarfile.open(fileobj=stream) as archive:
            assert tuple(member.offset_data for member in archive) == tuple(pack.offsets_bytes)
        assert pack.size_bytes == end_bytes + 2 * HEADER_BYTES


def test_a_plan_stays_the_same_for_ever_since_journals_speak_of_packs_by_number() -> None:
    packs = plan_packs(_files(*[1000, 0, 512, 513] * 20), 16 * 1024)
    assert [len(pack.files) for pack in packs] == [13, 14, 13, 13, 14, 13]
    assert tuple(packs[0].offsets_bytes[:6]) == (512, 2048, 2560, 3584, 5120, 6656)
    assert [pack.size_bytes for pack in packs] == [16384] * 6


@pytest.mark.parametrize(
    ("files", "pack_size_bytes"),
    [
        (_files(*[100] * 64), PACK_BYTES),
        (_files(*[MIB + 1] * 100), PACK_BYTES),
        (_files(*[100] * 100), 0),
        (_files(*[100] * 100, stem="n" * 100), PACK_BYTES),
    ],
    ids=["few", "large", "a journal of an older version", "names that a header cannot hold"],
)
def test_what_is_better_sent_by_itself_is_not_packed(files: StagedFiles, pack_size_bytes: int) -> None:
    assert plan_packs(files, pack_size_bytes) == ()


def test_large_files_among_many_small_ones_stay_objects_of_their_own() -> None:
    files = staged_files([*_files(*[MIB] * 65), staged_file("large", MIB + 1)])
    packed = [file.path for pack in plan_packs(files, PACK_BYTES) for file in pack.files]
    assert packed == [file.path for file in files if file.path != "large"]


_names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=130)


@given(path=st.lists(_names, min_size=1, max_size=4).map("/".join))
def test_a_name_fits_if_and_only_if_the_header_can_hold_it(path: str) -> None:
    entry = tarfile.TarInfo(path)
    try:
        header = entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError:
        assert not fits_header(path)
        return
    assert fits_header(path)
    assert len(header) == HEADER_BYTES
    assert tarfile.TarInfo.frombuf(header, "utf-8", "strict").name == path
