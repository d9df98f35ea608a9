"""The thread that says when others may train here now: each change is a hint, without a look of the agent's own."""

import asyncio
import sys
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.liveness import RankLocks
from keepstep_agent.runtime.monitors.ranks import rank_hints
from keepstep_api.names import RANKS_DIRECTORY, STATE_DIRECTORY

TRAINER = """
import fcntl, sys
with open(sys.argv[1], "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    sys.stdin.read()
"""


async def hinted(hint: asyncio.Event) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        await hint.wait()
    hint.clear()


async def test_a_hint_comes_at_first_when_a_rank_takes_its_lock_and_when_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / STATE_DIRECTORY / RANKS_DIRECTORY
    folder.mkdir(parents=True)
    locks, hint = RankLocks(tmp_path), asyncio.Event()
    with rank_hints(locks, hint):
        await hinted(hint)
        assert locks.live_ranks() == frozenset()
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TRAINER, str(folder / "3"), stdin=asyncio.subprocess.PIPE
        )
        try:
            await hinted(hint)
            assert locks.live_ranks() == {3}
        finally:
            trainer.kill()
            await trainer.wait()
        await hinted(hint)
        assert locks.live_ranks() == frozenset()


async def test_a_hint_comes_when_the_ranks_can_no_longer_be_seen(tmp_path: Path) -> None:
    state = tmp_path / STATE_DIRECTORY
    state.mkdir()
    hint = asyncio.Event()
    with rank_hints(RankLocks(tmp_path), hint):
        await hinted(hint)
        (state / RANKS_DIRECTORY).write_text("no folder")
        await hinted(hint)
