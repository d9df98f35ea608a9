"""Where a program's output directories lie in the volume, and what records call them.

One outside the volume has a folder of its own in the checkpoint directory, by its path as the program gave it: a start
may have another working directory. What is written to it is linked there if both are of one filesystem, and stored. The
folder's name tells the path, so that a checkpoint can be put back on a new disk.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final

from keepstep.autoload.post_import import warn
from keepstep.checkpoints.links import may_link, put_beside
from keepstep.checkpoints.local_checkpoints import LocalCheckpoints, directory_in
from keepstep.checkpoints.records import is_whole, read_records
from keepstep.errors import KeepstepError
from keepstep.rank_context import RankContext
from keepstep.settings import Settings
from keepstep_api import names
from keepstep_api.records import CHECKPOINT_DIRECTORY, directory_key

_log: Final = logging.getLogger("keepstep")
_OUTSIDE: Final = "outside"
_ROOTS: Final = {"relative": Path(), "absolute": Path("/")}
"""What the paths of directories outside begin at, by the folder that theirs lie in."""


class OutputDirectories:
    """The output directories of one process. `linkable`: false once a link was refused.

    `tell_unprotected` is called with each directory that nobody stores. `context`: as of the session.
    """

    _shown: ClassVar[bool] = False

    def __init__(
        self, settings: Settings, tell_unprotected: Callable[[Path], None], context: Callable[[], RankContext]
    ) -> None:
        self.linkable = True
        self._settings = settings
        self._tell_unprotected = tell_unprotected
        self._context = context
        self._outputs: dict[str, str] = {}
        """To which output directory belongs what is saved in a directory, if that is another one."""
        self._places: dict[Path, Path] = {}
        """Where in the volume the checkpoints go of directories outside."""
        self._told: set[Path] = set()

    def holds(self, path: Path) -> bool:
        """Return whether `path` lies below the volume."""
        return self._settings.volume.resolve() in path.resolve().parents

    def in_volume(self, output: str | Path) -> Path:
        """Return where in the volume the checkpoints of an output directory are saved, or would be."""
        output, absolute = Path(output), Path(output).absolute()
        if self.holds(absolute / "checkpoint"):
            return absolute
        if absolute not in self._places:
            root = "absolute" if output.is_absolute() else "relative"
            is_plain = ".." not in output.parts
            name = output.relative_to(_ROOTS[root]) if is_plain else f"{output.name}-{directory_key(str(output))}"
            self._places[absolute] = self._outside / (root if is_plain else "") / name
        return self._places[absolute]

    def outside_of(self, recorded: str) -> Path | None:
        """Return the directory outside the volume that records call so; None if it is none, or its path is not told."""
        for root, begins_at in _ROOTS.items():
            folder, directory = self._recorded(self._outside / root), PurePosixPath(recorded)
            if directory.is_relative_to(folder) and ".." not in directory.parts:
                return begins_at / directory.relative_to(folder)
        return None

    def show_outside(self) -> None:
        """Link the newest checkpoint of each directory outside to its place there, if nothing is at it.

        For programs that look for it themselves: all ranks call this before they look. Does so once in a process, and
        not with lazy restore, where nothing is here yet.
        """
        if OutputDirectories._shown or self._settings.lazy:
            return
        OutputDirectories._shown = True
        # If this process cannot be protected, its next call says so.
        with suppress(KeepstepError):
            context = self._context()
            if context.leads_pod:
                self._show_outside(context.local)
            context.coordinator.agree("shown outside")

    def _show_outside(self, local: LocalCheckpoints) -> None:
        shown: set[Path] = set()
        for record in read_records(local.records):
            directory, place = self.outside_of(record.directory), local.place(record)
            if directory is None or directory in shown or not is_whole(record, place):
                continue
            shown.add(directory)
            path = directory / record.name
            if os.path.lexists(path):
                continue
            if not self.links(path):
                warn(f"step {record.step} is in {place}, and not in {directory}: it cannot be linked there")
                continue
            try:
                put_beside(place, path)
                warn(f"step {record.step} is back in {path}")
            except OSError as error:
                _log.warning("not put back: path=%s error=%s", path, error)

    @property
    def _outside(self) -> Path:
        return self._settings.checkpoint_directory / _OUTSIDE

    def file_under(self, directory: Path, output: Path) -> None:
        """Let what is saved in `directory` belong to the output directory `output`."""
        if self.holds(directory.absolute() / "checkpoint"):
            self._outputs[self._recorded(directory)] = self.recorded(output) or CHECKPOINT_DIRECTORY
        else:
            self._places[directory.absolute()] = self.in_volume(output)

    def recorded(self, output: str | Path) -> str:
        """Return what records call an output directory."""
        return self._recorded(self.in_volume(output))

    def output_of(self, checkpoint: Path) -> str:
        """Return what a record of this checkpoint has as its output directory; empty if that is where it lies."""
        directory = self._recorded(checkpoint.parent)
        output = self._outputs.get(directory, "")
        return "" if output == (directory or CHECKPOINT_DIRECTORY) else output

    def protects(self, path: Path, *, may_link: bool = True) -> bool:
        """Return whether what is written to `path` can be stored. Says once per directory if it lies elsewhere."""
        if self.holds(path):
            return True
        links, directory = may_link and self.links(path), path.absolute().parent
        if directory not in self._told:
            self._told.add(directory)
            if links:
                place = self.in_volume(path.parent)
                warn(f"checkpoints in {path.parent} are linked into {place}, and stored from there")
            elif any(directory.is_relative_to(watched) for watched in self._settings.watched):
                warn(f"what is in {path.parent} is stored file by file, what is saved just in time as a checkpoint")
            else:
                # No directory of `keepstep.dev/output` may have that name.
                output = directory.parent if directory.name == names.CHECKPOINT_DIRECTORY else directory
                hint = f"write checkpoints to {self._settings.checkpoint_directory}"
                if os.environ.get(names.ENV_START) == names.CONTAINER:
                    hint += f", or {names.annotations_for(str(output))}"
                warn(
                    f"only what is saved just in time is stored: what is in {path.parent} cannot be linked into the "
                    f"volume {self._settings.volume}; hint: {hint}"
                )
                self._tell_unprotected(output)
        return links

    def links(self, path: Path) -> bool:
        """Whether a checkpoint outside the volume can be linked into it. Without an agent nobody stores it there."""
        if self._settings.socket is None or not self.linkable or "://" in str(path):
            return False
        try:
            return may_link(path.absolute().parent, self._settings.volume)
        except OSError:
            return False

    def _recorded(self, directory: Path) -> str:
        return directory_in(directory, self._settings.volume, self._settings.run_directory)
