"""Stores objects as files below a directory: the blocking half of `file_store.store`.

Owns the mapping of keys to files. A file appears whole or not at all: it is written aside, fsynced and renamed, and its
directory is fsynced. A version is the identity of the file that holds the object. Raises OSError, and StoreError where
`ports.ObjectStore` has an error kind for it. Invariants:

- No reader ever sees half an object.
- No key leads out of the root.
- Everything that is not an object lies in `.keepstep/uploads/`, which listings hide.
- Only a regular file whose name may be a key is an object, so a pipe that others put there blocks nothing.
"""

import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from keepstep_agent.adapters.durable_files import (
    make_folder,
    not_found,
    opened,
    opened_regular,
    sync_folder,
    write_all,
    write_durably,
)
from keepstep_agent.core.errors import ErrorKind, StoreError, object_too_large
from keepstep_agent.core.limits import PIN_BYTES, Count
from keepstep_agent.core.model import Region
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_agent.core.stored.object_layout import KEY_BYTES, UPLOADS_PREFIX
from keepstep_agent.ports import ObjectInfo, PartInfo, UploadInfo

_Record = TypeVar("_Record")
_Result = TypeVar("_Result")

_UPLOADS: Final = UPLOADS_PREFIX.removesuffix("/")
_DATA: Final = "data"
_DESCRIPTION: Final = "upload.json"
_PART: Final = "part-{number:05d}"
_PARTS: Final = "part-[0-9]*[0-9]"
_ASIDE: Final = "put-"
_DIRECTORY_RACES: Final = 64
"""How often a folder may vanish during a write because a delete found it empty."""


@dataclass(frozen=True, slots=True)
class _Description:
    """The file beside an upload's data that says which object it will be."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartRecord:
    """The file beside an upload's data that says which of its bytes a part has written."""

    offset: Count
    size: Count
    receipt: str


