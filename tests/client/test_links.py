"""Where files can be linked into the volume: only from one mount of its filesystem."""

import subprocess
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.small_volume import mounted

from keepstep.checkpoints.links import link_tree, may_link


def test_a_folder_that_does_not_exist_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    assert may_link(tmp_path / "out" / "run", tmp_path / "volume")


def test_a_tree_is_linked_with_its_relative_links_to_folders(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "step-5").mkdir(parents=True)
    (tree / "step-5" / "model.pt").write_text("weights")
    (tree / "latest").symlink_to("step-5")
    (tree / "elsewhere").symlink_to(tmp_path)
    (tree / "newest.pt").symlink_to("step-5/model.pt")
    link_tree(tree, tmp_path / "linked")
    linked = tmp_path / "linked"
    assert sorted(path.relative_to(linked).as_posix() for path in linked.rglob("*")) == [
        "latest", "newest.pt", "step-5", "step-5/model.pt"
    ]  # fmt: skip
    assert (linked / "latest").readlink() == Path("step-5")
    assert (linked / "step-5" / "model.pt").samefile(tree / "step-5" / "model.pt")
    assert (linked / "newest.pt").read_text() == "weights"


@pytest.mark.root
def test_another_mount_of_the_same_disk_is_another_filesystem(tmp_path: Path) -> None:
    """As two volumes of a pod on one disk are."""
    with mounted(tmp_path / "a disk", 1024 * 1024) as disk:
        volume, out, elsewhere = disk / "volume", disk / "out", tmp_path / "elsewhere"
        for folder in (volume, out, elsewhere):
            folder.mkdir()
        subprocess.run(("mount", "--bind", out, elsewhere), check=True, timeout=HANG_SECONDS)
        try:
            (elsewhere / "file").touch()
            assert may_link(out, volume)
            link_tree(out / "file", volume / "file")
            assert not may_link(elsewhere, volume)
            with pytest.raises(OSError, match="cross-device"):
                link_tree(elsewhere / "file", volume / "another")
        finally:
            subprocess.run(("umount", "--lazy", elsewhere), check=True, timeout=HANG_SECONDS)
