"""Runs a trainer's own file as __main__; at SIGUSR1 an exception comes up wherever its main thread is.

Files of all sizes go past the page cache, as large ones do: those of the examples are small.

disturbed.py examples/x.py <its arguments>
"""

import runpy
import signal
import sys
from pathlib import Path

from mooring.asynchronous_saves import direct_file


class Disturbance(Exception):  # noqa: N818 - it is not an error
    """What no library has a handler for."""


def disturb(*_: object) -> None:
    raise Disturbance


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, disturb)
    direct_file.LARGE_BYTES = 0  # type: ignore[misc]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
