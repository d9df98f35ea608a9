"""Signals as a source of termination notices: SIGTERM, SIGHUP of a terminal that closes, SIGINT that ends a pod.

A Python signal handler does not run while the main thread is inside C++, where a collective may keep it for seconds. So
the wake-up descriptor, which is written at the C level, tells the gate's thread too. A training in another thread than
the main one cannot install such a handler: it takes faulthandler's, which is in C and writes to our socket. Owns the
process's handlers of these signals until `close`, else until the process ends.

What ends the program may have ended the reader of its output too: `… | tee log`. So that no print keeps it from its
save, the pipe gets a second reader, which never reads.
"""

import atexit
import contextlib
import faulthandler
import functools
import os
import select
import signal
import socket
import stat
import threading
import weakref
from types import FrameType
from typing import Any, Final

from keepstep.operating_system import HAS_AGENTS

_held_by_faulthandler: tuple[int, ...] = ()


def notice_signals() -> tuple[int, ...]:
    """Return the signals that may count as a termination notice here."""
    return (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if HAS_AGENTS else (signal.SIGTERM,)


_OUTPUTS: Final = (1, 2)
_PIPE_BYTES: Final = 1024 * 1024
"""What the kernel gives any user: what is printed until the save must fit."""


class Sigterm:
    """Handles SIGTERM, on Linux alone, and records that it was received. One other thread may `wait` for it.

    SIGHUP counts as SIGTERM if the process would die of it. So does SIGINT with `takes_interrupts`.
    """

    def __init__(self, *, takes_interrupts: bool = False) -> None:
        self.held = False
        """Whether the signals are ignored."""
        self._others: dict[int, Any] = {}
        """The handlers before of the signals that count as SIGTERM."""
        self._received = False
        self._previous: Any = None
        self._was_to_exit = False
        self._installed = False
        self._by_faulthandler = False
        self._is_waited_for = False
        self._wake_reader: socket.socket | None = None
        self._wake_writer: socket.socket | None = None
        if not HAS_AGENTS:
            return
        self._others = {
            number: handler
            for number, handler, is_taken in (
                (signal.SIGHUP, signal.SIG_DFL, True),
                (signal.SIGINT, signal.default_int_handler, takes_interrupts),
            )
            if is_taken and signal.getsignal(number) == handler
        }
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._handle)
            for number in self._others:
                signal.signal(number, self._handle)
        else:
            self._by_faulthandler = True
            # Without a handler of the program's, the one before would end the process.
            chain = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            self._register(self._open_socket(), chain=chain)
        self._installed = True
        # A DataLoader ends its forked workers with SIGTERM, and they must die of it.
        os.register_at_fork(after_in_child=functools.partial(_restore_in_child, weakref.ref(self)))

    @property
    def received(self) -> bool:
        """Whether SIGTERM has come."""
        if self._by_faulthandler and not self._received and not self._is_waited_for and self._wake_reader is not None:
            with contextlib.suppress(BlockingIOError):
                self._take_note(self._wake_reader.recv(256))
        return self._received

    @property
    def would_end_process(self) -> bool:
        """Whether SIGTERM would end this process if it was not handled here. Any thread may ask."""
        handler = signal.getsignal(signal.SIGTERM)
        if self._by_faulthandler:
            return handler is signal.SIG_DFL
        return handler == self._handle and (self._previous in (None, signal.SIG_DFL) or self._was_to_exit)

    def take_again(self) -> None:
        """Install this handler again, without chaining to the one that a framework installed over it."""
        if self._installed and not self._by_faulthandler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle)

    def watch_from_thread(self) -> None:
        """Let one other thread `wait`."""
        self._is_waited_for = True
        if self._wake_writer is not None:
            return
        writer = self._open_socket()
        if not self._installed or threading.current_thread() is not threading.main_thread():
            # The handler wakes the thread instead, once the main thread is back in Python.
            return
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
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
            self._take_note(reader.recv(256))
        return self._received

    def wake(self) -> None:
        """End a `wait` in the other thread."""
        if self._wake_writer is not None:
            try:
                self._wake_writer.send(b"\0")
            except OSError:
                # The socket is full or closed, so the other thread does not sleep.
                return

    def hold(self) -> None:
        """Ignore these signals until the process ends: when the first rank exits, torchrun signals the others."""
        global _held_by_faulthandler
        if self._by_faulthandler:
            if self._wake_writer is not None:
                self._register(self._wake_writer, chain=False)
            self.held, _held_by_faulthandler = True, (signal.SIGTERM, *self._others)
        elif threading.current_thread() is threading.main_thread():
            self._sleep_no_more()
            self.held = True
            # A framework's handler would end this process in another way.
            self.take_again()

    def close(self) -> None:
        """Restore the previous handlers, unless others were installed over ours. Idempotent."""
        if self._by_faulthandler or threading.current_thread() is threading.main_thread():
            self._restore()

    def _register(self, writer: socket.socket, *, chain: bool) -> None:
        # It writes where the thread is that takes the signal, which the kernel lets the main thread do. To read the
        # frames of threads that run would end the process.
        faulthandler.register(signal.SIGTERM, writer.fileno(), all_threads=False, chain=chain)
        for number in self._others:
            faulthandler.register(number, writer.fileno(), all_threads=False, chain=False)

    def _open_socket(self) -> socket.socket:
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        return self._wake_writer

    def _take_note(self, received: bytes) -> None:
        # Numbers of signals, or the text of faulthandler; zeros are of `wake`.
        # The program may have its own handler of another signal by now.
        others = [number for number in self._others if signal.getsignal(number) == self._handle]
        is_notice = any(number in received for number in (signal.SIGTERM, *others))
        if is_notice or (self._by_faulthandler and received.strip(b"\0")):
            self._receive()

    def _receive(self) -> None:
        if not self._received:
            self._received = True
            _outlive_readers()

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.held:
            return
        # Also if the wake-up descriptor was faster.
        self._receive()
        self.wake()
        if callable(self._previous) and signal_number == signal.SIGTERM:
            try:
                self._previous(signal_number, frame)
            except SystemExit:
                # The previous handler would exit at once; Keepstep exits after the just-in-time save.
                self._was_to_exit = True

    def _restore(self) -> None:
        if self._by_faulthandler and self._installed:
            # First, as it would write to whatever has the number of the socket by then.
            for number in (signal.SIGTERM, *self._others):
                faulthandler.unregister(number)
        self._sleep_no_more()
        if self._installed and not self._by_faulthandler:
            for number, previous in {signal.SIGTERM: self._previous, **self._others}.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._installed = False

    def _sleep_no_more(self) -> None:
        if self._wake_writer is None or self._wake_reader is None:
            return
        if not self._by_faulthandler:
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
    for number in notice_signals() if HAS_AGENTS else ():
        sigterm = getattr(signal.getsignal(number), "__self__", None)
        if number in _held_by_faulthandler:
            faulthandler.unregister(number)
        if number in _held_by_faulthandler or (isinstance(sigterm, Sigterm) and sigterm.held):
            signal.signal(number, signal.SIG_IGN)


def _outlive_readers() -> None:
    """Let this process print, whether or not somebody still reads: a pipe's reader or a terminal may be gone."""
    import fcntl  # which Windows lacks

    for descriptor in _OUTPUTS:
        # What cannot be asked stays as it is.
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                # Never closed: the end of the process does that.
                reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
                fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            elif _has_hung_up(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _has_hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))
