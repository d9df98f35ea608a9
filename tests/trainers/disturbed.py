"""Runs a trainer's own file as __main__; at SIGUSR1 an exception comes up wherever its main thread is.

disturbed.py examples/x.py <its arguments>
"""

import runpy
import signal
import sys
from pathlib import Path


class Disturbance(Exception):  # noqa: N818 - it is not an error
    """What no library has a handler for."""


def disturb(*_: object) -> None:
    raise Disturbance


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, disturb)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
