"""Lets worker processes outlive the SIGTERM that torchrun sends to a rank's whole process group.

The just-in-time save needs the batch that the DataLoader's workers are making, and the process that writes an
asynchronous torch.distributed.checkpoint. So each worker makes a process group of its own. It still dies at once with
its parent, and it still obeys its loader's SIGTERM.

Owns the wrappers around the entry functions of torch and torchdata. Never imports torch itself in a trainer. Does not
cover a spawned DataLoader worker while it is still importing.
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

from keepstep.autoload.post_import import after_import, reason, warn
from keepstep.operating_system import HAS_AGENTS
from keepstep.private_members import require

_LOADER: Final = "torch.utils.data._utils.worker"
_STATEFUL_LOADER: Final = "torchdata.stateful_dataloader.stateful_dataloader"
_WRITER: Final = "torch.distributed.checkpoint._async_process_executor"
_entries: Final[dict[str, Callable[..., Any]]] = {}
"""Module name -> the original entry function, where ours has replaced it; a forked worker inherits it."""
_installed = False


def install() -> None:
    """Wrap the entry functions, also those of modules that are imported later.

    Does nothing to workers that run already. Idempotent.
    """
    global _installed
    if _installed:
        return
    _installed = True
    after_import(_LOADER, "DataLoader workers are", autoload)
    after_import(_STATEFUL_LOADER, "StatefulDataLoader workers are", autoload)
    after_import(_WRITER, "the checkpoint writer process is", autoload)


def autoload(module: ModuleType) -> None:
    """Wrap the entry function of `module`, which is one of those above, where there is anything to outlive."""
    if module.__name__ in _entries or not HAS_AGENTS:
        return
    require(module.__name__, module)
    _entries[module.__name__] = _entry(module)
    if module.__name__ in (_LOADER, _STATEFUL_LOADER):
        entry = loader_worker if module.__name__ == _LOADER else stateful_loader_worker
        module._worker_loop = entry  # type: ignore[attr-defined]
        # Not every operating system has a fork server.
        from keepstep.workers import fork_server

        try:
            fork_server.keep_alive()
        except AttributeError as error:
            warn(f"workers of the start method forkserver are not protected: {reason(error)}")
    else:
        process = module._AsyncCheckpointProcess
        process._checkpointing_subprocess = staticmethod(checkpoint_writer)
        process.__init__ = _deaf(process.__init__)


def loader_worker(*arguments: Any) -> object:
    """Run a DataLoader worker. A spawned worker finds this function by its name."""
    return _live(_LOADER, arguments)


def stateful_loader_worker(*arguments: Any) -> object:
    """Run a worker of torchdata's StatefulDataLoader, which has a loop of its own."""
    return _live(_STATEFUL_LOADER, arguments)


def checkpoint_writer(*arguments: Any) -> object:
    """Run DCP's writer process, which is always spawned and finds this function by its name."""
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
    """Wrap `start` to block SIGTERM in this thread meanwhile; the process that it starts inherits that.

    The writer imports for seconds before it can leave the group. In this process, other threads still take SIGTERM.
    """

    @functools.wraps(start)
    def deaf(*arguments: Any, **named: Any) -> None:
        # When multiprocessing starts its resource tracker, it unblocks SIGTERM: that must happen before.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            start(*arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return deaf


def _hear_again() -> None:
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        # A SIGTERM that came meanwhile was for the group. Ignoring the signal discards it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_with_parent() -> None:
    """Die when the parent dies, because a SIGKILL to the parent's group does not reach a worker that left the group.

    PR_SET_PDEATHSIG would be wrong: it follows the thread that made this process, and DCP's writer is made by a thread
    that ends after the first save. Without pidfd_open, torch's own checks remain: the DataLoader's workers look for
    their parent every 5 seconds, and DCP's writer reads the end of its pipe.
    """
    parent = multiprocessing.parent_process()
    parent_pid = os.getppid() if parent is None or parent.pid is None else parent.pid
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        sys.exit(1)
    except (AttributeError, OSError):
        return
    threading.Thread(target=_wait_and_die, args=(descriptor,), name="keepstep-parent", daemon=True).start()


def _wait_and_die(parent_descriptor: int) -> None:
    poll = select.poll()
    poll.register(parent_descriptor, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
