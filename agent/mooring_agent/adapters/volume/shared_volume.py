"""The one way to touch the volume that trainer and agent share: from open folders, name by name, through no link.

The trainer may put a link, a fifo or another folder under any name at any moment, and the agent may read what the
trainer may not. So each component of a path is opened from the folder before it, never through a link and never onto
another filesystem, and what is open is used by its descriptor: a name is looked up once. A rule in the tests keeps
every other module of the agent from opening paths of the volume (docs/design/0011).

All methods block and raise OSError: ELOOP or ENOTDIR for a link, EXDEV for another filesystem, EINVAL for what is no
regular file. Paths are relative, with `/`.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mooring_agent.core.limits import PATH_LEVELS
from mooring_agent.core.model import Fingerprint

PARTIAL_SUFFIX: Final = ".partial"
"""Of a file that `write_durably` gathers; garbage when found after a crash."""

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a fifo must not hang the agent.
_FILE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_MOVES: Final = 10_000
"""Folders that a removal finds deeper than PATH_LEVELS. A trainer may make more of them as fast as they go."""
_RACES: Final = 64
"""How often a folder is made again that somebody removes at the same time, because it was empty."""


class Folder:
    """An open folder of the volume; a context manager that closes it."""

    __slots__ = ("_device", "descriptor")

    def __init__(self, descriptor: int, device: int) -> None:
        self.descriptor = descriptor
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    def folder(self, path: str) -> "Folder":
        """An existing folder below this one; this one again for an empty path."""
        found = Folder(os.dup(self.descriptor), self._device)
        for name in _names(path) if path else ():
            with found:
                found = found._enter(name)
        return found

    def make_folder(self, path: str, mode: int = 0o777) -> "Folder":
        """The folder below this one, made with its parents where it is missing."""
        for _ in range(_RACES):
            found = Folder(os.dup(self.descriptor), self._device)
            try:
                for name in _names(path):
                    with found:
                        found = found._make(name, mode)
            except FileNotFoundError:
                continue
            return found
        raise FileNotFoundError(errno.ENOENT, "somebody removes the folder again and again", path)

    def open_file(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        """The descriptor of a regular file."""
        with self._parent(path) as (parent, name):
            descriptor = os.open(name, flags | _FILE_FLAGS, mode, dir_fd=parent)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", path)
                # Files of an overlay have device numbers of their own, and are on the mount of their folder.
                if status.st_dev != self._device and _mount_of(descriptor) != _mount_of(parent):
                    raise _elsewhere(path)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor

    @contextmanager
    def opened_file(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> Iterator[int]:
        """As `open_file`; closed at the end."""
        descriptor = self.open_file(path, flags, mode)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """A small file whole; EFBIG if it is larger than `limit_bytes`."""
        descriptor = self.open_file(path)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, no path
            content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise OSError(errno.EFBIG, f"more than {limit_bytes} bytes", path)
        return content

    def write_durably(self, path: str, content: bytes) -> None:
        """Replace a file whole; a reader and a crash see the old file or the new one."""
        with self._parent(path) as (parent, name):
            partial = name + PARTIAL_SUFFIX
            # What is there already may be a link, or somebody's open file.
            _unlink(partial, parent)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o666, dir_fd=parent)
            with open(descriptor, "wb") as file:  # noqa: PTH123 - as above
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.rename(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)

    def status(self, path: str) -> os.stat_result:
        """Of the entry itself, be it a link."""
        with self._parent(path) as (parent, name):
            return os.stat(name, dir_fd=parent, follow_symlinks=False)

    def exists(self, path: str) -> bool:
        try:
            self.status(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def entries(self) -> list["os.DirEntry[str]"]:
        """What is in this folder, by name. Ask each while the folder is open, and never by a link that it may be."""
        with os.scandir(self.descriptor) as entries:
            return sorted(entries, key=lambda entry: entry.name)

    def walk(
        self, on_error: Callable[[str, OSError], None] | None = None, prefix: str = "", depth: int = PATH_LEVELS
    ) -> Iterator[tuple[str, "Folder", list["os.DirEntry[str]"]]]:
        """Each folder from here down: the path in front of its entries, the folder while it is current, its entries.

        Links are entries like files. `on_error` is told of folders that cannot be listed, by the path in front of
        their entries; without it they raise.
        """
        try:
            entries = self.entries()
            if not depth:
                raise OSError(errno.ENAMETOOLONG, f"more than {PATH_LEVELS} folders below each other", prefix)
        except OSError as error:
            if on_error is None:
                raise
            on_error(prefix, error)
            return
        yield prefix, self, entries
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                continue
            below = f"{prefix}{entry.name}/"
            try:
                folder = self._enter(entry.name)
            except OSError as error:
                if on_error is None:
                    raise
                on_error(below, error)
                continue
            with folder:
                yield from folder.walk(on_error, below, depth - 1)

    def read_link(self, path: str) -> str:
        with self._parent(path) as (parent, name):
            return os.readlink(name, dir_fd=parent)

    def link_open_file(self, descriptor: int, path: str) -> None:
        """Another name for an open file: for that very file, whatever its old name means by now."""
        with self._parent(path) as (parent, name):
            os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=parent, follow_symlinks=True)

    def rename(self, path: str, to: "Folder", to_path: str) -> None:
        with self._parent(path) as (parent, name), to._parent(to_path) as (to_parent, to_name):
            os.rename(name, to_name, src_dir_fd=parent, dst_dir_fd=to_parent)

    def unlink(self, path: str) -> None:
        """Remove a file or a link; one that is gone already is fine."""
        with self._parent(path) as (parent, name):
            _unlink(name, parent)

    def remove(self, path: str) -> None:
        """Remove whatever has this name, a folder with all its content; what is gone already is fine.

        The depth of the content does not matter. Another filesystem in it is not entered: it raises EXDEV.
        """
        try:
            with self._parent(path) as (parent, name):
                if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    with Folder(parent, self._device)._enter(name) as top:
                        top._clear_whole()
                    os.rmdir(name, dir_fd=parent)
                else:
                    os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            # Something of it went meanwhile, or all of it.
            if self.exists(path):
                raise

    def remove_if_empty(self, path: str) -> None:
        """Remove a folder that has no entries."""
        try:
            with self._parent(path) as (parent, name):
                os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR}:
                raise

    def sync(self) -> None:
        """Make the names in this folder durable: new, renamed and removed ones."""
        os.fsync(self.descriptor)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The descriptor of the folder that holds `path`, and the name of `path` in it."""
        above, slash, name = path.rpartition("/")
        try:
            _names(name)
            if not slash:
                yield self.descriptor, name
            else:
                with self.folder(above) as parent:
                    yield parent.descriptor, name
        except OSError as error:
            # The kernel was told the last name alone.
            error.filename = path
            raise

    def _clear_whole(self) -> None:
        """Remove all entries, at any depth."""
        # Folders that lay too deep, by the names that they have in this one now.
        moved: list[str] = []
        self._clear(self, moved, PATH_LEVELS)
        for done, name in enumerate(moved):  # which grows meanwhile
            if done == _MOST_MOVES:
                raise OSError(
                    errno.ENOTEMPTY, f"more than {done} folders lie more than {PATH_LEVELS} levels deep", name
                )
            self._clear_folder(name, self, moved, PATH_LEVELS)

    def _clear(self, top: "Folder", moved: list[str], depth: int) -> None:
        """Remove all entries; what lies more than `depth` folders below moves to `top`, and into the list."""
        for entry in self.entries():
            # What somebody else removes meanwhile is fine.
            with suppress(FileNotFoundError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=self.descriptor)
                elif depth:
                    self._clear_folder(entry.name, top, moved, depth - 1)
                elif not self._is_removed(entry.name):
                    aside = f"deep-{secrets.token_hex(8)}"
                    os.rename(entry.name, aside, src_dir_fd=self.descriptor, dst_dir_fd=top.descriptor)
                    moved.append(aside)

    def _clear_folder(self, name: str, top: "Folder", moved: list[str], depth: int) -> None:
        with self._enter(name) as folder:
            folder._clear(top, moved, depth)
        os.rmdir(name, dir_fd=self.descriptor)

    def _is_removed(self, name: str) -> bool:
        """Remove a folder that is empty: it may be one that its mode forbids to move."""
        try:
            os.rmdir(name, dir_fd=self.descriptor)
        except OSError:
            return False
        return True

    def _enter(self, name: str) -> "Folder":
        descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=self.descriptor)
        if os.fstat(descriptor).st_dev != self._device:
            os.close(descriptor)
            raise _elsewhere(name)
        return Folder(descriptor, self._device)

    def _make(self, name: str, mode: int) -> "Folder":
        with suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=self.descriptor)
        return self._enter(name)


