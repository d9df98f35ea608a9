"""The liveness lock, as another process (the agent) sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooring.liveness import hold_liveness_lock

PROBE = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except BlockingIOError:
        print("held")
"""
HOLDER = """
import sys
from pathlib import Path
from mooring.liveness import hold_liveness_lock
print(hold_liveness_lock(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ranks" / "0"


def seen_by_another_process(path: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def start_holder(path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_second_hold_in_the_same_process_keeps_the_lock(path: Path) -> None:
    assert hold_liveness_lock(path)
    assert hold_liveness_lock(path)
    assert seen_by_another_process(path) == "held"


def test_a_forked_worker_neither_holds_nor_drops_the_lock(path: Path) -> None:
    assert hold_liveness_lock(path)
    process_id = os.fork()
    if process_id == 0:
        os._exit(hold_liveness_lock(path))
    _, status = os.waitpid(process_id, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert seen_by_another_process(path) == "held"


def test_the_lock_of_a_live_process_is_not_taken_and_falls_with_its_death(path: Path) -> None:
    holder = start_holder(path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert not hold_liveness_lock(path)
        holder.kill()
        holder.wait(30)
        assert hold_liveness_lock(path)
    finally:
        holder.kill()
        holder.communicate(timeout=30)
