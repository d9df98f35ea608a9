"""Which ranks a process knows to be gone, by the locks of real processes, and what an own notice does to a wait."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

from keepstep.ranks import rank_watch
from keepstep.ranks.rank_watch import RankWatch

RANK = """
import sys
from pathlib import Path
from keepstep.agent_client.liveness import hold_liveness_lock
assert hold_liveness_lock(Path(sys.argv[1]))
print("holds", flush=True)
for line in sys.stdin:
    # Whatever file of a lock a process closes, it loses the lock.
    Path(sys.argv[1]).read_bytes()
    print("read", flush=True)
"""


@contextmanager
def holding(path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=HANG_SECONDS)


@pytest.fixture(autouse=True)
def _looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "_LOOK_SECONDS", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1"


@pytest.mark.parametrize("is_reaped", [True, False], ids=["its parent knows", "its parent does not know"])
def test_a_rank_is_gone_when_its_process_has_ended(path: Path, is_reaped: bool) -> None:
    with holding(path) as process:
        watch = RankWatch({1: path}, others=1)
        assert watch.gone() == []
        process.kill()
        if is_reaped:
            process.wait(HANG_SECONDS)
        wait_until(lambda: watch.gone() == [1], HANG_SECONDS, "the kernel has ended it")


def test_a_rank_stays_gone_though_another_process_takes_its_lock(path: Path) -> None:
    with holding(path) as process:
        watch = RankWatch({1: path}, others=1)
        process.kill()
        process.wait(HANG_SECONDS)
        with holding(path):
            assert watch.gone() == [1]
    assert watch.gone() == [1]


def test_a_process_that_has_lost_its_lock_and_lives_is_not_gone(path: Path) -> None:
    with holding(path) as process:
        watch = RankWatch({1: path}, others=1)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "read\n"
        with holding(path):
            assert watch.gone() == []


def test_a_rank_whose_lock_was_never_seen_held_is_not_gone(tmp_path: Path) -> None:
    (tmp_path / "1").touch()
    assert RankWatch({1: tmp_path / "1", 2: tmp_path / "2"}, others=2).gone() == []


def test_a_notice_bounds_the_wait_more_tightly_for_ranks_that_are_out_of_sight(path: Path) -> None:
    def notice_seconds(sees_all: bool) -> float:
        return 14.0 if sees_all else 7.0

    with holding(path):
        assert RankWatch({1: path}, others=1, notice_seconds=notice_seconds).most_seconds() == 14.0
        assert RankWatch({1: path}, others=2, notice_seconds=notice_seconds).most_seconds() == 7.0
        assert RankWatch({1: path}, others=2).most_seconds() is None
