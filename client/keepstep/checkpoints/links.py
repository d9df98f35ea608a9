"""Links checkpoints between the volume and the directories outside that programs write to: no byte is copied."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from keepstep.checkpoints.staged_save import delete


def may_link(folder: Path, volume: Path) -> bool:
    """Whether files in `folder`, which may not exist yet, can be linked into the volume. Raises OSError.

    That needs one filesystem and one mount of it: containers often have two volumes of one disk.
    """
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev == volume.stat().st_dev and _mount_of(folder) == _mount_of(volume)


def _mount_of(folder: Path) -> str:
    """Return the id of the mount that a folder lies in."""
    above = [folder := folder.resolve(), *folder.parents]
    found: dict[Path, str] = {}
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        number, _, _, _, point, *_ = line.split(" ")
        # A later mount hides an earlier one at its place.
        found[Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point))] = number
    # In a chroot, what is above may be none.
    return next((found[one] for one in above if one in found), "")


def link_tree(checkpoint: Path, to: Path) -> None:
    """Link a file, or a folder with its files and its relative links to folders, to another name. Raises OSError."""
    if not checkpoint.is_dir():
        to.parent.mkdir(parents=True, exist_ok=True)
        os.link(checkpoint, to)
        return
    for parent, folders, names in os.walk(checkpoint):
        folder = to / Path(parent).relative_to(checkpoint)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.link(Path(parent, name), folder / name)
        for name in folders:
            if Path(parent, name).is_symlink() and not (target := Path(parent, name).readlink()).is_absolute():
                (folder / name).symlink_to(target)


def put_beside(checkpoint: Path, to: Path) -> None:
    """Give a checkpoint of the volume its place outside, where nothing is; copy it if it cannot be linked.

    Raises OSError.
    """
    partial = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        try:
            link_tree(checkpoint, partial)
        except OSError:
            delete(partial)
            partial.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if checkpoint.is_dir() else shutil.copy2)(checkpoint, partial)
        partial.rename(to)
    finally:
        delete(partial)


def break_links(checkpoint: Path, linked: Path) -> None:
    """Unlink the files of a checkpoint that are linked to those of another, before the program writes them anew.

    Else it would write into what is stored. Raises OSError.
    """
    below = [Path(parent, name) for parent, _, names in os.walk(linked) for name in names]
    for path in below if linked.is_dir() else [linked]:
        name = checkpoint / path.relative_to(linked)
        with suppress(FileNotFoundError):
            if path.samefile(name) and not name.is_symlink():
                name.unlink()
