"""Lets multiprocessing's fork server survive SIGTERM.

The fork server forks workers where the start method is forkserver, Python's default since 3.14. It is in the trainer's
process group like any child, and without it the loader takes its workers for dead. `keep_alive` tells the fork server
to import this module. What it forks receives SIGTERM as usual. It ends with the trainer, by the end of a pipe.
"""

import multiprocessing.forkserver
import os
import signal
import sys
from typing import Any

from keepstep.private_members import require


def keep_alive() -> None:
    """Let fork servers that are started later survive SIGTERM. One that runs already stays as it is. Idempotent."""
    # The public function replaces the list, and what the user put there must stay.
    require("multiprocessing.forkserver", multiprocessing.forkserver)
    server: Any = multiprocessing.forkserver._forkserver
    if __name__ not in server._preload_modules:
        server._preload_modules = [*server._preload_modules, __name__]


def _hear_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


if any(argument.startswith("from multiprocessing.forkserver ") for argument in sys.orig_argv):
    # Blocked, not ignored: a SIGTERM that a child is sent before it unblocks the signal stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.register_at_fork(after_in_child=_hear_sigterm)
