"""Finds a process of the program that has imported torch where autoload's hooks are not active, and says why.

Autoload notes each process that imports torch in a file on the volume, before torch's libraries are loaded. This module
reads that file and, in /proc, the program's processes. It identifies them by the address of their stack, which a fork
keeps and each `exec` draws anew: a DataLoader worker counts as its rank does, and a tool in which the hooks are active
says nothing about the program that it becomes. A process that cannot be read counts as protected.
"""

import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from keepstep_agent.adapters.output.program import children
from keepstep_agent.adapters.volume.shared_folders import make_own_folder
from keepstep_agent.adapters.volume.shared_volume import open_volume
from keepstep_api.names import AUTOLOAD_PROCESSES, ENV_AUTOLOAD, ENV_AUTOLOAD_PROCESSES, STATE_DIRECTORY

_PROCESSES: Final = Path("/proc")
_TORCH: Final = b"/libtorch_python."
"""In the path of the library that only a Python loads which imports torch."""
_LOOKS_BEFORE_A_WARNING: Final = 3
"""Another tool's sitecustomize may import torch before autoload begins."""
_LOOKS_AT_EACH: Final = 300
"""Ten minutes of a runner that looks every 2 seconds: programs import torch when they start."""
_MOST_PROCESSES: Final = 256
_MOST_NOTED_BYTES: Final = 1024 * 1024
_READABLE_AND_WRITABLE: Final = 0o666
_HIDING: Final = ("sitecustomize.py", "sitecustomize/__init__.py")
_OPTION: Final = re.compile("-(?=[^-])([^cmXW]*)([cmXW]?)(.*)", re.DOTALL)
"""A word of Python's command line: switches, then perhaps one that takes a value, then perhaps that value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprotectedProcess:
    """A process that has imported torch without autoload's hooks."""

    pid: int
    command: str
    """As far as the script or module: arguments may hold secrets."""
    problem: str
    hint: str


@dataclass(slots=True)
class _Examined:
    """What earlier looks have told of one process."""

    looks: int = 0
    looks_with_torch: int = 0
    is_settled: bool = False
    """Its hooks are active, or it wants none."""


