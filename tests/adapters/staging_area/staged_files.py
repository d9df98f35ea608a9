"""Requests to stage a checkpoint, and what they leave on the volume."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.model import StagedFile
from keepstep_agent.ports import StagedDescriptor, StageRequest

DESCRIPTOR = StagedDescriptor(announcements=("täst" * 20,), part_size_bytes=7)


def stage_request(
    source: Path, *files: str, save: str = "save-1", rank: int = 3, private: bool = False
) -> StageRequest:
    return StageRequest(save=save, rank=rank, path=str(source), files=files, private=private, descriptor=DESCRIPTOR)


def staged_names(volume: Path) -> list[str]:
    staged = volume / ".keepstep" / "staged"
    return sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*")) if staged.exists() else []


def refusal(area: LocalStagingArea, request: StageRequest) -> KeepstepError:
    with pytest.raises(KeepstepError) as caught:
        area.stage(request)
    assert caught.value.hint
    return caught.value


def pinned_contents(volume: Path, files: Iterable[StagedFile]) -> dict[str, bytes]:
    return {file.path: (volume / file.pin).read_bytes() for file in files}
