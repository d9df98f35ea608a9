"""What is pinned outlives the trainer's copy and is what was announced."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.adapters.staging_area.staged_files import pinned_contents, refusal, stage_request, staged_names

from keepstep_agent.adapters.volume.content_check import content_signature
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import ErrorKind, VolumeError


def test_a_directory_is_pinned_by_hard_links_that_outlive_it(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    inode = (checkpoint / "state.json").stat().st_ino
    files = area.stage(stage_request(checkpoint))
    for path in sorted(checkpoint.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert pinned_contents(volume, files) == {"empty": b"", "model/weights.pt": b"weights" * 1000, "state.json": b"{}"}
    assert [file.path for file in files] == ["empty", "model/weights.pt", "state.json"]
    assert files[2].pin == ".keepstep/staged/save-1/rank-00003/state.json"
    assert files[2].fingerprint.inode == inode
    assert not any(file.private for file in files)
    area.check("save-1", 3, files)


def test_a_single_file_goes_by_its_own_name(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(stage_request(checkpoint / "model" / "weights.pt"))
    assert pinned_contents(volume, files) == {"weights.pt": b"weights" * 1000}


def test_it_is_known_of_a_file_whether_it_was_announced_itself_also_when_the_journal_is_lost(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    (volume / "last.ckpt").mkdir()
    (volume / "last.ckpt" / "last.ckpt").write_bytes(b"in a folder of its name")
    (volume / "link.ckpt").symlink_to(checkpoint / "model" / "weights.pt")
    area.stage(stage_request(volume / "last.ckpt", save="folder"))
    area.stage(stage_request(volume / "last.ckpt" / "last.ckpt", save="file"))
    area.stage(stage_request(volume / "link.ckpt", save="link"))
    found = {files[0].pin.split("/")[2]: files[0].announced for _, files in LocalStagingArea(volume).scan()}
    assert found == {"folder": False, "file": True, "link": True}


def test_only_the_named_files_are_pinned(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(stage_request(checkpoint, "state.json", "model/weights.pt", "state.json"))
    assert [file.path for file in files] == ["model/weights.pt", "state.json"]


def test_a_private_stage_is_not_touched_by_rewriting_in_place(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    files = area.stage(stage_request(checkpoint, private=True))
    with (checkpoint / "model" / "weights.pt").open("r+b") as weights:
        weights.write(b"REWRITTEN")
    assert pinned_contents(volume, files)["model/weights.pt"] == b"weights" * 1000
    assert all(file.private for file in files)
    area.check("save-1", 3, files)


def test_only_a_file_that_was_rewritten_in_place_is_copied(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    inode = (checkpoint / "model" / "weights.pt").stat().st_ino
    files = area.stage(replace(stage_request(checkpoint), rewritten_inodes=frozenset({inode})))
    assert {file.path: file.private for file in files} == {
        "empty": False,
        "model/weights.pt": True,
        "state.json": False,
    }
    with (checkpoint / "model" / "weights.pt").open("r+b") as weights:
        weights.write(b"REWRITTEN")
    assert pinned_contents(volume, files)["model/weights.pt"] == b"weights" * 1000
    area.check("save-1", 3, files)


def test_what_is_not_the_content_that_was_meant_is_refused_and_leaves_nothing(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    signature = content_signature(volume, str(checkpoint))
    assert area.stage(replace(stage_request(checkpoint, save="meant"), signatures=frozenset({signature})))
    (checkpoint / "state.json").write_bytes(b"{1")
    error = refusal(area, replace(stage_request(checkpoint), signatures=frozenset({signature})))
    assert error.kind is ErrorKind.FILE_CHANGED
    assert not any(name.startswith("save-1") for name in staged_names(volume))


def test_of_files_that_are_named_one_by_one_others_may_change(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    files = ("model/weights.pt",)
    signatures = frozenset({content_signature(volume, str(checkpoint), files)})
    (checkpoint / "train.log").write_bytes(b"a line more")
    assert area.stage(replace(stage_request(checkpoint, save="meant"), files=files, signatures=signatures))
    (checkpoint / "model" / "weights.pt").write_bytes(b"other")
    assert refusal(area, replace(stage_request(checkpoint), files=files, signatures=signatures)).kind is (
        ErrorKind.FILE_CHANGED
    )


def test_a_write_right_after_staging_is_never_in_the_same_tick_of_the_clock(
    area: LocalStagingArea, checkpoint: Path
) -> None:
    weights = checkpoint / "model" / "weights.pt"
    content = weights.read_bytes()
    for number in range(20):
        weights.write_bytes(content)
        files = area.stage(stage_request(checkpoint, save=f"save-{number}"))
        with weights.open("r+b") as file:
            file.write(b"REWRITTEN")
        with pytest.raises(VolumeError):
            area.check(f"save-{number}", 3, files)


def test_rewriting_in_place_is_found_out(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(stage_request(checkpoint))
    with (checkpoint / "model" / "weights.pt").open("ab") as weights:
        weights.write(b"more")
    with pytest.raises(VolumeError, match="weights") as caught:
        area.check("save-1", 3, files)
    assert caught.value.kind is ErrorKind.FILE_CHANGED
    # Trainers are told it, and one could write into a descriptor what the file was found to be.
    said = f"{caught.value} {caught.value.hint}".replace(str(volume), "")
    found = (checkpoint / "model" / "weights.pt").stat()
    assert not any(str(number) in said for number in (found.st_size, found.st_ino, found.st_mtime_ns))


def test_a_vanished_pin_is_found_out(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    files = area.stage(stage_request(checkpoint))
    (volume / files[0].pin).unlink()
    with pytest.raises(VolumeError) as caught:
        area.check("save-1", 3, files)
    assert caught.value.kind is ErrorKind.FILE_MISSING


def test_staging_again_gives_the_first_answer_though_the_source_is_gone(
    area: LocalStagingArea, checkpoint: Path
) -> None:
    files = area.stage(stage_request(checkpoint))
    checkpoint.rename(checkpoint.with_name("rotated"))
    assert area.stage(stage_request(checkpoint)) == files


@pytest.mark.parametrize("other", ["state.pt", "state.pt/0"], ids=["another file", "a folder"])
def test_a_rank_with_other_bytes_under_the_same_path_is_refused_and_leaves_nothing(
    other: str, volume: Path, area: LocalStagingArea
) -> None:
    for rank, name in enumerate(("state.pt", other)):
        path = volume / "checkpoints" / f"rank-{rank}" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"%d" % rank)
    first = area.stage(stage_request(volume / "checkpoints" / "rank-0", rank=0))
    second = stage_request(volume / "checkpoints" / "rank-1", rank=1)
    for _ in range(2):
        refused = refusal(area, second)
        assert refused.kind is ErrorKind.CONTRADICTION
        assert "ranks 0 and 1" in str(refused)
    assert staged_names(volume) == [
        "save-1",
        "save-1/rank-00000",
        "save-1/rank-00000.json",
        f"save-1/rank-00000/{first[0].path}",
    ]


def test_ranks_may_bring_the_same_bytes_under_the_same_path(volume: Path, area: LocalStagingArea) -> None:
    for rank in (0, 1):
        folder = volume / "checkpoints" / f"rank-{rank}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(b"{}")
        (folder / f"rank-{rank}.pt").write_bytes(b"%d" % rank)
        area.stage(stage_request(folder, rank=rank))
    # The very same file, too.
    area.stage(stage_request(volume / "checkpoints" / "rank-0", "config.json", rank=2))
    assert len(list(area.scan())) == 3


_AS_ONE_USER = """
import os, sys
from pathlib import Path
from keepstep_agent.adapters.volume.pinning import Pinner
from keepstep_agent.adapters.volume.shared_volume import open_volume

