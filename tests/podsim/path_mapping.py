"""Containers without namespaces, for ordinary users: the manifest's paths are rewritten to where volumes really lie.

What is rewritten is what the manifest says in words and variables, where a mount path stands by itself or leads a
longer one. Not shown: users, read-only roots, process numbers, who may see which volume. A program that knows a path by
itself does not find it.
"""

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.podsim.process import ContainerProcess, Execution
from tests.podsim.view import Start
from tests.podsim.volumes import Mount

_MARK = "PODSIM_CONTAINER"
_WITH_US = ("setpriv", "--pdeathsig=KILL")


class MappedView:
    """The view of one pod. Its containers' processes are known by a variable that they inherit."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def start(self, start: Start) -> ContainerProcess:
        start.root.mkdir(parents=True, exist_ok=True)
        mark = self._marks[start.name] = secrets.token_hex(8)
        with start.log.open("ab") as log:
            process = subprocess.Popen(
                [*(_WITH_US if shutil.which(_WITH_US[0]) else ()), *self._words(start, start.words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(start),
                cwd=self._directory(start),
                start_new_session=True,
            )
        return ContainerProcess(process, process.pid, _Marked(mark))

    def execute(self, start: Start, process: ContainerProcess, words: Sequence[str]) -> Execution:
        with start.log.open("ab") as log:
            return Execution(
                subprocess.Popen(
                    self._words(start, words),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment(start),
                    cwd=self._directory(start),
                    start_new_session=True,
                )
            )

    def _words(self, start: Start, words: Sequence[str]) -> list[str]:
        return start.image.here([rewrite(word, start.mounts) for word in words])

    def _environment(self, start: Start) -> dict[str, str]:
        theirs = {name: rewrite(value, start.mounts) for name, value in start.environment.items()}
        return {**start.image.environment, **theirs, _MARK: self._marks[start.name]}

    def _directory(self, start: Start) -> str:
        """Where the container has none of its own, one that is nobody else's."""
        directory = rewrite(start.working_directory, start.mounts)
        return directory if directory and Path(directory).is_dir() else str(start.root)


def rewrite(text: str, mounts: Sequence[Mount]) -> str:
    """Every path of a mount becomes the path of its source; of two that fit the longer counts."""
    places = {mount.target: str(mount.source) for mount in mounts}
    if not places:
        return text
    targets = "|".join(re.escape(target) for target in sorted(places, key=len, reverse=True))
    # Once over the text: a source may itself begin like a mount path.
    return re.sub(rf"(?:(?<![\w./-])|(?<=://))({targets})(?![\w.-])", lambda match: places[match[1]], text)


class _Marked:
    """Whoever has inherited the variable; its value is nobody else's."""

    def __init__(self, mark: str) -> None:
        self._wanted = os.fsencode(f"{_MARK}={mark}")

    def holds(self, folder: Path) -> bool:
        return self._wanted in (folder / "environ").read_bytes().split(b"\0")
