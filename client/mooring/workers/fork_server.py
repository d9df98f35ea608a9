"""The process that forks workers where the start method is forkserver, Python's default since 3.14, survives SIGTERM.

It is in the trainer's process group like any child, and without it the loader takes its workers for dead. Imported by
the fork server itself, which is told to by `keep_alive`; what it forks hears SIGTERM as ever. It goes when the trainer
does, by the end of a pipe.
"""

import multiprocessing.forkserver
import os
import signal
import sys
from typing import Any


def keep_alive() -> None:
    """Of the fork server that is started from now on; idempotent. One that runs already stays as it is."""
    # There is no public way to add to the list, only one to replace it, and what the user put there stays.
    server: Any = multiprocessing.forkserver._forkserver
    if __name__ not in server._preload_modules:
        server._preload_modules = [*server._preload_modules, __name__]


def _hear_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


if any(argument.startswith("from multiprocessing.forkserver ") for argument in sys.orig_argv):
    # Blocked and not ignored: what a child is sent before it hears is kept for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.register_at_fork(after_in_child=_hear_sigterm)