volume, group = Path(sys.argv[1]), int(sys.argv[2])
os.setgroups([])
os.setresgid(group, group, group)
os.setresuid(1000, 1000, 1000)
os.umask(0o077)
if group:
    (volume / "checkpoint").mkdir()
    (volume / "checkpoint" / "weights").write_bytes(b"weights")
else:
    (volume / "staged").mkdir()
    with open_volume(volume) as root, root.folder("checkpoint") as source, root.folder("staged") as target:
        print(Pinner(volume).pin(source, "weights", target, "0", private=False))
    (volume / "checkpoint" / "weights").unlink()
    (volume / "checkpoint").rmdir()
    print((volume / "staged" / "0").read_bytes().decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a user of two groups")
@pytest.mark.root
def test_a_trainer_of_the_same_user_and_another_group_has_its_files_linked_and_removed() -> None:
    """As in a pod that names runAsUser alone: each image's /etc/passwd says which group that user has, else it is 0."""
    # Not below tmp_path, into which only its owner may look.
    with tempfile.TemporaryDirectory() as name:
        volume = Path(name).resolve()
        volume.chmod(0o777)
        said = [
            subprocess.run([sys.executable, "-c", _AS_ONE_USER, volume, group], check=True, capture_output=True).stdout
            for group in ("1000", "0")
        ]
    assert said[1].decode().splitlines() == ["False", "weights"]
