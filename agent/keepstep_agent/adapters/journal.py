"""The agent's durable log in SQLite: what an answered call promised survives a SIGKILL and a power cut.

Owns one file (and SQLite's -wal beside it). Knows nothing of what the records mean. Invariants: a record is either
whole or absent; the order of replay is the order of append; a file that cannot be trusted is moved aside and not
deleted.
"""

import errno
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import structlog

from keepstep_agent.adapters.durable_files import opened, sync_folder
from keepstep_agent.adapters.volume.disk import Reserve
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.own_entries import JOURNAL_SUFFIXES
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.ports import Journal

T = TypeVar("T")

_SCHEMA_VERSION: Final = 1
_HEADER: Final = b"SQLite format 3\0"
_LOCK_TIMEOUT_SECONDS: Final = 5.0
_TOGETHER_BYTES: Final = 1024 * 1024
"""How many bytes of records are read at a time, unless one alone has more."""
_DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY_CODE: Final = 0xFF

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class SqliteJournal:
    """`ports.Journal` in one SQLite file, opened at its first use. Safe to call from several threads."""

    def __init__(self, path: Path, reserve: Reserve) -> None:
        """`reserve` is spent when the volume has no room for a record."""
        self._path = path
        self._reserve = reserve
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def append(self, records: Sequence[bytes]) -> None:
        def insert() -> None:
            with self._transaction() as connection:
                connection.executemany("INSERT INTO records (body) VALUES (?)", [(record,) for record in records])

        self._with_room(insert)

    def replay(self) -> Iterator[bytes]:
        last_id = 0

        def select() -> list[tuple[int, bytes]]:
            rows: list[tuple[int, bytes]] = []
            size_bytes = 0
            with self._transaction() as connection:
                for number, body in connection.execute(
                    "SELECT id, body FROM records WHERE id > ? ORDER BY id", (last_id,)
                ):
                    # SQLite stores any type in a column. If the byte that says which is damaged, it is no record.
                    rows.append((number, body if isinstance(body, bytes) else b""))
                    size_bytes += len(rows[-1][1])
                    if size_bytes >= _TOGETHER_BYTES:
                        break
            return rows

        nothing: list[tuple[int, bytes]] = []
        while rows := self._with_room(select, when_not_begun=nothing):
            last_id = rows[-1][0]
            yield from (body for _, body in rows)

    def drop(self, positions: Collection[int]) -> None:
        with self._transaction() as connection:
            numbers = [number for (number,) in connection.execute("SELECT id FROM records ORDER BY id")]
            dropped = ((numbers[position],) for position in positions)
            connection.executemany("DELETE FROM records WHERE id = ?", dropped)

    def move_aside(self) -> None:
        self.close()
        aside = _move_away(self._path)
        _log.error("journal.moved_aside", path=str(self._path), kept_as=str(aside))
        # This makes the file, if there is room.
        next(self.replay(), None)

    def close(self) -> None:
        with self._lock, _translated(self._path):
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def verify(self) -> bool:
        """Whether the file is a sound journal or absent. Reads all of it."""

        def check() -> bool:
            with self._transaction() as connection:
                (finding,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                # The table's definition is text in the file: a changed letter of it is sound to SQLite.
                (columns,) = connection.execute(
                    "SELECT count(*) FROM pragma_table_info('records') WHERE name IN ('id', 'body')"
                ).fetchone()
                return bool(finding == "ok" and columns == 2)

        try:
            return self._with_room(check, when_not_begun=True)
        except VolumeError as error:
            if _is_damage(error.__cause__):
                return False
            raise

    def _with_room(self, action: Callable[[], T], *, when_not_begun: T | None = None) -> T:
        """Run `action`; if the volume is full, spend the reserve and run it again.

        `when_not_begun` is the result if the volume has no room even for an empty journal.
        """
        try:
            return action()
        except VolumeError as error:
            if error.kind is not ErrorKind.DISK_FULL:
                raise
            if self._reserve.spend():
                return self._with_room(action, when_not_begun=when_not_begun)
            if when_not_begun is None or self._is_begun():
                raise
            return when_not_begun

    def _is_begun(self) -> bool:
        """Whether there may be records. A file without the table has none. Only reads."""
        with self._lock:
            if self._connection is not None:
                return True
            if not self._path.exists():
                return False
            try:
                with closing(sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT_SECONDS)) as connection:
                    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
                    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            except (sqlite3.Error, UnicodeDecodeError):
                return True
        return bool(tables)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _translated(self._path):
            if self._connection is None:
                self._connection = _connect(self._path)
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # A full disk makes SQLite roll back by itself.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise


