"""Saves a step twice and is killed before each of its file operations in turn; says what is resumed from after each.

`killed_replacement.py <directory> <size of the first> <size of the second> <exchange or not> <note or not>`. With
`not` the file system cannot exchange two folders; with `note` the program has a file of its own in the checkpoint's
folder. One line for each kill: `<file operation> <content that is resumed from> <whether its record is of the save that
wrote it> <names in the folder>`; a kill before nothing ends it, with `none`.
"""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from keepstep import Checkpointer, operating_system

# Those of them that change the disk.
OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "open")
DIRECTORY = Path(sys.argv[1])
SIZES = {"old": int(sys.argv[2]), "new": int(sys.argv[3])}
EXCHANGES = sys.argv[4] == "exchange"
HAS_NOTE = sys.argv[5] == "note"
CHECKPOINT = DIRECTORY / "checkpoint-5"


def in_a_process_of_its_own(work: Callable[..., None], *arguments: object) -> int:
    process_id = os.fork()
    if process_id == 0:
        work(*arguments)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def write(path: Path, content: str) -> None:
    for name in ("state", "more"):
        (path / name).write_text(content.ljust(SIZES[content]))


def save(content: str) -> None:
    with Checkpointer(DIRECTORY).save(5) as path:
        write(path, content)
    if HAS_NOTE:
        (CHECKPOINT / "note").write_text("the program's")


def replace(kill_before: int) -> None:
    operations = itertools.count()
    # Not of what is done while it starts, nor of its own writing.
    checkpointer = Checkpointer(DIRECTORY)
    exchange = operating_system.exchange

    def exchange_or_not(one: Path, other: Path) -> bool:
        kill("exchange", ())
        return EXCHANGES and exchange(one, other)

    def kill(event: str, _: tuple[object, ...]) -> None:
        if event in (*OPERATIONS, "exchange") and next(operations) == kill_before:
            print(event, end=" ", flush=True)
            os._exit(9)

    with checkpointer.save(5) as path:
        write(path, "new")
        operating_system.exchange = exchange_or_not
        sys.addaudithook(kill)


def resume(save_of_old: str) -> None:
    path = Checkpointer(DIRECTORY).resume()
    contents = {(path / name).read_text().strip() for name in ("state", "more")} if path else {"nothing"}
    record = json.loads((DIRECTORY / ".keepstep/records/checkpoint-5.json").read_text())
    names = ",".join(sorted(path.name for path in CHECKPOINT.iterdir()))
    entries = [entry for entry in DIRECTORY.iterdir() if entry.name != ".keepstep"]
    assert entries == [CHECKPOINT], entries
    print("+".join(contents), (record["save"] == save_of_old) == (contents == {"old"}), names, flush=True)


def main() -> None:
    for kill_before in itertools.count():
        shutil.rmtree(DIRECTORY, ignore_errors=True)
        in_a_process_of_its_own(save, "old")
        save_of_old = json.loads((DIRECTORY / ".keepstep/records/checkpoint-5.json").read_text())["save"]
        killed = in_a_process_of_its_own(replace, kill_before)
        if not killed:
            print("none", end=" ", flush=True)
        in_a_process_of_its_own(resume, save_of_old)
        if not killed:
            return


if __name__ == "__main__":
    main()