def open_volume(path: Path) -> Folder:
    """The volume's own folder. Its name is whoever starts the agent's, and may be a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return Folder(descriptor, os.fstat(descriptor).st_dev)


def fingerprint(status: os.stat_result) -> Fingerprint:
    """What a file is. Which filesystem it is on is not in it: `open_file` refuses a file of another one."""
    return Fingerprint(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def path_in(volume: Path, path: Path) -> str:
    """`path`, absolute, as one below the volume, by what is written alone; ValueError if it is not below it."""
    below = path.relative_to(volume).as_posix()
    return "" if below == "." else below


def _names(path: str) -> list[str]:
    """The components of a path that only goes down."""
    names = path.split("/")
    if any(name in {"", ".", ".."} for name in names) or "\0" in path:
        raise OSError(errno.EINVAL, "not a plain relative path", path)
    return names


def _elsewhere(path: str) -> OSError:
    return OSError(errno.EXDEV, "on another filesystem than the volume", path)


def _mount_of(descriptor: int) -> str:
    """The number of the mount that an open file is on; OSError where the kernel does not say."""
    with open(f"/proc/self/fdinfo/{descriptor}") as lines:  # noqa: PTH123 - of /proc
        for line in lines:
            if line.startswith("mnt_id:"):
                return line.removeprefix("mnt_id:").strip()
    raise OSError(errno.EXDEV, "the kernel does not say which mount it is on")


def _unlink(name: str, parent: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
