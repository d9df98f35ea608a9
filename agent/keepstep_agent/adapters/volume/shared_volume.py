"""Opens what is on the volume that trainer and agent share: from open folders, name by name, never through a link.

The trainer may put a link, a fifo or another folder under any name at any moment, and the agent may read what the
trainer may not. So each component of a path is opened from the folder before it, never through a link and never onto
another filesystem. An open file or folder is used by its descriptor, so a name is looked up once. A rule in the tests
keeps every other module of the agent from opening paths of the volume (docs/design/0011).

All methods block and raise OSError: ELOOP or ENOTDIR for a link, EXDEV for another filesystem, EINVAL for anything but
a regular file. Paths are relative, with `/`.
"""

import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from keepstep_agent.core.limits import FOLDER_ENTRIES, LISTED_NAMES_BYTES, PATH_LEVELS, WALKED_ENTRIES
from keepstep_agent.core.model import Fingerprint

PARTIAL_SUFFIX: Final = ".partial"
"""Of a file that `write_durably` is writing; garbage after a crash."""

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a fifo must not hang the agent.
_FILE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_MOVES: Final = 10_000
"""Limit on the folders below PATH_LEVELS that one removal moves. A trainer may make them as fast as they go."""
_RACES: Final = 64
"""How often a folder is made again when it is removed at the same time because it is empty."""


