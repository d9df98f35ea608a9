"""Worker processes outlive the SIGTERM that torchrun sends to a rank's whole process group.

The just-in-time save needs them: the batch that the DataLoader's workers are making, and the process that writes an
asynchronous torch.distributed.checkpoint. So each of them makes a process group of its own. What a signal to the group
did before still holds: a worker dies with its parent, at once, and obeys the SIGTERM of its loader.

Owns what is put before the entry functions of torch and torchdata. Never imports torch itself in a trainer. Not
covered: a spawned DataLoader worker while it is still importing.
"""

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Any, Final

from mooring.autoload.post_import import after_import
from mooring.workers import fork_server

_LOADER: Final = "torch.utils.data._utils.worker"
_STATEFUL_LOADER: Final = "torchdata.stateful_dataloader.stateful_dataloader"
_WRITER: Final = "torch.distributed.checkpoint._async_process_executor"
_entries: Final[dict[str, Callable[..., Any]]] = {}
"""Module name -> torch's own entry function, where ours took its place; a forked worker inherits it."""
_installed = False


def install() -> None:
    """From now on, and for what torch imports later. Does nothing to workers that run already; idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    after_import(_LOADER, "DataLoader workers are", autoload)
    after_import(_STATEFUL_LOADER, "StatefulDataLoader workers are", autoload)
    after_import(_WRITER, "the checkpoint writer process is", autoload)


def autoload(module: ModuleType) -> None:
    """Put ours before the entry of that module, one of those above."""
    if module.__name__ in _entries:
        return
    _entries[module.__name__] = _entry(module)
    if module.__name__ in (_LOADER, _STATEFUL_LOADER):
        entry = loader_worker if module.__name__ == _LOADER else stateful_loader_worker
        module._worker_loop = entry  # type: ignore[attr-defined]
        fork_server.keep_alive()
    else:
        process = module._AsyncCheckpointProcess
        process._checkpointing_subprocess = staticmethod(checkpoint_writer)
        process.__init__ = _deaf(process.__init__)


def loader_worker(*arguments: Any) -> object:
    """A DataLoader worker's life. Found by this name in a spawned worker."""
    return _live(_LOADER, arguments)


def stateful_loader_worker(*arguments: Any) -> object:
    """The same for torchdata's, which has a loop of its own."""
    return _live(_STATEFUL_LOADER, arguments)


def checkpoint_writer(*arguments: Any) -> object:
    """The life of DCP's writer process. Found by this name in that process, which is always spawned."""
    return _live(_WRITER, arguments)


def _live(name: str, arguments: tuple[Any, ...]) -> object:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    _hear_again()
    _die_with_parent()
    entry = _entries.get(name)
    return (entry or _entry(import_module(name)))(*arguments)


def _entry(module: ModuleType) -> Callable[..., Any]:
    if module.__name__ in (_LOADER, _STATEFUL_LOADER):
        return module._worker_loop  # type: ignore[no-any-return]
    return module._AsyncCheckpointProcess._checkpointing_subprocess  # type: ignore[no-any-return]


def _deaf(start: Callable[..., None]) -> Callable[..., None]:
    """`start` with SIGTERM blocked in this thread, which the process that it starts inherits.

    The writer imports for seconds before it can leave the group. Other threads take what is sent to this process.
    """

    @functools.wraps(start)
    def deaf(*arguments: Any, **named: Any) -> None:
        # When multiprocessing starts its resource tracker it unblocks SIGTERM, whatever it was before.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            start(*arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return deaf


def _hear_again() -> None:
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        # What came meanwhile was for the group; to ignore it forgets it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_with_parent() -> None:
    """SIGKILL to the parent ended its group; now it must reach those who left the group.

    PR_SET_PDEATHSIG would be wrong: it follows the thread that made this process, and DCP's writer is made by a thread
    that ends after the first save. Without pidfd_open there is what torch does: the DataLoader's workers look every
    5 seconds, DCP's writer reads the end of its pipe.
    """
    parent = multiprocessing.parent_process()
    parent_pid = os.getppid() if parent is None or parent.pid is None else parent.pid
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        sys.exit(1)
    except (AttributeError, OSError):
        return
    threading.Thread(target=_wait_and_die, args=(descriptor,), name="mooring-parent", daemon=True).start()


def _wait_and_die(parent_descriptor: int) -> None:
    poll = select.poll()
    poll.register(parent_descriptor, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
