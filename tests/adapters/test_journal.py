"""The journal's contract, on the fake and on SQLite; then what only a real file can suffer."""

import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.fake_journal import FakeJournal
from tests.harness.small_volume import mounted

from keepstep_agent.adapters.journal import SqliteJournal, open_journal
from keepstep_agent.adapters.volume.disk import Reserve
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.ports import Journal

Reopen = Callable[[], Journal]


def _journal(folder: Path) -> SqliteJournal:
    return SqliteJournal(folder / "journal.sqlite3", Reserve(folder))


@pytest.fixture(params=["fake", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Closes the journal and opens it again, as the next start of the agent does."""
    fake = FakeJournal()
    opened: list[Journal] = []

    def open_again() -> Journal:
        for journal in opened:
            journal.close()
        opened[:] = [fake if request.param == "fake" else _journal(tmp_path)]
        return opened[0]

    yield open_again
    for journal in opened:
        journal.close()


def test_a_new_journal_is_empty(reopen: Reopen) -> None:
    assert list(reopen().replay()) == []


def test_records_come_back_whole_and_in_order(reopen: Reopen) -> None:
    records = [b"", b"\0\xff", b"x" * 100_000, b"", b"last"]
    journal = reopen()
    journal.append(records[:2])
    journal.append(records[2:])
    assert list(journal.replay()) == records
    assert list(reopen().replay()) == records


def test_what_is_dropped_is_gone_and_appending_goes_on_after_it(reopen: Reopen) -> None:
    journal = reopen()
    journal.append([b"old", b"kept", b"older"])
    journal.drop([0, 2])
    journal.append([b"new"])
    assert list(reopen().replay()) == [b"kept", b"new"]


def test_appending_nothing_changes_nothing(reopen: Reopen) -> None:
    journal = reopen()
    journal.append([])
    assert list(journal.replay()) == []


def test_closing_twice_is_harmless(reopen: Reopen) -> None:
    journal = reopen()
    journal.append([b"record"])
    journal.close()
    journal.close()


def test_the_file_appears_at_the_first_use_with_the_permissions_of_its_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    journal = _journal(tmp_path)
    assert list(tmp_path.iterdir()) == []
    journal.append([b"record"])
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o660}
    journal.close()


def test_a_second_agent_on_the_same_journal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep_agent.adapters.journal._LOCK_TIMEOUT_SECONDS", 0.05)
    first, second = (
        _journal(tmp_path),
        _journal(tmp_path),
    )
    first.append([b"record"])
    with pytest.raises(VolumeError, match="locked") as caught:
        second.append([b"other"])
    assert caught.value.kind is ErrorKind.VOLUME_UNUSABLE
    assert "another agent" in caught.value.hint
    first.close()
    second.append([b"other"])
    assert list(second.replay()) == [b"record", b"other"]
    second.close()


def test_a_sound_journal_is_opened_as_it_is(tmp_path: Path) -> None:
    journal, damaged = open_journal(tmp_path / "journal.sqlite3", Reserve(tmp_path))
    assert not damaged
    journal.append([b"record"])
    journal.close()
    journal, damaged = open_journal(tmp_path / "journal.sqlite3", Reserve(tmp_path))
    assert not damaged
    assert list(journal.replay()) == [b"record"]
    journal.close()


def _no_database(path: Path) -> None:
    path.write_bytes(b"this is no database, and never was one" * 100)


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _torn_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 : 4096 + 2048] = os.urandom(2048)
    path.write_bytes(content)


def _no_text_in_the_schema(path: Path) -> None:
    """What SQLite says of it is no UTF-8, and the sqlite3 module fails at that."""
    content = path.read_bytes()
    assert content.count(b"tablerecordsrecords") == 1
    path.write_bytes(content.replace(b"tablerecordsrecords\x02C", b"tablerecor\x8dsrecords\x02X"))


def _another_column_in_the_schema(path: Path) -> None:
    """One bit of the table's definition, which SQLite takes for what somebody wanted."""
    content = path.read_bytes()
    assert content.count(b"(id INTEGER") == 1
    path.write_bytes(content.replace(b"(id INTEGER", b"(ie INTEGER"))


def _another_schema(path: Path) -> None:
    path.unlink()
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE songs (name TEXT)")
    database.close()


@pytest.mark.parametrize(
    "damage",
    [_no_database, _truncated, _torn_page, _no_text_in_the_schema, _another_column_in_the_schema, _another_schema],
)
def test_a_damaged_journal_is_moved_aside_and_a_new_one_begun(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "journal.sqlite3"
    for number in (1, 2):
        journal = SqliteJournal(path, Reserve(path.parent))
        journal.append([b"x" * 3000 for _ in range(20)])
        journal.close()
        damage(path)
        kept = path.read_bytes()
        fresh, damaged = open_journal(path, Reserve(path.parent))
        assert damaged
        assert list(fresh.replay()) == []
        fresh.append([b"again"])
        fresh.close()
        assert (tmp_path / f"journal.sqlite3.damaged-{number}").read_bytes() == kept


def test_a_damaged_journal_takes_its_write_ahead_log_with_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    _no_database(path)
    (tmp_path / "journal.sqlite3-wal").write_bytes(b"wal")
    (tmp_path / "journal.sqlite3-shm").write_bytes(b"shm")
    fresh, damaged = open_journal(path, Reserve(path.parent))
    fresh.close()
    assert damaged
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "journal.sqlite3",
        "journal.sqlite3.damaged-1",
        "journal.sqlite3.damaged-1-wal",
        "journal.sqlite3.damaged-1-shm",
    }


def test_an_unusable_folder_is_the_volumes_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(VolumeError):
        SqliteJournal(tmp_path / "file" / "journal.sqlite3", Reserve(tmp_path)).append([b"record"])


def _fill(volume: Path) -> None:
    with (volume / "filler").open("ab", buffering=0) as file:
        for piece in (65536, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(piece)):
                    pass


@pytest.mark.root
@pytest.mark.parametrize("damage", [None, _no_database], ids=["no journal", "a damaged journal"])
def test_a_volume_without_room_for_a_new_journal_has_an_empty_one(
    tmp_path: Path, damage: Callable[[Path], None] | None
) -> None:
    with mounted(tmp_path / "volume", 1 << 20) as volume:
        path = volume / "journal.sqlite3"
        if damage:
            damage(path)
        _fill(volume)
        for was_damaged in (damage is not None, False):
            # The second time as the next start finds it.
            journal, damaged = open_journal(path, Reserve(volume))
            assert damaged == was_damaged
            assert list(journal.replay()) == []
            with pytest.raises(VolumeError, match="full") as caught:
                journal.append([b"found"])
            assert caught.value.kind is ErrorKind.DISK_FULL
            journal.move_aside()
            journal.close()
        (volume / "filler").unlink()
        journal.append([b"found"])
        assert list(journal.replay()) == [b"found"]
        journal.close()


def test_a_journal_with_records_is_never_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = _journal(tmp_path)
    journal.append([b"record"])
    journal.close()

    def full(_: Path) -> None:
        raise VolumeError(ErrorKind.DISK_FULL, "full", hint="")

    monkeypatch.setattr("keepstep_agent.adapters.journal._refuse_foreign", full)
    for read in (lambda: list(journal.replay()), journal.verify):
        with pytest.raises(VolumeError, match="full"):
            read()


_WRITER = """
import sys
from pathlib import Path
from keepstep_agent.adapters.journal import SqliteJournal
from keepstep_agent.adapters.volume.disk import Reserve

path = Path(sys.argv[1])
journal = SqliteJournal(path, Reserve(path.parent))
number = len(list(journal.replay()))
while True:
    journal.append([b"%d" % number, b"%d" % (number + 1)])
    number += 2
    print(number, flush=True)
"""


def test_every_acknowledged_record_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    acknowledged = 0
    for round_number in range(12):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            try:
                for _ in range(1 + 7 * round_number % 23):
                    acknowledged = int(writer.stdout.readline())
            finally:
                writer.send_signal(signal.SIGKILL)
            # What it said before it died counts as well.
            for line in writer.stdout:
                acknowledged = int(line) if line.endswith(b"\n") else acknowledged
        journal, damaged = open_journal(path, Reserve(path.parent))
        records = [int(record) for record in journal.replay()]
        journal.close()
        assert not damaged
        assert len(records) >= acknowledged
        assert len(records) % 2 == 0
        assert records == list(range(len(records)))
