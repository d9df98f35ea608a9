"""What would not fit into memory beside all that is pinned is refused before anything of it is pinned."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.adapters.staging_area.staged_files import refusal, stage_request, staged_names

from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.volume import memory_room
from keepstep_agent.adapters.volume.memory_room import ManifestShare
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import PinMethod, SourceFile
from keepstep_agent.core.stored import manifest
from keepstep_agent.core.stored.manifest import expected_manifest_bytes, held_bytes, needed_bytes
from keepstep_agent.ports import StageRequest

FILES = 40


@pytest.fixture(autouse=True)
def even_a_few_count(monkeypatch: pytest.MonkeyPatch) -> None:
    half = FILES // 2
    half_bytes = expected_manifest_bytes(f"file-{number:02d}" for number in range(half))
    of_half = needed_bytes(files=half, manifests_bytes=[half_bytes]) - needed_bytes(files=0)
    monkeypatch.setattr(manifest, "_LITTLE_BYTES", of_half)


@pytest.fixture
def source(volume: Path) -> Path:
    folder = volume / "checkpoint-1"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"file-{number:02d}").write_bytes(b"x")
    return folder


def manifest_bytes(source: Path) -> int:
    return expected_manifest_bytes(path.name for path in source.iterdir())


def may_have(monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
    monkeypatch.setattr(memory_room, "memory_limit_bytes", lambda: limit_bytes)


def assert_refused(area: LocalStagingArea, volume: Path, request: StageRequest) -> None:
    names = staged_names(volume)
    error = refusal(area, request)
    assert error.kind is ErrorKind.BAD_REQUEST
    assert "keepstep.dev/memory" in str(error)
    assert staged_names(volume) == names


def test_the_ranks_of_a_save_count_together(volume: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    area = LocalStagingArea(volume)
    two_ranks = needed_bytes(files=2 * FILES, manifests_bytes=[2 * manifest_bytes(source)])
    may_have(monkeypatch, two_ranks - 1)
    area.stage(stage_request(source, rank=0))
    assert_refused(area, volume, stage_request(source, rank=1))
    may_have(monkeypatch, two_ranks)
    area.stage(stage_request(source, rank=1))


def test_what_other_saves_hold_counts_until_it_is_released(
    volume: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    area = LocalStagingArea(volume)
    size_bytes = manifest_bytes(source)
    one = needed_bytes(files=FILES, manifests_bytes=[size_bytes])
    may_have(monkeypatch, one + held_bytes(files=FILES, manifest_bytes=size_bytes) - 1)
    area.stage(stage_request(source, save="save-1"))
    assert_refused(area, volume, stage_request(source, save="save-2"))
    area.release("save-1")
    area.stage(stage_request(source, save="save-2"))


def test_a_few_files_are_never_refused(volume: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    area = LocalStagingArea(volume)
    may_have(monkeypatch, 1)
    assert_refused(area, volume, stage_request(source, save="save-1"))
    for path in list(source.iterdir())[FILES // 2 :]:
        path.unlink()
    area.stage(stage_request(source, save="save-2"))


def test_what_an_earlier_agent_pinned_counts(volume: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStagingArea(volume).stage(stage_request(source, rank=0))
    area = LocalStagingArea(volume)
    assert len(list(area.scan())) == 1
    may_have(monkeypatch, needed_bytes(files=2 * FILES, manifests_bytes=[2 * manifest_bytes(source)]) - 1)
    assert_refused(area, volume, stage_request(source, rank=1))


def test_what_could_not_be_pinned_does_not_count(volume: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    area = LocalStagingArea(volume)
    may_have(monkeypatch, needed_bytes(files=FILES, manifests_bytes=[manifest_bytes(source)]))
    refusal(area, replace(stage_request(source, save="save-1"), signatures=frozenset({"of other bytes"})))
    area.stage(stage_request(source, save="save-2"))


def test_what_a_snapshot_keeps_counts_with_what_it_sends(
    volume: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = [str(source)]
    looks = OutputDirectories(volume, watched).scan((), {}).files
    paths = sorted(looks)
    files = tuple(SourceFile(path=path, fingerprint=looks[path], method=PinMethod.LINK) for path in paths[1:])
    request = replace(stage_request(source), sources=files, kept=paths[:1])
    needed = needed_bytes(files=FILES, manifests_bytes=[expected_manifest_bytes(paths, is_snapshot=True)])
    needed += ManifestShare(files=FILES, size_bytes=0, is_snapshot=True).watched_bytes
    area = LocalStagingArea(volume, watched)
    may_have(monkeypatch, needed - 1)
    assert_refused(area, volume, request)
    may_have(monkeypatch, needed)
    assert len(area.stage(request)) == FILES - 1
