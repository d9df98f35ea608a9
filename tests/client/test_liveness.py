"""The liveness lock, as another process (the agent) sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.claims import claims

from keepstep.agent_client.liveness import claimed, hold_liveness_lock
from keepstep.framework_run import FrameworkRun
from keepstep_agent.adapters.liveness import RankLocks
from keepstep_api import names

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
from keepstep.agent_client.liveness import claimed, hold_liveness_lock
print(hold_liveness_lock(Path(sys.argv[1])), flush=True)
if len(sys.argv) > 2:
    with claimed(Path(sys.argv[1]), sys.argv[2]):
        print("claimed", flush=True)
        sys.stdin.readline()
    print("free", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / names.STATE_DIRECTORY / names.RANKS_DIRECTORY / "0"


def seen_by_another_process(path: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    ).stdout.strip()


def start_holder(path: Path, *claim: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *claim], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
        holder.wait(HANG_SECONDS)
        assert hold_liveness_lock(path)
    finally:
        holder.kill()
        holder.communicate(timeout=HANG_SECONDS)


@pytest.mark.parametrize("killed", [False, True])
def test_a_claim_is_seen_until_it_ends_or_its_process_does(path: Path, tmp_path: Path, killed: bool) -> None:
    locks, name = RankLocks(tmp_path), "a \n\u00e4"
    holder = start_holder(path, f"checkpoints/{name}")
    try:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert [holder.stdout.readline() for _ in range(2)] == ["True\n", "claimed\n"]
        assert locks.claim(tmp_path / "checkpoints" / name)
        assert not locks.claim(tmp_path / "checkpoints" / "b")
        if killed:
            holder.kill()
            holder.wait(HANG_SECONDS)
        else:
            holder.stdin.write("\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "free\n"
        assert not locks.claim(tmp_path / "checkpoints" / name)
    finally:
        holder.kill()
        holder.communicate(timeout=HANG_SECONDS)
    # Who has the lock next has claimed nothing.
    assert hold_liveness_lock(path)
    assert claims(tmp_path) == []


def test_claims_of_several_checkpoints_end_one_by_one(path: Path, tmp_path: Path) -> None:
    assert hold_liveness_lock(path)
    with claimed(path, "a"), claimed(path, "b"):
        with claimed(path, "a"):
            assert hold_liveness_lock(path)
            assert claims(tmp_path) == ["a", "b", "a"]
        assert sorted(claims(tmp_path)) == ["a", "b"]
    assert claims(tmp_path) == []


def test_what_a_live_process_says_half_is_a_claim_to_anything(path: Path, tmp_path: Path) -> None:
    holder = start_holder(path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        path.write_text('["checkpoints/a"')
        assert RankLocks(tmp_path).claim(tmp_path / "checkpoints" / "b")
    finally:
        holder.kill()
        holder.communicate(timeout=HANG_SECONDS)


def test_what_a_framework_writes_is_claimed_before_its_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path))
    run = FrameworkRun.current()
    try:
        seen: list[list[str]] = []
        place = tmp_path / "out" / "checkpoint-1"
        run.save(place, 1, lambda _: seen.append(claims(tmp_path)), asynchronous=True)
        run.announce()
        run.wait()
    finally:
        run.close()
    assert seen == [["out/checkpoint-1"]]
    assert claims(tmp_path) == []


def test_what_a_framework_writes_that_nobody_will_announce_is_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots leave out for good what was ever claimed, so such a checkpoint would be nowhere."""
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path))
    run = FrameworkRun.current()
    seen: list[list[str]] = []
    place = tmp_path / "out" / "checkpoint-1"
    try:
        with pytest.raises(SystemExit):
            run.leave(together=False)
        run.save(place, 1, lambda _: seen.append(claims(tmp_path)), asynchronous=False)
        with run.claimed(place):
            seen.append(claims(tmp_path))
    finally:
        run.close()
    assert seen == [[], []]
