"""One save that a framework writes at once, on every rank: written, then announced, or given up by all."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from mooring.framework_run import FrameworkRun

_Result = TypeVar("_Result")


def guarded_save(run: FrameworkRun, path: Path, step: int, write: Callable[[], _Result]) -> _Result:
    """What `write` returned, which writes this rank's part of `path`. Raises what it raises: the others know then."""
    with run.claimed(path):
        try:
            result = write()
        except BaseException as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            run.announce_when(failed, path, step)
            raise
        run.announce(path, step)
        return result