class ObjectDirectory:
    """The folder of one destination."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._uploads = root / _UPLOADS

    def path(self, key: str) -> Path:
        """Return where to write an object. Raises REQUEST_REFUSED for a key that would lead out of the root."""
        path = self._place(key)
        if not self._holds(path.parent):
            raise StoreError(ErrorKind.REQUEST_REFUSED, f"{key!r} is not below {self.root}")
        return path

    def _place(self, key: str) -> Path:
        """Judge the key as text only; a link below the root may still lead elsewhere."""
        parts = key.split("/")
        path = self.root.joinpath(*parts)
        inside = (
            all(parts)
            and not {".", ".."} & set(parts)
            and "\0" not in key
            and self._uploads != path
            and self._uploads not in path.parents
        )
        if not inside:
            raise StoreError(ErrorKind.REQUEST_REFUSED, f"{key!r} is not below {self.root}")
        return path

    def _holds(self, folder: Path) -> bool:
        """Whether the folder is in the root when every symbolic link is followed."""
        return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(self.root))

    def opened_to_read(self, key: str) -> AbstractContextManager[int]:
        """Open an object. Raises FileNotFoundError for a link, a folder, or a pipe, which would block."""
        return opened_regular(self._path_of_object(key))

    def read(self, key: str, limit_bytes: int) -> bytes:
        """Read a whole object. Raises REQUEST_REFUSED if it is larger than `limit_bytes`."""
        with self.opened_to_read(key) as descriptor, open(descriptor, "rb", closefd=False) as file:
            body = file.read(limit_bytes + 1)
            if len(body) <= limit_bytes:
                return body
            size_bytes = os.fstat(descriptor).st_size
        raise object_too_large(self.path(key), size_bytes, limit_bytes)

    def _path_of_object(self, key: str) -> Path:
        path = self._place(key)
        if not self._holds(path.parent) or not stat.S_ISREG(path.lstat().st_mode):
            raise not_found(path)
        return path

    def write(self, key: str, body: bytes | bytearray, *, if_absent: bool = False) -> None:
        aside = self.new_aside()
        try:
            with opened(aside, os.O_WRONLY) as descriptor:
                write_all(descriptor, body, 0)
            self.publish(aside, key, if_absent=if_absent)
        finally:
            aside.unlink(missing_ok=True)

    def new_aside(self) -> Path:
        """Make an empty file that is not an object yet."""
        self._uploads.mkdir(parents=True, exist_ok=True)
        aside = self._uploads / f"{_ASIDE}{secrets.token_hex(16)}"
        aside.touch(exist_ok=False)
        return aside

    def publish(self, aside: Path, key: str, *, if_absent: bool = False) -> None:
        """Make the file the object, durably."""
        target = self.path(key)
        with opened(aside, os.O_RDWR) as descriptor:
            os.fsync(descriptor)
        for _ in range(_DIRECTORY_RACES):
            make_folder(target.parent)
            try:
                if if_absent:
                    os.link(aside, target)
                else:
                    aside.replace(target)
            except FileNotFoundError:
                continue
            except FileExistsError as error:
                raise StoreError(ErrorKind.ALREADY_EXISTS, f"{target} exists already") from error
            for folder in (target.parent, *target.parent.parents):
                sync_folder(folder)
                if folder == self.root:
                    return
        raise StoreError(ErrorKind.STORE_FAILED, f"{target.parent} keeps being removed")

    def create_upload(self, key: str) -> str:
        self.path(key)
        upload = secrets.token_hex(16)
        folder = self._uploads / upload
        folder.mkdir(parents=True)
        (folder / _DATA).touch()
        write_durably(folder / _DESCRIPTION, checked_json.encode(_Description(key)))
        sync_folder(self._uploads)
        return upload

    def upload_data(self, key: str, upload: str) -> Path:
        """Return the file that will be the object. Raises UPLOAD_LOST if the upload is over."""
        folder = self._uploads / upload
        described = self._read_record(folder / _DESCRIPTION, _Description) if folder.parent == self._uploads else None
        if described != _Description(key):
            raise _upload_lost(key, upload)
        return folder / _DATA

    def record_part(self, key: str, upload: str, number: int, region: Region, receipt: str) -> None:
        """Make the part's bytes durable, then record the part."""
        data = self.upload_data(key, upload)
        with opened(data, os.O_RDWR) as descriptor:
            os.fdatasync(descriptor)
        record = _PartRecord(offset=region.offset_bytes, size=region.size_bytes, receipt=receipt)
        write_durably(data.with_name(_PART.format(number=number)), checked_json.encode(record))

    def list_parts(self, key: str, upload: str) -> Sequence[PartInfo]:
        return [
            PartInfo(number=number, size_bytes=record.size, receipt=record.receipt)
            for number, record in self._parts(self.upload_data(key, upload).parent)
        ]

    def _parts(self, folder: Path) -> Iterator[tuple[int, _PartRecord]]:
        for file in sorted(folder.glob(_PARTS)):
            record = self._read_record(file, _PartRecord)
            if record is not None:
                yield int(file.name.rpartition("-")[2]), record

    def complete_upload(self, key: str, upload: str, receipts: Sequence[str]) -> None:
        data = self.upload_data(key, upload)
        parts = list(self._parts(data.parent))
        if [record.receipt for _, record in parts] != list(receipts):
            raise _upload_lost(key, upload)
        end = 0
        for number, record in parts:
            if record.offset != end:
                raise StoreError(ErrorKind.REQUEST_REFUSED, f"{key}: part {number} is out of order")
            end += record.size
        os.truncate(data, end)
        self.publish(data, key)
        _forget(data.parent)

    def abort_upload(self, key: str, upload: str) -> None:
        if key == f"{_UPLOADS}/{upload}" and "/" not in upload:
            self._remove_leftover(self.root / key)
            return
        with suppress(StoreError):
            _forget(self.upload_data(key, upload).parent)

    def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        """List the uploads.

        Leftovers of a crash (of an upload, or of an object that was written aside) are listed with their own path as
        the key.
        """
        uploads = [
            UploadInfo(key=key, upload=leftover.name, started_at=started_at, size_bytes=_size_bytes(leftover))
            for leftover, started_at in self._leftovers()
            if (key := f"{_UPLOADS}/{leftover.name}").startswith(prefix)
        ]
        for description in self._uploads.glob(f"*/{_DESCRIPTION}"):
            described = self._read_record(description, _Description)
            with suppress(FileNotFoundError):
                started_at = description.lstat().st_mtime
                if described and described.key.startswith(prefix):
                    upload, size_bytes = description.parent.name, _size_bytes(description.with_name(_DATA))
                    uploads.append(
                        UploadInfo(key=described.key, upload=upload, started_at=started_at, size_bytes=size_bytes)
                    )
        return uploads

    def head(self, key: str) -> ObjectInfo:
        return _info(key, self._path_of_object(key).lstat())

    def listing(self, prefix: str) -> Sequence[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        start = self.root.joinpath(*folder.split("/")) if folder else self.root
        if not self._holds(start):
            return []
        found = self._walk(start, f"{folder}/" if folder else "")
        return [info for info in found if info.key.startswith(prefix)]

    def folders(self, prefix: str) -> Sequence[str]:
        """List the folders right below `prefix`. One without an object is none: a crash may leave it behind."""
        start = self.root.joinpath(*prefix.split("/")) if prefix else self.root
        if not self._holds(start):
            return []
        named = [f"{prefix}{name}" for name in self._names(start) if name.endswith("/")]
        return [one for one in named if _may_be_key(one) and next(self._walk(self.root / one, one), None)]

    def find(self, read: Callable[[], _Result]) -> _Result:
        """Return the result of `read`. Raises NOT_FOUND without such an object, BUCKET_MISSING without the root."""
        try:
            return read()
        except FileNotFoundError as error:
            self._check_root()
            raise StoreError(ErrorKind.NOT_FOUND, f"{error.filename}: {error.strerror}") from error

    def delete(self, key: str) -> None:
        """Remove the object and the folders that it leaves empty, because a bucket has no folders."""
        path = self.path(key)
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:
                return

    def _leftovers(self) -> Iterator[tuple[Path, float]]:
        """Yield files written aside and uploads without a description, with their mtime. Some may still be in use."""
        for path in self._uploads.glob("*"):
            with suppress(FileNotFoundError):
                status = path.stat(follow_symlinks=False)
                described = stat.S_ISDIR(status.st_mode) and (path / _DESCRIPTION).exists()
                if not described:
                    yield path, status.st_mtime

    def _remove_leftover(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                if not (path / _DESCRIPTION).exists():
                    _forget(path)
            else:
                path.unlink()

    def _check_root(self) -> None:
        """Raise BUCKET_MISSING if the root is not a folder: an unmounted root must not look like an empty one."""
        if not self.root.is_dir():
            raise StoreError(
                ErrorKind.BUCKET_MISSING,
                f"the folder {self.root} does not exist",
                hint="check the path and the mount; the first run creates a new destination, or use mkdir",
            )

    def _walk(self, folder: Path, prefix: str) -> Iterator[ObjectInfo]:
        """Yield objects in the order of their keys: a folder sorts by its name and the slash after it."""
        # A stack with the next key last, because folders may be nested deeper than Python can recurse.
        waiting = [prefix]
        while waiting:
            key = waiting.pop()
            path = folder / key[len(prefix) :]
            if path == self._uploads:
                continue
            if key == prefix or key.endswith("/"):
                waiting += [key + name for name in reversed(self._names(path)) if _may_be_key(key + name)]
                continue
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield _info(key, status)

    def _names(self, folder: Path) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                named = [(f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name) for entry in entries]
        except (FileNotFoundError, NotADirectoryError) as error:
            self._check_root()
            if isinstance(error, NotADirectoryError):
                raise
            return []
        return sorted(named, key=os.fsencode)

    def _read_record(self, path: Path, as_type: type[_Record]) -> _Record | None:
        """Read a record beside an upload; None if it is gone or not one that Keepstep wrote."""
        try:
            with opened_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
                return checked_json.decode(file.read(PIN_BYTES + 1), as_type, limit_bytes=PIN_BYTES)
        except (FileNotFoundError, UndecodableError):
            return None


def identity(descriptor: int) -> str:
    """Return the version of an open object."""
    return _identity(os.fstat(descriptor))


def _identity(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=status.st_size, modified_at=status.st_mtime, version=_identity(status))


def _size_bytes(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder of an upload; 0 if it is gone."""
    try:
        status = path.lstat()
        files = [one.lstat() for one in path.iterdir()] if stat.S_ISDIR(status.st_mode) else [status]
    except FileNotFoundError:
        return 0
    return sum(one.st_size for one in files if stat.S_ISREG(one.st_mode))


def _forget(folder: Path) -> None:
    # The description goes first: without it the upload is over, even if a crash leaves the rest.
    (folder / _DESCRIPTION).unlink(missing_ok=True)
    for file in list(folder.iterdir()):
        file.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.rmdir()


def _may_be_key(key: str) -> bool:
    """Whether it may be a bucket's key, or the prefix of one."""
    try:
        return len(key.encode()) <= KEY_BYTES
    except UnicodeEncodeError:
        return False


def _upload_lost(key: str, upload: str) -> StoreError:
    return StoreError(ErrorKind.UPLOAD_LOST, f"there is no upload {upload} of {key}")
