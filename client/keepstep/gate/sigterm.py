"""SIGTERM as a source of termination notices.

A Python signal handler does not run while the main thread is inside C++, where a collective may keep it for seconds. So
the wake-up descriptor, which is written at the C level, tells the gate's thread too. Owns the process's SIGTERM handler
until `close`, else until the process ends.
"""

import atexit
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import weakref
from types import FrameType
from typing import Any, Final

from keepstep.operating_system import HAS_AGENTS

_log: Final = logging.getLogger("keepstep")


class Sigterm:
    """Handles SIGTERM, on Linux alone, and records that it was received. One other thread may `wait` for it."""

    def __init__(self) -> None:
        self.received = False
        self.held = False
        """Whether SIGTERM is ignored."""
        self._previous: Any = None
        self._installed = False
        self._wake_reader: socket.socket | None = None
        self._wake_writer: socket.socket | None = None
        if not HAS_AGENTS:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.warning("SIGTERM is not handled: the Checkpointer was not made in the main thread")
            return
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        # A DataLoader ends its forked workers with SIGTERM, and they must die of it.
        os.register_at_fork(after_in_child=functools.partial(_restore_in_child, weakref.ref(self)))

    def take_again(self) -> None:
        """Install this handler again, without chaining to the one that a framework installed over it."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle)

    def watch_from_thread(self) -> None:
        """Let one other thread `wait`."""
        if self._wake_writer is not None:
            return
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        if not self._installed or threading.current_thread() is not threading.main_thread():
            # The handler wakes the thread instead, once the main thread is back in Python.
            return
        previous = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            # An event loop depends on the descriptor that it has set.
            signal.set_wakeup_fd(previous)

    def wait(self, seconds: float) -> bool:
        """Sleep until SIGTERM or `wake`, at most `seconds`, in the other thread. Returns whether SIGTERM has come."""
        reader = self._wake_reader
        assert reader is not None, "watch_from_thread comes first"
        # Not select, which is limited to 1,024 descriptors: a trainer may have more files open. Windows has no poll.
        reader.settimeout(seconds)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            if signal.SIGTERM in reader.recv(256):
                self.received = True
        return self.received

    def wake(self) -> None:
        """End a `wait` in the other thread."""
        if self._wake_writer is not None:
            try:
                self._wake_writer.send(b"\0")
            except OSError:
                # The socket is full or closed, so the other thread does not sleep.
                return

    def hold(self) -> None:
        """Ignore SIGTERM until the process ends: when the first rank exits, torchrun signals the others."""
        if threading.current_thread() is threading.main_thread():
            self._sleep_no_more()
            self.held = True
            # A framework's handler would end this process in another way.
            self.take_again()

    def close(self) -> None:
        """Restore the previous SIGTERM handler, unless another one was installed over ours. Idempotent."""
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.held:
            return
        self.received = True
        self.wake()
        if callable(self._previous):
            try:
                self._previous(signal_number, frame)
            except SystemExit:
                # The previous handler would exit at once; Keepstep exits after the just-in-time save.
                return

    def _restore(self) -> None:
        self._sleep_no_more()
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        self._installed = False

    def _sleep_no_more(self) -> None:
        if self._wake_writer is None or self._wake_reader is None:
            return
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._wake_writer.fileno()):
            signal.set_wakeup_fd(current)
        self._wake_reader.close()
        self._wake_writer.close()
        self._wake_reader = self._wake_writer = None


def _restore_in_child(reference: "weakref.ref[Sigterm]") -> None:
    sigterm = reference()
    if sigterm is not None:
        # The wake-up descriptor too: signals of the child would write to it, and tell the parent of a SIGTERM.
        sigterm._restore()


@atexit.register
def _hold_to_the_end() -> None:
    # At its end the interpreter resets a handler that is a Python function, and torch's own clean-up takes long after
    # that. SIG_IGN stays, but programs that are started from then on inherit it. So this is registered early, to be
    # called late.
    sigterm = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(sigterm, Sigterm) and sigterm.held:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
