"""Writes what the training saves behind it: the training waits for a copy, and a thread writes the files.

Owns the thread, the order of its work, and the rule that no new copy is made before the last save is done. During a
save, `save_functions` hands in what the program gives to `torch.save` and the like. The file appears at once, empty:
the program finds it, and may rename it. TorchLoop hands in its whole state. Where memory does not suffice for a copy,
the training waits while the files are written, as it would without Keepstep.
"""

import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from keepstep.asynchronous_saves import state_size
from keepstep.asynchronous_saves.empty_file import make_empty
from keepstep.asynchronous_saves.host_memory import HostMemory

if TYPE_CHECKING:
    from keepstep.asynchronous_saves.host_copy import HostCopy

_log: Final = logging.getLogger("keepstep")
_PATIENCE_SECONDS: Final = 3600.0
"""How long training waits for one save. If that is not enough, later ones are not asynchronous."""
_NOTABLE_SECONDS: Final = 1.0
_SECOND_BYTES: Final = 64 * 1024 * 1024
"""How much memory may be made for what a second save of one state does not share with the first."""
_NICE: Final = 10
"""CPU niceness of the thread: it has time until the next save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """The save that is being written: `left_bytes` of its `size_bytes` are not on disk yet.

    `bytes_per_second`: how fast this process has written so far; 0 if it has not.
    """

    left_bytes: int
    size_bytes: int
    bytes_per_second: float


class BackgroundSave:
    """One save into `directory`: what is handed in is written behind the training."""

    def __init__(self, writer: "BackgroundWriter", directory: Path) -> None:
        self._writer = writer
        self._directory = directory
        self._begun = threading.Event()
        self.failure: BaseException | None = None
        """What the first file that could not be written raised, or why the save was given up."""
        self.has_files = False
        """Whether anything was handed in."""
        self.size_bytes = 0
        """Of all that was handed in."""
        self.written_bytes = 0
        """How much of that is written, or will not be."""
        self.writing_seconds = 0.0
        self._noted_at = 0.0

    def take(
        self,
        path: str | os.PathLike[str],
        copy: Callable[[HostMemory], "HostCopy | None"],
        write: Callable[[Any, str], object],
    ) -> bool:
        """Copy a value now and write it later. Returns False where the caller must write it by itself.

        Args:
            path: The file.
            copy: Returns the copy, in that memory; None if it does not suffice.
            write: Gets the copy and a path, in the thread. It may call `wrote` as it goes.
        """
        file = Path(path).absolute()
        if not file.is_relative_to(self._directory) or not file.parent.is_dir():
            return False
        try:
            copied = self._writer.copy(copy)
            empty = None if copied is None else make_empty(file)
        except Exception as error:
            # The program's own call then meets what is wrong, and says it as it always does.
            self._writer.say_once(f"a file is written while training waits: path={file} error={error!r}")
            return False
        if empty is None:
            return False
        self._count(copied)

        def write_file() -> None:
            target = None if self.failure is not None else empty.find(self._directory)
            if target is not None:
                write(copied, str(target))

        self.write_later(copied.size_bytes, write_file)
        return True

    def copy(self, copy: Callable[[HostMemory], "HostCopy | None"]) -> "HostCopy | None":
        """Return what `copy` makes of a value, to be given to `write_later`; None where the caller must write it."""
        copied: HostCopy | None = self._writer.copy(copy)
        if copied is not None:
            self._count(copied)
        return copied

    def _count(self, copied: "HostCopy") -> None:
        self.has_files = True
        self.size_bytes += copied.size_bytes

    def memory(self, size_bytes: int) -> Any:
        """Return a `torch.UntypedStorage` for what is handed in later; None where there is too little memory."""
        # What is taken here must not be taken back to make room for another file of this save.
        self.has_files = True
        taken = self._writer.copy(lambda memory: memory.take([size_bytes]))
        return None if taken is None else taken[0]

    def wrote(self, count_bytes: int) -> None:
        """Note that so much of a file is written. Raises InterruptedError when the save is given up."""
        self._note_time()
        self.written_bytes += count_bytes
        if self.failure is not None:
            raise InterruptedError(str(self.failure))

    def begin_writing(self) -> None:
        """Let the thread begin. Until then it would take time from the copies that are still to be made."""
        self._begun.set()

    def then(self, work: Callable[[BaseException | None], object]) -> None:
        """Call `work` in the thread when all files are written, with what failed or None."""

        def run() -> None:
            try:
                work(self.failure)
            except Exception:
                # Nothing else would report it.
                _log.exception("a checkpoint is lost, training goes on: path=%s", self._directory)

        self._writer.submit(run)

    def wait(self) -> None:
        """Wait until everything is done, also what `then` was asked for."""
        self.begin_writing()
        self._writer.wait()

    def cancel(self, why: str = "the save was given up") -> None:
        """Write nothing of what is still to be written."""
        self.begin_writing()
        self.failure = self.failure or InterruptedError(why)

    def _note_time(self) -> None:
        now = time.monotonic()
        self.writing_seconds += now - self._noted_at
        self._noted_at = now

    def write_later(self, size_bytes: int, write: Callable[[], object]) -> None:
        """Call `write` in the thread, after `begin_writing`, also if the save has failed until then.

        What it raises fails the save. `size_bytes`: what it writes. It may call `wrote` as it goes.
        """

        def run() -> None:
            self._begun.wait(_PATIENCE_SECONDS)
            self._noted_at = time.monotonic()
            written_bytes = self.written_bytes + size_bytes
            try:
                write()
            except BaseException as error:
                # What the error's frames refer to may keep a deleted file open, and its room taken.
                _forget_frames(error)
                self.failure = self.failure or error
            finally:
                self._note_time()
                self.written_bytes = written_bytes

        self._writer.submit(run)


class BackgroundWriter:
    """The saves of one process, one after the other. Used by one thread."""

    def __init__(self) -> None:
        self.is_on = True
        """Whether saves are written in the background."""
        self._ranks = 1
        """How many ranks of this machine copy as much at the same time."""
        self._memory = HostMemory()
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None
        self._overdue: Future[Any] | None = None
        """What has been waited for in vain: nobody waits so long for it again."""
        self._saves: list[BackgroundSave] = []
        """Those whose copies are in the memory."""
        self._written = (0, 0.0)
        """Bytes that the saves before these wrote, and in how many seconds."""
        self._said = False

    def begin(self, directory: Path, *, same_state: bool = False) -> BackgroundSave:
        """Begin a save, after the last one is done; with `same_state`, which that one had too, behind it."""
        if not same_state or not self.is_on:
            self._end_saves()
        self._saves.append(BackgroundSave(self, directory))
        return self._saves[-1]

    def in_flight(self) -> InFlight | None:
        """Return how far the saves are whose copies are in the memory; None when their files are written."""
        left_bytes = sum(save.size_bytes - save.written_bytes for save in self._saves)
        if left_bytes <= 0:
            return None
        written_bytes, seconds = self._all_written()
        return InFlight(
            left_bytes=left_bytes,
            size_bytes=self._saves[-1].size_bytes,
            bytes_per_second=written_bytes / seconds if seconds else 0.0,
        )

    def give_up(self, why: str) -> None:
        """Write nothing more of what is in flight. What waits for it hears that it failed."""
        for save in self._saves:
            save.cancel(why)

    def _end_saves(self) -> None:
        self.wait()
        self._memory.reset()
        self._written = self._all_written()
        self._saves.clear()

    def _all_written(self) -> tuple[int, float]:
        written_bytes, seconds = self._written
        return (
            written_bytes + sum(save.written_bytes for save in self._saves),
            seconds + sum(save.writing_seconds for save in self._saves),
        )

    def expect(self, model: Any = None) -> None:
        """Have the memory for a copy before the first save needs it: it is made after two steps.

        `model` as for `state_size.when_known`.
        """
        if self.is_on:
            state_size.when_known(self.reserve, model)

    def reserve(self, size_bytes: int, *, ranks: int = 1) -> None:
        """Have the memory for a copy of that size, if nothing was copied yet. `ranks` of this machine copy as much."""
        self._ranks = self._memory.ranks = max(ranks, self._ranks)
        # Now: training waits for it once, a fraction of what a thread would take from the steps meanwhile.
        if self.is_on and self._last is None:
            self._memory.reserve(size_bytes)

    def wait(self) -> bool:
        """Wait until all that was handed in is done. Returns False if that takes more than an hour."""
        if self._last is None:
            return True
        if self._last is self._overdue:
            return self._last.done()
        began_at = time.monotonic()
        done = wait([self._last], _PATIENCE_SECONDS).done
        seconds = time.monotonic() - began_at
        if not done:
            self._overdue = self._last
            self._give_up(f"the last save is still being written after {seconds:.0f} s")
        elif seconds > _NOTABLE_SECONDS:
            _log.info("training waited for the last save: seconds=%.1f hint=save less often", seconds)
        return bool(done)

    def finish(self) -> None:
        """Write all that was handed in, of a save that is still open too, and wait for it."""
        for save in self._saves:
            save.begin_writing()
        self.wait()

    def close(self) -> None:
        """Wait, and end the thread and free the memory until the next save."""
        if not self.wait():
            return
        self._end_saves()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = self._last = None
        self._memory = HostMemory(self._ranks)

    def copy(self, copy: Callable[[HostMemory], Any]) -> Any:
        """Return what `copy` makes of our memory; None if saves are not written in the background."""
        current = self._saves[-1]
        is_second = len(self._saves) > 1 and not current.has_files
        self._memory.most_growth_bytes = _SECOND_BYTES if is_second else None
        copied = copy(self._memory) if self.is_on else None
        if copied is None and self.is_on and is_second:
            # Of a state that has changed there is no second copy beside the first.
            self._memory.most_growth_bytes = None
            self._end_saves()
            self._saves.append(current)
            copied = copy(self._memory)
        if copied is None and self.is_on:
            self._give_up("the memory does not suffice for a copy of the state")
        return copied

    def submit(self, work: Callable[[], object]) -> "Future[Any]":
        """Do `work` in the thread, after everything before it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "keepstep-save", _begin_thread)
            _finish_before_exec(self)
        try:
            self._last = self._thread.submit(work)
        except RuntimeError:
            # The main thread has ended, and no work begins in threads any more: this one does it now.
            for save in self._saves:
                save.begin_writing()
            self._last = Future()
            self._last.set_result(work())
        return self._last

    def say_once(self, what: str) -> None:
        """Warn, unless this has warned before."""
        if not self._said:
            self._said = True
            _log.warning("%s", what)

    def _give_up(self, why: str) -> None:
        self.is_on = False
        self._memory = HostMemory(self._ranks)
        _log.warning("training waits for each checkpoint from now on: reason=%s", why)


def _forget_frames(error: BaseException | None) -> None:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


_writers: Final["dict[int, weakref.WeakSet[BackgroundWriter]]"] = {}
"""Id of a process -> its writers that have a thread. A forked child has the objects, and not the threads."""


def _finish_before_exec(writer: BackgroundWriter) -> None:
    """Have `os.exec…` wait for what `writer` writes: it ends all threads."""
    if not _writers:
        # The other functions of this kind call one of these.
        os.execv, os.execve = _finishing(os.execv), _finishing(os.execve)
    _writers.setdefault(os.getpid(), weakref.WeakSet()).add(writer)


def _finishing(replace_process: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(replace_process)
    def finish_and_replace(*arguments: Any, **keywords: Any) -> NoReturn:
        for writer in list(_writers.get(os.getpid(), ())):
            writer.finish()
        replace_process(*arguments, **keywords)

    return finish_and_replace


def _begin_thread() -> None:
    if sys.platform == "linux":
        # Of this thread alone, and of those that libraries make in it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