def open_journal(path: Path, reserve: Reserve) -> tuple[Journal, bool]:
    """Return the journal at `path`, and whether a damaged one was there, which is moved aside for a new one."""
    journal = SqliteJournal(path, reserve)
    if journal.verify():
        return journal, False
    journal.move_aside()
    return journal, True


def _connect(path: Path) -> sqlite3.Connection:
    _refuse_links(path)
    if path.exists():
        _refuse_foreign(path)
    else:
        _create(path)
    connection = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        # Exclusive, so that a second agent is refused and WAL needs no shared memory file, which means SIGBUS on a full
        # volume. Before the first read, which would need that file, too, if a killed agent has left a WAL.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if version != _SCHEMA_VERSION and (version, tables) != (0, 0):
            raise _ForeignDatabaseError(f"schema version {version} is unknown")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        if version != _SCHEMA_VERSION:
            # Not where the file is made: an earlier try may have made it and found no room for the table.
            sync_folder(path.parent)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
            connection.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_links(path: Path) -> None:
    """Raise OSError if a file of the journal is a link or not a regular file.

    If the state directory is on the volume, a trainer may put a link there that leads to another file of the agent.
    """
    for suffix in JOURNAL_SUFFIXES:
        part = path.with_name(path.name + suffix)
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(part.lstat().st_mode):
                raise OSError(errno.ELOOP, f"{part.name} is not a regular file", str(part))


def _refuse_foreign(path: Path) -> None:
    """Raise if the file is no database. SQLite would delete its -wal, but both are to be kept as they are."""
    with path.open("rb") as file:
        header = file.read(len(_HEADER))
    if header not in {b"", _HEADER}:
        raise _ForeignDatabaseError("not an SQLite file")


def _create(path: Path) -> None:
    """Make an empty file with the folder's read and write bits for owner and group; SQLite's -wal gets them, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.parent.stat().st_mode & 0o660
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, mode) as descriptor:
        os.fchmod(descriptor, mode)


def _move_away(path: Path) -> Path:
    taken = {entry.name for entry in path.parent.iterdir()}
    number = next(number for number in range(1, len(taken) + 2) if f"{path.name}.damaged-{number}" not in taken)
    aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        for suffix in ("", "-wal", "-shm"):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
        sync_folder(path.parent)
    except OSError as error:
        raise volume_error(error, f"cannot move aside the journal {path}") from error
    return aside


class _ForeignDatabaseError(sqlite3.DatabaseError):
    """The file is not a journal of Keepstep's."""


def _is_damage(error: BaseException | None) -> bool:
    if isinstance(error, (_ForeignDatabaseError, UnicodeDecodeError)):
        return True
    # The code is absent on errors that the sqlite3 module itself raises.
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and code & _PRIMARY_CODE in _DAMAGE


def _is_full(folder: Path) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail == 0 or (found.f_files > 0 and found.f_favail == 0)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    what = f"journal {path}"
    try:
        yield
    except OSError as error:
        raise volume_error(error, what) from error
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # SQLite's error for a damaged schema quotes its bytes, which the sqlite3 module then decodes as UTF-8.
        code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
        # SQLite reports an I/O error when it opens a WAL on a full volume.
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(path.parent)):
            raise VolumeError(
                ErrorKind.DISK_FULL, f"{what}: {error}", hint="free space on the volume, or raise its sizeLimit"
            ) from error
        hint = "mount the volume read-write, and give the agent's user write access"
        if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            hint = "another agent uses this volume: stop it first"
        raise VolumeError(ErrorKind.VOLUME_UNUSABLE, f"{what}: {error}", hint=hint) from error
