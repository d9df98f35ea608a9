"""Makes this process look like one on macOS or Windows, to what is imported from then on.

What those systems lack is taken away: modules, and members of modules. `os.name` and the path separators stay, because
without them Python's own library would not work here.
"""

import errno
import importlib
import os
import select
import shutil
import signal
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_LINUX_ALONE: Final[Mapping[ModuleType, tuple[str, ...]]] = {
    os: ("pidfd_open", "posix_fallocate", "posix_fadvise", "sendfile", "memfd_create", "eventfd", "O_TMPFILE"),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "SIGRTMIN", "SIGRTMAX"),
}
_POSIX_ALONE: Final[Mapping[ModuleType, tuple[str, ...]]] = {
    os: (
        *("O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "register_at_fork", "fork", "forkpty", "killpg"),
        *("getpgid", "setpgid", "getpgrp", "setsid", "getuid", "geteuid", "pread", "pwrite", "fchmod", "statvfs"),
        *("sched_getaffinity", "fdatasync", "sync", "mkfifo", "waitid", "WNOHANG"),
    ),
    select: ("poll",),
    signal: (
        *("pthread_sigmask", "pthread_kill", "sigwait", "siginterrupt", "setitimer", "alarm", "SIGKILL", "SIGUSR1"),
        *("SIGUSR2", "SIGCHLD", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGALRM", "SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK"),
    ),
}
_POSIX_MODULES: Final = ("fcntl", "resource", "pwd", "grp", "termios", "syslog", "_posixshmem", "_posixsubprocess")


def become(system: str) -> None:
    """Become `darwin` or `win32`. Call it once, before anything that is to see it is imported."""
    if system == "win32":
        # They have parts for Windows, which a Python for Linux lacks.
        importlib.import_module("multiprocessing.resource_tracker")
        shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.platform = system
    _remove(_LINUX_ALONE)
    if system == "win32":
        _sync_as_windows_does()
        _remove(_POSIX_ALONE)
        for name in _POSIX_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]


def _remove(members: Mapping[ModuleType, tuple[str, ...]]) -> None:
    for module, names in members.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


def _sync_as_windows_does() -> None:
    """No directory can be opened, and only what is open for writing can be synced."""
    import fcntl

    opened, sync, get_flags = os.open, os.fsync, fcntl.fcntl
    read_flags = fcntl.F_GETFL

    def open_file(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if Path(path).is_dir() and "dir_fd" not in named:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, *arguments, **named)

    def sync_file(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        assert not stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if get_flags(descriptor, read_flags) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        sync(descriptor)

    os.open = open_file
    os.fsync = sync_file  # type: ignore[assignment]