class AutoloadCheck:
    """Looks at the processes of one program. Every method blocks for a few system calls per process."""

    def __init__(self, volume: Path, *, folder: str, command: Sequence[str]) -> None:
        """`folder` is autoload's entry on PYTHONPATH, `command` what the runner starts."""
        self.file = str(volume / STATE_DIRECTORY / AUTOLOAD_PROCESSES)
        self._volume = volume
        self._folder = folder
        self._command = command
        self._examined: dict[tuple[int, bytes], _Examined] = {}

    def begin(self) -> None:
        """Make the file, empty, before the program starts. Raises OSError, also where there is no /proc."""
        (_PROCESSES / "self" / "stat").stat()
        with open_volume(self._volume) as root, make_own_folder(root) as folder:
            # For a program of another user, if that user may write to the volume.
            mode = os.fstat(root.descriptor).st_mode & _READABLE_AND_WRITABLE
            descriptor = folder.open_file(AUTOLOAD_PROCESSES, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            # Some filesystems have one mode for all files.
            with suppress(OSError):
                os.fchmod(descriptor, mode)
            os.close(descriptor)

    def look(self, program_pid: int) -> UnprotectedProcess | None:
        """Return the first process found without hooks, once it has been so for some looks. Raises OSError.

        Raises it if the file of noted processes is gone or too large. Call this every few seconds, until it returns a
        process. It looks at a program and its children, not at processes that have left their parents.
        """
        before, self._examined = self._examined, {}
        noted: set[bytes] | None = None
        waiting = deque([program_pid])
        while waiting and len(self._examined) < _MOST_PROCESSES:
            pid = waiting.popleft()
            try:
                stack = _stack_address((_PROCESSES / str(pid) / "stat").read_bytes())
            except OSError:
                continue
            examined = self._examined[pid, stack] = before.get((pid, stack)) or _Examined()
            examined.looks += 1
            is_new = examined.looks <= _LOOKS_AT_EACH
            if is_new and not examined.is_settled:
                noted = self._noted() if noted is None else noted
                examined.is_settled = stack in noted
                if not examined.is_settled and _has_torch(pid):
                    examined.looks_with_torch += 1
                if examined.looks_with_torch == _LOOKS_BEFORE_A_WARNING:
                    if process := self._unprotected(pid):
                        return process
                    examined.is_settled = True
            # A launcher starts its ranks soon; a shell may start Python at any time.
            if is_new or not examined.is_settled:
                waiting.extend(children(pid))
        return None

    def _noted(self) -> set[bytes]:
        """Return the stack addresses of the processes in which autoload is active."""
        with open_volume(self._volume) as root, root.folder(STATE_DIRECTORY) as folder:
            content = folder.read(AUTOLOAD_PROCESSES, _MOST_NOTED_BYTES)
        return set(map(_stack_address, content.splitlines()))

    def _unprotected(self, pid: int) -> UnprotectedProcess | None:
        """Say what is wrong with a process; None if it wants no autoload, or is another run's, or cannot be read."""
        try:
            environment = dict(variable.partition("=")[::2] for variable in _strings(pid, "environ"))
            arguments = _strings(pid, "cmdline")
        except OSError:
            return None
        if environment.get(ENV_AUTOLOAD) == "0" or environment.get(ENV_AUTOLOAD_PROCESSES, self.file) != self.file:
            return None
        switches, words = _interpreter_part(arguments)
        problem, hint = self._what_hides(pid, environment.get("PYTHONPATH", ""), switches)
        if not hint and (start := self._start_in_command(arguments)):
            tool = Path(self._command[0]).name + (" …" if start > 1 else "")
            program = Path(self._command[start]).name
            hint = f"write {tool} before keepstep, as in: {tool} keepstep run --autoload --to DEST -- {program} …"
        hint = hint or f"put {self._folder} first there"
        hint += "; or call keepstep.protect in the program and leave --autoload out"
        return UnprotectedProcess(pid=pid, command=" ".join(words), problem=problem, hint=hint)

    def _what_hides(self, pid: int, python_path: str, switches: str) -> tuple[str, str]:
        """Return the problem, and a hint unless another folder comes first."""
        for switch in switches:
            if switch in "IES":
                ignored = "sitecustomize" if switch == "S" else "PYTHONPATH"
                return f"python -{switch} ignores {ignored}", f"start Python without -{switch}"
        entries = python_path.split(os.pathsep)
        if self._folder not in entries:
            return (
                f"its PYTHONPATH lacks {self._folder}" if python_path else "its environment has no PYTHONPATH",
                f"put {self._folder} first on its PYTHONPATH, and pass on all variables that begin with KEEPSTEP_",
            )
        for entry in entries[: entries.index(self._folder)]:
            folder = _PROCESSES / str(pid) / "cwd" / entry
            if any((folder / name).is_file() for name in _HIDING):
                return f"the sitecustomize of {entry or 'the working directory'} comes first on its PYTHONPATH", ""
        return (
            "Keepstep's sitecustomize comes first on its PYTHONPATH, but has not noted this process",
            "see whether the process wrote a line that begins with keepstep:",
        )

    def _start_in_command(self, arguments: Sequence[str]) -> int:
        """Return where, behind a tool, the run's command names the process with these arguments; 0 if it does not."""
        command, process = ([Path(word).name for word in words] for words in (self._command, arguments))
        if command[1:] == process[1:] and command != process:
            # The program is a script, before which the kernel has put its interpreter.
            return 1
        return next((start for start in range(1, len(command)) if command[start:] == process), 0)


def _interpreter_part(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the switches of a Python command line, and its words as far as the script, the module or -c."""
    switches, words = "", list(arguments[:1])
    rest = iter(arguments[1:])
    for word in rest:
        words.append(word)
        option = _OPTION.fullmatch(word)
        if not option:
            break
        letters, takes_value, value = option.groups()
        switches += letters
        if takes_value == "c":
            words[-1] = word.removesuffix(value)
            break
        if takes_value and not value:
            words += islice(rest, 1)
        if takes_value == "m":
            break
    return switches, words


def _stack_address(stat: bytes) -> bytes:
    """Return the address in a line of /proc/PID/stat, or nothing if it has none."""
    # After the name, which may hold anything; the address is the 28th field of all.
    fields = stat.rpartition(b")")[2].split()
    return fields[25] if len(fields) > 25 else b""


def _has_torch(pid: int) -> bool:
    try:
        return _TORCH in (_PROCESSES / str(pid) / "maps").read_bytes()
    except OSError:
        return False


def _strings(pid: int, name: str) -> list[str]:
    return os.fsdecode((_PROCESSES / str(pid) / name).read_bytes()).split("\0")[:-1]
