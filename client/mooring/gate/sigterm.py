"""SIGTERM as a source of a termination notice.

A Python signal handler does not run while the main thread is inside C++ (a collective may keep it there for seconds),
so the C level's wake-up descriptor tells the gate's thread too. Owns the process's SIGTERM handler until `close`, or to
the end of the process.
"""

import atexit
import functools
import logging
import os
import select
import signal
import socket
import threading
import weakref
from types import FrameType
from typing import Any, Final

_log: Final = logging.getLogger("mooring")


class Sigterm:
    """Whether this process got SIGTERM. `wait` is for one other thread, that wants to know at once."""

    def __init__(self) -> None:
        self.received = False
        self.held = False
        """Nobody wants to hear of it any more."""
        self._previous: Any = None
        self._installed = False
        self._wake_reader: socket.socket | None = None
        self._wake_writer: socket.socket | None = None
        if threading.current_thread() is not threading.main_thread():
            _log.warning("SIGTERM is not watched: only the main thread can, and the Checkpointer was made in another")
            return
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        # A forked DataLoader worker must die of the SIGTERM with which its loader ends it.
        os.register_at_fork(after_in_child=functools.partial(_restore_in_child, weakref.ref(self)))

    def take_again(self) -> None:
        """Be the handler again, without calling the one that a framework has put in our place since."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle)

    def watch_from_thread(self) -> None:
        """From now on another thread may `wait`."""
        if self._wake_writer is not None:
            return
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        if not self._installed or threading.current_thread() is not threading.main_thread():
            # The handler wakes the thread, as soon as the main thread is back in Python.
            return
        previous = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            # An event loop lives by it.
            signal.set_wakeup_fd(previous)

    def wait(self, seconds: float) -> bool:
        """Sleep until SIGTERM or `wake` or for `seconds`; whether SIGTERM was received by now. In the other thread."""
        reader = self._wake_reader
        assert reader is not None, "watch_from_thread comes first"
        # Not select: a trainer may have more than its 1,024 files open.
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        if poll.poll(seconds * 1000) and signal.SIGTERM in reader.recv(256):
            self.received = True
        return self.received

    def wake(self) -> None:
        """End a `wait` in the other thread."""
        if self._wake_writer is not None:
            try:
                self._wake_writer.send(b"\0")
            except OSError:
                # Full or closed: it does not sleep then.
                return

    def hold(self) -> None:
        """Let SIGTERM do nothing, until the process is gone: the first rank's exit makes torchrun signal the others."""
        if threading.current_thread() is threading.main_thread():
            self._sleep_no_more()
            self.held = True
            # A framework's handler, too, would end this process in another way.
            self.take_again()

    def close(self) -> None:
        """Give SIGTERM back; idempotent. Somebody who took it after us keeps it."""
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
                # It would have left at once; we leave too, after the just-in-time save.
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
        # Also the descriptor: a byte that the child's signals write there would tell the parent of a SIGTERM.
        sigterm._restore()


@atexit.register
def _hold_to_the_end() -> None:
    # The interpreter's end resets a handler that is a Python function, and torch's own end takes long after that. What
    # is ignored stays so, also in a program that is started now: so this is registered early, to be called late.
    sigterm = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(sigterm, Sigterm) and sigterm.held:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
