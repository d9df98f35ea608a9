"""Runs a trainer's own file as __main__; at SIGUSR1 an exception comes up wherever its main thread is.

Files of all sizes go past the page cache, as large ones do: those of the examples are small. DISTURB_AT names a moment
of its second save at which it ends itself, and DISTURB_BY says how. With LOOKS it looks at its saves.

disturbed.py examples/x.py <its arguments>
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from tests.trainers import looks, save_moments

from keepstep.asynchronous_saves import direct_file


class Disturbance(BaseException):
    """What no library has a handler for: a copy that fails with an `Exception` is made up for by a synchronous save."""


def disturb(*_: object) -> None:
    raise Disturbance


def disturb_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Where Python ignores an exception, such as in a finalizer."""
    if isinstance(ignored.exc_value, Disturbance):
        # Not here, where it would be ignored too.
        signal.setitimer(signal.ITIMER_REAL, 0.01)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, disturb)
    signal.signal(signal.SIGALRM, disturb)
    sys.unraisablehook = disturb_again
    direct_file.LARGE_BYTES = 0  # type: ignore[misc]
    if "DISTURB_AT" in os.environ:
        save_moments.at(save_moments.Moment(os.environ["DISTURB_AT"]), save_moments.Way(os.environ["DISTURB_BY"]))
    if "LOOKS" in os.environ:
        looks.install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
