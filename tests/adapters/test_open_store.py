"""Opening a store: its library and what that reads may lie on a disk that does not answer."""

import errno
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from tests.adapters.s3_faults.store_calls import fails

from keepstep_agent.adapters import open_store
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.settings.values import StoreSettings


async def test_a_store_that_cannot_be_opened_in_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, settings = threading.Event(), StoreSettings(destination=f"file://{tmp_path}")
    monkeypatch.setattr(open_store, "_OPENING_SECONDS", 0.1)
    monkeypatch.setattr(open_store, "_make", lambda *_: answers.wait())
    try:
        error = await fails(ErrorKind.TIMED_OUT, open_store.open_store(settings).__aenter__())
        assert "was not opened" in str(error)
        threads = threading.active_count()
        error = await fails(ErrorKind.TIMED_OUT, open_store.open_store(settings).__aenter__())
        assert "while an earlier try hangs" in str(error)
        assert threading.active_count() == threads
    finally:
        answers.set()
    monkeypatch.undo()
    while True:  # ends: the first try has its answer
        with suppress(StoreError):
            async with open_store.open_store(settings):
                return


async def test_a_file_of_the_librarys_that_times_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> NoReturn:
        raise OSError(errno.ETIMEDOUT, "Connection timed out", "/home/user/.aws/config")

    monkeypatch.setattr(open_store, "load_modules", load)
    error = await fails(
        ErrorKind.TIMED_OUT, open_store.open_store(StoreSettings(destination=f"file://{tmp_path}")).__aenter__()
    )
    assert "/home/user/.aws/config" in str(error)