class Folder:
    """An open folder of the volume; a context manager that closes it."""

    __slots__ = ("_device", "descriptor")

    def __init__(self, descriptor: int, device: int) -> None:
        self.descriptor = descriptor
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    def folder(self, path: str) -> "Folder":
        """Open an existing folder below this one; an empty path opens this one again."""
        found = Folder(os.dup(self.descriptor), self._device)
        for name in _names(path) if path else ():
            with found:
                found = found._enter(name)
        return found

    def make_folder(self, path: str, mode: int = 0o777) -> "Folder":
        """Open a folder below this one; make it and its parents if they are missing."""
        for _ in range(_RACES):
            found = Folder(os.dup(self.descriptor), self._device)
            try:
                for name in _names(path):
                    with found:
                        found = found._make(name, mode)
            except FileNotFoundError:
                continue
            return found
        raise FileNotFoundError(errno.ENOENT, "the folder keeps being removed", path)

    def open_file(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        """Open a regular file and return its descriptor."""
        with self._parent(path) as (parent, name):
            descriptor = os.open(name, flags | _FILE_FLAGS, mode, dir_fd=parent)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", path)
                # On an overlay, files have device numbers of their own but are on the mount of their folder.
                if status.st_dev != self._device and _mount_of(descriptor) != _mount_of(parent):
                    raise _elsewhere(path)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor

    @contextmanager
    def opened_file(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> Iterator[int]:
        """As `open_file`, as a context manager that closes the descriptor."""
        descriptor = self.open_file(path, flags, mode)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Read a whole small file. Raises EFBIG if it is larger than `limit_bytes`."""
        descriptor = self.open_file(path)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, no path
            content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise OSError(errno.EFBIG, f"more than {limit_bytes} bytes", path)
        return content

    def write_durably(self, path: str, content: bytes | Iterable[bytes]) -> None:
        """Replace a file atomically: a reader, or a crash, sees either the old file or the new one.

        `content`: the bytes, or pieces of them.
        """
        with self._parent(path) as (parent, name):
            partial = name + PARTIAL_SUFFIX
            # An existing one may be a link, or open in another process.
            _unlink(partial, parent)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o666, dir_fd=parent)
            with open(descriptor, "wb") as file:  # noqa: PTH123 - as above
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                os.fsync(descriptor)
            os.rename(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)

    def status(self, path: str) -> os.stat_result:
        """Return the status of the entry itself, even if it is a link."""
        with self._parent(path) as (parent, name):
            return os.stat(name, dir_fd=parent, follow_symlinks=False)

    def status_of(self, entry: "os.DirEntry[str]") -> os.stat_result:
        """Return the status of an entry of this folder, even if it is a link."""
        return os.stat(entry.name, dir_fd=self.descriptor, follow_symlinks=False)

    def exists(self, path: str) -> bool:
        try:
            self.status(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def entries(self, most_bytes: int = LISTED_NAMES_BYTES) -> list["os.DirEntry[str]"]:
        """Return the entries, sorted by name. Query them while the folder is open, and never follow links.

        For the status of many, ask `status_of`: an entry keeps its own, a kilobyte, as long as it lives. Raises
        EOVERFLOW if there are more than `FOLDER_ENTRIES`, or their names take more than `most_bytes` of memory: a
        listing need not end.
        """
        found: list[os.DirEntry[str]] = []
        with os.scandir(self.descriptor) as entries:
            for entry in entries:
                found.append(entry)
                most_bytes -= sys.getsizeof(entry.name)
                if len(found) > FOLDER_ENTRIES:
                    raise OSError(errno.EOVERFLOW, f"more than {FOLDER_ENTRIES:,} files in one folder")
                if most_bytes < 0:
                    raise OSError(errno.EOVERFLOW, f"the names of {len(found):,} files are too long to be listed")
        return sorted(found, key=lambda entry: entry.name)

    def walk(
        self, on_error: Callable[[str, OSError], None] | None = None
    ) -> Iterator[tuple[str, "Folder", list["os.DirEntry[str]"]]]:
        """Yield, for each folder from here down, the prefix of its entries' paths, the folder and its entries.

        A folder is open until the walk is past it and all below it. Then the list of its entries is empty. Links are
        entries like files. A folder that cannot be listed, or is more than `PATH_LEVELS` levels below this one, is
        passed to `on_error` by its prefix; without `on_error` it raises. So is this one, by an empty prefix, if the
        walk ends at `WALKED_ENTRIES`.
        """
        counted = 0
        for prefix, folder, entries in self._walk(on_error, "", PATH_LEVELS, LISTED_NAMES_BYTES):
            counted += 1 + len(entries)
            if counted > WALKED_ENTRIES:
                error = OSError(errno.EOVERFLOW, f"more than {WALKED_ENTRIES:,} files and folders")
                if on_error is None:
                    raise error
                on_error("", error)
                return
            yield prefix, folder, entries

    def _walk(
        self, on_error: Callable[[str, OSError], None] | None, prefix: str, depth: int, most_bytes: int
    ) -> Iterator[tuple[str, "Folder", list["os.DirEntry[str]"]]]:
        try:
            entries = self.entries(most_bytes)
            if not depth:
                raise OSError(errno.ENAMETOOLONG, f"more than {PATH_LEVELS} nested folders", prefix)
        except OSError as error:
            if on_error is None:
                raise
            on_error(prefix, error)
            return
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        yield prefix, self, entries
        # Beside the listings below only the names of folders are kept, whoever has the list.
        entries.clear()
        most_bytes -= sum(map(sys.getsizeof, names))
        for name in names:
            below = f"{prefix}{name}/"
            try:
                folder = self._enter(name)
            except OSError as error:
                if on_error is None:
                    raise
                on_error(below, error)
                continue
            with folder:
                yield from folder._walk(on_error, below, depth - 1, most_bytes)

    def shown(self, path: str) -> str:
        """Return the absolute path of an entry, for a message."""
        return str(Path(f"/proc/self/fd/{self.descriptor}").readlink() / path)

    def read_link(self, path: str) -> str:
        with self._parent(path) as (parent, name):
            return os.readlink(name, dir_fd=parent)

    def link_open_file(self, descriptor: int, path: str) -> None:
        """Give an open file another name, even if its old name means another file by then."""
        with self._parent(path) as (parent, name):
            os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=parent, follow_symlinks=True)

    def rename(self, path: str, to: "Folder", to_path: str) -> None:
        with self._parent(path) as (parent, name), to._parent(to_path) as (to_parent, to_name):
            os.rename(name, to_name, src_dir_fd=parent, dst_dir_fd=to_parent)

    def unlink(self, path: str) -> None:
        """Remove a file or a link, if it exists."""
        with self._parent(path) as (parent, name):
            _unlink(name, parent)

    def remove(self, path: str) -> None:
        """Remove whatever has this name, if it exists: a folder with all its content, however deep.

        Another filesystem in it is not entered: it raises EXDEV.
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
            # Another process removed some of it, or all.
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
        """Yield the descriptor of the folder that holds `path`, and the name of `path` in it."""
        above, slash, name = path.rpartition("/")
        try:
            _names(name)
            if not slash:
                yield self.descriptor, name
            else:
                with self.folder(above) as parent:
                    yield parent.descriptor, name
        except OSError as error:
            # The kernel's error has only the last name.
            error.filename = path
            raise

    def _clear_whole(self) -> None:
        """Remove all entries, at any depth."""
        # Folders that were too deep, by their new names in this one.
        moved: list[str] = []
        self._clear(self, moved, PATH_LEVELS)
        for done, name in enumerate(moved):  # the list grows meanwhile
            if done == _MOST_MOVES:
                raise OSError(
                    errno.ENOTEMPTY, f"more than {done} folders lie more than {PATH_LEVELS} levels deep", name
                )
            self._clear_folder(name, self, moved, PATH_LEVELS)

    def _clear(self, top: "Folder", moved: list[str], depth: int) -> None:
        """Remove all entries. Folders more than `depth` levels below move to `top`; their new names go into `moved`."""
        for entry in self.entries():
            # Another process may remove entries, too.
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
        """Remove a folder if it is empty, and say whether it was. Its mode may forbid moving it."""
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
    """Open the volume's own folder. `path` may be a link: it comes from whoever starts the agent, not the trainer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return Folder(descriptor, os.fstat(descriptor).st_dev)


def fingerprint(status: os.stat_result) -> Fingerprint:
    """Identify a file. The filesystem is not part of it, because `open_file` refuses files of another one."""
    return Fingerprint(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def path_in(volume: Path, path: Path) -> str:
    """Make an absolute path relative to the volume, as text. Raises ValueError if it is not below the volume."""
    below = path.relative_to(volume).as_posix()
    return "" if below == "." else below


def _names(path: str) -> list[str]:
    """Split a path into names. Raises EINVAL for one that is not plain and relative."""
    names = path.split("/")
    if any(name in {"", ".", ".."} for name in names) or "\0" in path:
        raise OSError(errno.EINVAL, "not a plain relative path", path)
    return names


def _elsewhere(path: str) -> OSError:
    return OSError(errno.EXDEV, "on another filesystem than the volume", path)


def _mount_of(descriptor: int) -> str:
    """Return the id of the mount that an open file is on. Raises OSError if the kernel does not say."""
    with open(f"/proc/self/fdinfo/{descriptor}") as lines:  # noqa: PTH123 - of /proc
        for line in lines:
            if line.startswith("mnt_id:"):
                return line.removeprefix("mnt_id:").strip()
    raise OSError(errno.EXDEV, "the kernel does not say which mount it is on")


def _unlink(name: str, parent: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
