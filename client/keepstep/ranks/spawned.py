"""Ranks that torch.multiprocessing starts, and their parent: both stay until the just-in-time save is made.

Without this, the parent dies of a SIGTERM, and the kernel then interrupts the ranks (SIGINT), as torch has told it to.
A rank makes that signal a SIGTERM: its parent's end is a termination notice. Under autoload the parent waits for its
ranks, passes its SIGTERM on to them, and exits as they do.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import Any, Final

from keepstep.operating_system import HAS_AGENTS
from keepstep_api import names

# From linux/prctl.h.
_SET_PARENT_DEATH_SIGNAL: Final = 1
_GET_PARENT_DEATH_SIGNAL: Final = 2
# For a rank that does not save. Ranks that save are gone by then: hardly any pod has a longer grace period.
_INTERRUPTED_AFTER_SECONDS: Final = 600.0

_outlives_parent = False


def outlive_parent() -> None:
    """Take the end of the parent for a termination notice, in a rank that torch.multiprocessing has started.

    Call it in the main thread, once SIGTERM is handled: the kernel keeps the signal per thread. Idempotent.
    """
    global _outlives_parent
    parent = multiprocessing.parent_process()
    is_main_thread = threading.current_thread() is threading.main_thread()
    if _outlives_parent or parent is None or parent.pid is None or not is_main_thread or not HAS_AGENTS:
        return
    with contextlib.suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None).prctl
        told = ctypes.c_int()
        prctl(_GET_PARENT_DEATH_SIGNAL, ctypes.byref(told), *map(ctypes.c_ulong, (0, 0, 0)))
        if told.value != signal.SIGINT:
            return
        _outlives_parent = True
        prctl(_SET_PARENT_DEATH_SIGNAL, *map(ctypes.c_ulong, (signal.SIGTERM, 0, 0, 0)))
        descriptor = os.pidfd_open(parent.pid)
        threading.Thread(target=_interrupt_late, args=(descriptor,), name="keepstep-parent", daemon=True).start()


def _interrupt_late(parent_descriptor: int) -> None:
    """Do what torch wanted at the parent's end, for a rank that has not left by itself."""
    poll = select.poll()
    poll.register(parent_descriptor, select.POLLIN)
    poll.poll()
    time.sleep(_INTERRUPTED_AFTER_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


def autoload(module: ModuleType) -> None:
    """Let a program that joins its ranks outlive a SIGTERM until they have left, and exit as they do.

    `module` is torch.multiprocessing.spawn. A program that joins with a time-out does something else meanwhile: its
    SIGTERM stays as it is.
    """
    cls: Any = module.ProcessContext
    exited = module.ProcessExitedException
    join = cls.join

    @functools.wraps(join)
    def join_and_leave(context: Any, timeout: "float | None" = None, *arguments: Any, **named: Any) -> Any:
        sigterm = vars(context).setdefault("_keepstep_sigterm", _PassedOnSigterm(context.processes))
        if timeout is None:
            sigterm.begin()
        try:
            is_over = join(context, timeout, *arguments, **named)
        except exited as error:
            if error.exit_code in (names.JUST_IN_TIME_EXIT_CODE, names.NOT_DURABLE_EXIT_CODE):
                sigterm.forget()
                raise SystemExit(error.exit_code) from error
            sigterm.end()
            raise
        except BaseException:
            sigterm.end()
            raise
        if is_over:
            sigterm.end()
        return is_over

    cls.join = join_and_leave


class _PassedOnSigterm:
    """Passes this process's SIGTERM on to its ranks, and lets it take effect here when they have ended."""

    def __init__(self, ranks: Iterable[Any]) -> None:
        self._ranks = ranks
        self._came = False

    def begin(self) -> None:
        """Handle SIGTERM, unless the program does."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._pass_on)

    def forget(self) -> None:
        """Handle SIGTERM no longer."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._pass_on:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end(self) -> None:
        """Handle SIGTERM no longer, and die of the one that came, if any."""
        self.forget()
        if self._came:
            signal.raise_signal(signal.SIGTERM)

    def _pass_on(self, signal_number: int, frame: "FrameType | None") -> None:
        self._came = True
        for rank in self._ranks:
            rank.terminate()
