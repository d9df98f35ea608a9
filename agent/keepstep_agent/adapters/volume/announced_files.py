"""Finds the files that an announced path means, and checks that each lies in the volume and can be stored.

Reads names only, never content. Invariants: nothing is skipped silently; a file that cannot be stored raises a
RequestError that names it; a link that stays inside the volume is followed, and one that leaves it is refused. Links
are resolved here by reading them. The result is a path without links, which `shared_volume` opens as such or not at
all. For speed, paths are strings, and what a folder's listing tells is not asked again: a checkpoint can have ten
thousand files.
"""

import errno
import os
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume
from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError, VolumeError
from keepstep_agent.core.file_lists import PathList
from keepstep_agent.core.limits import FILES_PER_RANK, LISTED_NAMES_BYTES, PATH_BYTES, PATH_LEVELS, WALKED_ENTRIES
from keepstep_agent.core.stored.object_layout import check_directory, check_file_path
from keepstep_api.names import STATE_DIRECTORY

_MOST_LINKS: Final = 40
"""On the way to one file; the kernel has the same limit."""
_SHOWN_CHARACTERS: Final = 200
_KINDS: Final = (
    (stat.S_ISFIFO, "a fifo"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISDIR, "a directory"),
)


def check_path(path: str) -> None:
    """Raise RequestError unless `path` is an absolute path that the journal and the log can hold."""
    if not path.startswith("/") or "\0" in path:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"{path!r} is not an absolute path" if path else "the announcement has no path",
            hint="give the checkpoint's absolute path as trainer and agent both see it",
        )
    try:
        size_bytes = len(path.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            ErrorKind.BAD_NAME, f"{os.fsencode(path)!r} is not UTF-8", hint="rename the file or the directory"
        ) from error
    if size_bytes > PATH_BYTES:
        raise RequestError(
            ErrorKind.BAD_NAME,
            f"the path {path[:_SHOWN_CHARACTERS]}… has {size_bytes} bytes",
            hint=f"use a path of at most {PATH_BYTES} bytes",
        )


def resolve_path(volume: Path, path: str) -> str:
    """Return where below the volume an announced path leads. Does not look at what is below it.

    Raises RequestError, and VolumeError if something is missing or unreadable.
    """
    try:
        with open_volume(volume) as root:
            return _Resolver(root, volume).resolve(path)
    except OSError as error:
        raise _unreadable(volume, path, error) from error


def directory_of(volume: Path, checkpoint_directory: Path, path: str) -> str:
    """Return the directory of an announced path as records call it. Empty too if it cannot be had: staging says why."""
    try:
        directory = resolve_path(volume, path.rpartition("/")[0] or "/") or "."
        is_default = directory == (resolve_path(volume, str(checkpoint_directory)) or ".")
    except KeepstepError:
        return ""
    return "" if is_default else check_directory(directory)


