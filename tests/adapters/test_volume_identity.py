"""A volume belongs to one destination, from the first that claimed it on."""

import os
from pathlib import Path

import pytest

from keepstep_agent.adapters.volume.identity import claim, owner_of, volume_id
from keepstep_agent.core.errors import ErrorKind, KeepstepError, VolumeError


def test_the_first_to_claim_a_volume_keeps_it(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    claim(volume, "s3://bucket/one")
    claim(volume, "s3://bucket/one")
    with pytest.raises(KeepstepError) as caught:
        claim(volume, "s3://bucket/two")
    assert caught.value.kind is ErrorKind.BAD_CONFIGURATION
    assert "s3://bucket/one" in str(caught.value)
    assert "s3://bucket/two" in str(caught.value)
    assert "another --volume" in caught.value.hint
    claim(volume, "s3://bucket/one")


@pytest.mark.parametrize("other", ["s3://bucket/one", "s3://bucket/two"])
def test_of_two_that_claim_a_volume_at_once_the_first_keeps_it(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def fsync_late(descriptor: int) -> None:
        monkeypatch.undo()
        claim(tmp_path, other)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_late)
    if other == "s3://bucket/one":
        claim(tmp_path, "s3://bucket/one")
    else:
        with pytest.raises(KeepstepError, match=other) as caught:
            claim(tmp_path, "s3://bucket/one")
        assert caught.value.kind is ErrorKind.BAD_CONFIGURATION
    assert owner_of(tmp_path) == other
    assert [path.name for path in (tmp_path / ".keepstep").iterdir()] == ["destination"]


def test_a_slash_at_the_end_makes_no_other_destination(tmp_path: Path) -> None:
    claim(tmp_path, "s3://bucket/one/")
    claim(tmp_path, "s3://bucket/one")
    claim(tmp_path, "s3://bucket/one//")


def test_a_volume_that_cannot_be_claimed_is_the_volumes_error(tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("a file")
    with pytest.raises(VolumeError):
        claim(tmp_path / "volume", "s3://bucket/one")


def test_a_volume_has_one_id_and_no_other_has_it(tmp_path: Path) -> None:
    ids = [volume_id(tmp_path / name, tmp_path / name / "state") for name in ("one", "two", "one", "two")]
    assert ids[:2] == ids[2:]
    assert len(set(ids)) == 2


def test_an_id_that_cannot_be_kept_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "volume-id").write_text("longer than any id" * 10)
    with pytest.raises(VolumeError, match="cannot keep"):
        volume_id(tmp_path, tmp_path / "state")
