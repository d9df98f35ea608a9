"""Which files an announced path means: every one of them resolved, found to lie in the volume, and fit to be stored.

Reads names only, never content. Invariants: nothing is skipped in silence; what cannot be stored is a RequestError that
names it; a link that stays inside the volume is followed, one that leaves it is refused. A name may move after it was
resolved: `pinning` checks again what it opens. Paths of files are strings, and what the folder's listing tells is not
asked again: a checkpoint can have ten thousand.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from mooring_agent.adapters.volume.errors import volume_error
from mooring_agent.core.errors import ErrorKind, MooringError, RequestError, VolumeError
from mooring_agent.core.object_layout import check_file_path
from mooring_api.names import STATE_DIRECTORY

_KINDS: Final = (
    (stat.S_ISFIFO, "a fifo"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISDIR, "a directory"),
)


def check_source(source: str) -> None:
    """Raises RequestError for what can be no announced path at all."""
    if not source.startswith("/") or "\0" in source:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"{source!r} is not an absolute path" if source else "the announcement has no path",
            hint="give the checkpoint's absolute path as trainer and agent both see it",
        )


def resolve_source(volume: Path, source: str) -> Path:
    """Where an announced path leads, without a look at what is below it.

    `volume` is resolved already. Raises RequestError, and VolumeError for what is missing or unreadable.
    """
    check_source(source)
    try:
        return _resolve(volume, Path(source))
    except OSError as error:
        raise volume_error(error, f"cannot read {source}") from error


def resolve_sources(volume: Path, source: str, files: Sequence[str]) -> dict[str, str]:
    """Path in the checkpoint -> resolved file, by path. `files` empty: everything below `source`.

    `volume` is resolved already. Raises RequestError, and VolumeError for what is missing or unreadable.
    """
    announced = Path(source)
    try:
        root = resolve_source(volume, source)
        if not root.is_dir():
            if files:
                raise RequestError(
                    ErrorKind.BAD_REQUEST,
                    f"{source} is one file, and {len(files)} files of it were announced",
                    hint="announce the directory that holds the files",
                )
            found = {announced.name: _regular(str(root), str(announced))}
        elif files:
            found = {path: _named(volume, root, path) for path in dict.fromkeys(files)}
        else:
            found = dict(_walk(volume, str(root), "", (str(root),)))
    except OSError as error:
        raise volume_error(error, f"cannot read {error.filename or source}") from error
    for path in found:
        check_file_path(path)
    if not found:
        raise RequestError(
            ErrorKind.CHECKPOINT_EMPTY, f"{source} has no files", hint="announce after the files are written"
        )
    return dict(sorted(found.items()))


def _named(volume: Path, root: Path, path: str) -> str:
    named = root / check_file_path(path)
    return _regular(str(_resolve(volume, named)), str(named))


def _walk(volume: Path, folder: str, prefix: str, ancestors: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """`folder` and its `ancestors` are resolved."""
    own = str(volume / STATE_DIRECTORY)
    with os.scandir(folder) as entries:
        for entry in entries:
            name, path = prefix + entry.name, entry.path
            if entry.is_file(follow_symlinks=False):
                yield name, path
                continue
            if entry.is_symlink():
                real = str(_resolve(volume, Path(path)))
            elif path == own:
                raise _reserved(path)
            else:
                real = path
            if stat.S_ISDIR(os.lstat(real).st_mode):
                if real in ancestors:
                    raise RequestError(
                        ErrorKind.BAD_REQUEST,
                        f"{path} is a link to {real}, which holds it",
                        hint="remove the link: it would make the checkpoint endless",
                    )
                yield from _walk(volume, real, f"{name}/", (*ancestors, real))
            else:
                yield name, _regular(real, path)


def _resolve(volume: Path, path: Path) -> Path:
    """Where `path` really leads, if that is a place in the volume that may be staged."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise _unresolved(path, error) from error
    if not real.is_relative_to(volume):
        leads = f"{path} leads to {real}, which is" if real != path else f"{path} is"
        raise RequestError(
            ErrorKind.PATH_OUTSIDE_VOLUME,
            f"{leads} outside the volume {volume}",
            hint="save into the shared volume, without links that leave it",
        )
    if real.is_relative_to(volume / STATE_DIRECTORY):
        raise _reserved(str(real))
    return real


def _unresolved(path: Path, error: OSError | RuntimeError) -> MooringError:
    if isinstance(error, RuntimeError) or error.errno == errno.ELOOP:
        return RequestError(ErrorKind.BAD_REQUEST, f"{path} is a link in a circle", hint="remove the link")
    if path.is_symlink():
        return VolumeError(
            ErrorKind.FILE_MISSING,
            f"{path} is a link to {path.readlink()}, which does not exist",
            hint="remove the link, or write the file it names",
        )
    return volume_error(error, f"cannot read {path}")


def _regular(real: str, named: str) -> str:
    mode = os.lstat(real).st_mode
    if stat.S_ISREG(mode):
        return real
    kind = next((name for test, name in _KINDS if test(mode)), "no regular file")
    raise RequestError(
        ErrorKind.BAD_REQUEST, f"{named} is {kind}", hint="a checkpoint is made of plain files: move it elsewhere"
    )


def _reserved(path: str) -> RequestError:
    return RequestError(
        ErrorKind.BAD_REQUEST,
        f"{path} is Mooring's own folder",
        hint=f"save into a folder of the volume other than {STATE_DIRECTORY}",
    )
