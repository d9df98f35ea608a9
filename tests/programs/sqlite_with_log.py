"""`study.db`, an SQLite database with a write-ahead log: each step is a transaction, and so is each save."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.programs.training import Loaded, State, done, run, work

JOURNAL_MODE = "WAL"
_connections: dict[Path, sqlite3.Connection] = {}


def connection(output: Path) -> sqlite3.Connection:
    if output not in _connections:
        _connections[output] = opened = sqlite3.connect(output / "study.db")
        opened.execute(f"PRAGMA journal_mode = {JOURNAL_MODE}")
        opened.execute("CREATE TABLE IF NOT EXISTS states (step INTEGER PRIMARY KEY, state TEXT)")
        opened.execute("CREATE TABLE IF NOT EXISTS steps (step INTEGER, filler TEXT)")
        opened.commit()
    return _connections[output]


def load(output: Path) -> Loaded | None:
    (found,) = connection(output).execute("PRAGMA integrity_check").fetchone()
    assert found == "ok", found
    with closing(connection(output).execute("SELECT step, state FROM states ORDER BY step DESC LIMIT 1")) as rows:
        row = rows.fetchone()
    return (row[0], json.loads(row[1])) if row else None


def save(output: Path, step: int, state: State) -> None:
    with connection(output) as transaction:
        transaction.execute("INSERT OR REPLACE INTO states VALUES (?, ?)", (step, json.dumps(state)))
        work("WRITE_SECONDS")


def log(output: Path, step: int) -> None:
    with connection(output) as transaction:
        transaction.execute("INSERT INTO steps VALUES (?, ?)", (step, "x" * 2000))
        transaction.execute("DELETE FROM steps WHERE step < ?", (step - 100,))


if __name__ == "__main__":
    done(run(load, save, on_step=log))
