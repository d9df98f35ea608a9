"""As `sqlite_with_log`, with a rollback journal, which exists while a transaction is open."""

from tests.programs import sqlite_with_log
from tests.programs.training import done, run

if __name__ == "__main__":
    sqlite_with_log.JOURNAL_MODE = "DELETE"
    done(run(sqlite_with_log.load, sqlite_with_log.save, on_step=sqlite_with_log.log))
