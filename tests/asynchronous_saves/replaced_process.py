"""Saves with a Checkpointer, starts a child by fork and exec, and becomes another program while the save is written.

python replaced_process.py DIRECTORY
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from keepstep import Checkpointer
from keepstep.asynchronous_saves.empty_file import EmptyFile


def main() -> None:
    goes_on = threading.Event()
    find = EmptyFile.find

    def find_later(empty: EmptyFile, directory: Path) -> Any:
        goes_on.wait()
        return find(empty, directory)

    EmptyFile.find = find_later  # type: ignore[method-assign,assignment]
    checkpointer = Checkpointer(sys.argv[1])
    with checkpointer.save(1) as directory:
        torch.save(torch.zeros(1024), directory / "state.pt")
    child = os.fork()
    if child == 0:
        # Nobody writes here, so there is nothing to wait for.
        os.execlp("true", "true")
    assert os.waitpid(child, 0)[1] == 0
    print(sorted(Path(sys.argv[1]).glob("checkpoint-*")), flush=True)
    threading.Timer(0.2, goes_on.set).start()
    os.execl(sys.executable, sys.executable, "-c", "print('the other program', flush=True)")


main()