class AnnouncedFiles:
    """The files that an announced path means, sorted by path."""

    def __init__(self, folder: str, files: Iterable[tuple[str, str]]) -> None:
        """`files`: each path in the checkpoint, and where it lies below the volume: mostly at the same in `folder`.

        Raises RequestError for a name that cannot be stored, and if all paths take more than `LISTED_NAMES_BYTES`.
        """
        self._folder = folder
        self._elsewhere: dict[bytes, bytes] = {}
        paths = []
        left_bytes = LISTED_NAMES_BYTES
        for path, source in files:
            paths.append(check_file_path(path).encode())
            left_bytes -= sys.getsizeof(path)
            if source != self._in_folder(path):
                self._elsewhere[paths[-1]] = os.fsencode(source)
                left_bytes -= sys.getsizeof(source)
            if left_bytes < 0:
                raise RequestError(
                    ErrorKind.BAD_REQUEST,
                    f"the paths of the first {len(paths):,} files in {folder or 'the volume'} are too long together",
                    hint=f"write fewer and larger files, or give them shorter names: {path[:_SHOWN_CHARACTERS]}",
                )
        self.paths = PathList.encoded(sorted(paths))

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield each path in the checkpoint and where its file lies below the volume."""
        return ((path, self.source(path)) for path in self.paths)

    @property
    def sources(self) -> Sequence[str]:
        """Where the files lie below the volume."""
        return list(map(self.source, self.paths)) if self._elsewhere else self.paths.below(self._folder)

    def source(self, path: str) -> str:
        """Return where the file of a path lies below the volume."""
        elsewhere = self._elsewhere.get(path.encode()) if self._elsewhere else None
        return os.fsdecode(elsewhere) if elsewhere else self._in_folder(path)

    def _in_folder(self, path: str) -> str:
        return f"{self._folder}/{path}" if self._folder else path


def resolve_files(volume: Path, path: str, files: Sequence[str]) -> AnnouncedFiles:
    """Find the files of a checkpoint.

    If `files` is empty, the checkpoint is everything below `path`. Raises RequestError, and VolumeError if something
    is missing or unreadable.
    """
    try:
        with open_volume(volume) as root:
            resolver = _Resolver(root, volume)
            found = AnnouncedFiles(resolver.resolve(path), islice(resolver.files(path, files), FILES_PER_RANK + 1))
    except OSError as error:
        raise _unreadable(volume, path, error) from error
    if len(found) > FILES_PER_RANK:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"{path} has more than {FILES_PER_RANK:,} files",
            hint="write fewer and larger files, or announce the files of each rank",
        )
    if not found:
        raise RequestError(
            ErrorKind.CHECKPOINT_EMPTY, f"{path} has no files", hint="announce after the files are written"
        )
    return found


class _Resolver:
    """Resolves announced paths to files of one volume."""

    def __init__(self, root: Folder, volume: Path) -> None:
        self._root = root
        self._volume = volume
        # If the volume's own name is a link, trainers may use either path.
        self._starts = tuple(dict.fromkeys((str(volume), os.path.realpath(volume))))
        self._folders: dict[str, str] = {}
        self._walked_entries = 0

    def files(self, announced: str, files: Sequence[str]) -> Iterator[tuple[str, str]]:
        found = self.resolve(announced)
        if found and not stat.S_ISDIR(self._root.status(found).st_mode):
            if files:
                raise RequestError(
                    ErrorKind.BAD_REQUEST,
                    f"{announced} is one file, and {len(files)} files of it were announced",
                    hint="announce the directory that holds the files",
                )
            yield announced.rstrip("/").rpartition("/")[2], self._regular(found, announced)
        elif files:
            for path in dict.fromkeys(files):
                yield path, self._named(announced, path)
        else:
            yield from self._walk(found, announced, "", (found,), LISTED_NAMES_BYTES)

    def resolve(self, path: str) -> str:
        """Return where below the volume an absolute path leads; empty for the volume itself."""
        check_path(path)
        below = self._below(path)
        if below is None:
            # The path may use links outside the volume, which are not the trainer's.
            below = self._below(_real_path(path))
        if below is None:
            raise self._outside(f"{path} is")
        found = self._follow(below, path)
        if found == STATE_DIRECTORY or found.startswith(f"{STATE_DIRECTORY}/"):
            raise RequestError(
                ErrorKind.BAD_REQUEST,
                f"{self._volume}/{found} is Keepstep's own folder",
                hint=f"save into a folder of the volume other than {STATE_DIRECTORY}",
            )
        return found

    def _below(self, path: str) -> str | None:
        for start in self._starts:
            if path == start or path.startswith(f"{start}/"):
                return path[len(start) + 1 :]
        return None

    def _follow(self, below: str, named: str) -> str:
        """Resolve the links of a path `below` the volume."""
        done: list[str] = []
        waiting = deque(below.split("/"))
        last_link = ""
        links = 0
        while waiting:
            name = waiting.popleft()
            if name in {"", "."}:
                continue
            if name == "..":
                if not done:
                    raise self._outside(f"{named} is")
                done.pop()
                continue
            here = "/".join((*done, name))
            try:
                if not stat.S_ISLNK(self._root.status(here).st_mode):
                    done.append(name)
                    continue
                target = self._root.read_link(here)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise (_dangling(named, last_link) if last_link else error) from error
            links += 1
            last_link = target
            if links > _MOST_LINKS:
                raise RequestError(ErrorKind.BAD_REQUEST, f"{named} is part of a loop of links", hint="remove the link")
            if target.startswith("/"):
                inside = self._below(target)
                if inside is None:
                    raise self._outside(f"{named} is, or lies below, a link to {target}, which is")
                target = inside
                done.clear()
            waiting.extendleft(reversed(target.split("/")))
        return "/".join(done)

    def _named(self, announced: str, path: str) -> str:
        above, _, name = check_file_path(path).rpartition("/")
        if above not in self._folders:
            self._folders[above] = self.resolve(f"{announced}/{above}")
        folder = self._folders[above]
        found = f"{folder}/{name}" if folder else name
        if stat.S_ISLNK(self._root.status(found).st_mode):
            found = self.resolve(f"{announced}/{path}")
        return self._regular(found, f"{announced}/{path}")

    def _walk(
        self, found: str, named: str, prefix: str, ancestors: tuple[str, ...], most_bytes: int
    ) -> Iterator[tuple[str, str]]:
        """Yield every file below the folder `found`. `ancestors` are the folders that lead to it; it is the last.

        `most_bytes`: of the names in it, as in `Folder.entries`.
        """
        if len(ancestors) > PATH_LEVELS:
            shown = named if len(named) <= _SHOWN_CHARACTERS else f"{named[:_SHOWN_CHARACTERS]}…"
            raise RequestError(
                ErrorKind.BAD_REQUEST,
                f"{shown} has more than {PATH_LEVELS} nested folders",
                hint="use fewer nested folders",
            )
        inside = f"{found}/" if found else ""
        # A link leads to a path of its own.
        folders, links = [], dict[str, str]()
        with self._root.folder(found) as folder:
            entries = folder.entries(most_bytes)
            self._walked_entries += 1 + len(entries)
            if self._walked_entries > WALKED_ENTRIES:
                raise RequestError(
                    ErrorKind.BAD_REQUEST,
                    f"{named} is in a tree of more than {WALKED_ENTRIES:,} files and folders",
                    hint="announce a directory of its own for each checkpoint, and make no folders in it meanwhile",
                )
            for entry in entries:
                path, shown = inside + entry.name, f"{named}/{entry.name}"
                if entry.is_file(follow_symlinks=False):
                    yield prefix + entry.name, path
                    continue
                is_elsewhere = entry.is_symlink() or path == STATE_DIRECTORY
                if is_elsewhere:
                    path = self.resolve(f"{self._starts[0]}/{path}")
                if path and not stat.S_ISDIR(self._root.status(path).st_mode):
                    yield prefix + entry.name, self._regular(path, shown)
                    continue
                if path in ancestors:
                    raise RequestError(
                        ErrorKind.BAD_REQUEST,
                        f"{shown} is a link to {self._volume}/{path}, the directory that contains it",
                        hint="remove the link: it would make the checkpoint endless",
                    )
                folders.append(entry.name)
                most_bytes -= sys.getsizeof(entry.name)
                if is_elsewhere:
                    links[entry.name] = path
                    most_bytes -= sys.getsizeof(path)
                    if most_bytes < 0:
                        raise OSError(errno.EOVERFLOW, f"the paths of {len(links):,} links are too long")
            del entries
        for name in folders:
            # One to the volume itself is empty.
            path = links.get(name, inside + name)
            yield from self._walk(path, f"{named}/{name}", f"{prefix}{name}/", (*ancestors, path), most_bytes)

    def _regular(self, found: str, named: str) -> str:
        mode = self._root.status(found).st_mode
        if stat.S_ISREG(mode):
            return found
        kind = next((name for test, name in _KINDS if test(mode)), "not a regular file")
        raise RequestError(
            ErrorKind.BAD_REQUEST, f"{named} is {kind}", hint="checkpoints hold only regular files: move it elsewhere"
        )

    def _outside(self, what: str) -> RequestError:
        return RequestError(
            ErrorKind.PATH_OUTSIDE_VOLUME,
            f"{what} outside the volume {self._volume}",
            hint="save into the shared volume, without links that leave it",
        )


def _real_path(path: str) -> str:
    try:
        return os.path.realpath(path)
    except RecursionError:
        raise RequestError(
            ErrorKind.BAD_REQUEST, f"{path} leads through too many links", hint="give the checkpoint's own path"
        ) from None


def _dangling(named: str, target: str) -> VolumeError:
    return VolumeError(
        ErrorKind.FILE_MISSING,
        f"{named} is a link to {target}, which does not exist",
        hint="remove the link, or write the file it names",
    )


def _unreadable(volume: Path, path: str, error: OSError) -> VolumeError:
    return volume_error(error, f"cannot read {f'{volume}/{error.filename}' if error.filename else path}")
