"""Which ranks count as cut short by a termination: those that died after an agent had seen them alive in it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.core.play import settings
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.agent.events import Event, Started, TerminationNoticed
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.runtime.monitors.monitors import Monitors
from keepstep_agent.runtime.monitors.ranks import RanksLook
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_api.step_file import StepRecord


class _Rank0:
    """Local rank 0, which was at step 5. `answer` lets a look go on that was made while it was cleared."""

    def __init__(self) -> None:
        self.alive = True
        self.looking, self.answer = threading.Event(), threading.Event()
        self.answer.set()

    def look(self) -> RanksLook:
        found = RanksLook(alive=frozenset({0} if self.alive else ()), newest=None, age_seconds=0.0)
        self.looking.set()
        assert self.answer.wait(HANG_SECONDS)
        return found

    def last_steps(self, ranks: frozenset[int] | None, since_unix: float) -> Sequence[StepRecord]:
        return [StepRecord(step=5, at_unix=since_unix)]


class _Engine:
    """Applies events at once."""

    def __init__(self) -> None:
        self.state = State(settings=settings())

    async def submit(self, event: Event) -> None:
        advance(self.state, event)


@asynccontextmanager
async def _monitors(rank: _Rank0, volume: Path) -> AsyncIterator[tuple[Monitors, State]]:
    engine = _Engine()
    await engine.submit(Started(at=0.0, fresh=True))
    with ThreadPoolExecutor(2) as executor:
        monitors = Monitors(
            engine=cast(Any, engine),
            clock=SystemClock(),
            live_ranks=cast(Any, rank),
            executor=executor,
            settings=replace(settings(), volume=str(volume)),
            mirror=None,
            unannounced=cast(Any, None),
        )
        async with asyncio.timeout(HANG_SECONDS):
            await monitors.look_at_ranks()
            yield monitors, engine.state


def _notice() -> TerminationNoticed:
    return TerminationNoticed(at=1.0, deadline=None, source="test")


@pytest.mark.parametrize("lives_until_notice", [True, False])
async def test_a_rank_is_cut_short_if_it_was_alive_at_the_notice(lives_until_notice: bool, tmp_path: Path) -> None:
    rank = _Rank0()
    async with _monitors(rank, tmp_path) as (monitors, state):
        rank.alive = lives_until_notice
        # Whoever looks first: the notice itself, or the monitor that its hints have waked.
        advance(state, _notice())
        await monitors.look_at_ranks()
        rank.alive = False
        await monitors.look_at_ranks()
        assert (state.termination.cut_short is not None) == lives_until_notice


async def test_a_look_from_before_the_notice_neither_counts_nor_brings_back_the_dead(tmp_path: Path) -> None:
    rank = _Rank0()
    async with _monitors(rank, tmp_path) as (monitors, state):
        rank.answer.clear()
        rank.looking.clear()
        early = asyncio.create_task(monitors.look_at_ranks())
        await asyncio.to_thread(rank.looking.wait, HANG_SECONDS)
        rank.alive = False
        advance(state, _notice())
        later = asyncio.create_task(monitors.look_at_ranks())
        # Whichever of them may go on first.
        await asyncio.sleep(0)
        rank.answer.set()
        await asyncio.gather(early, later)
        assert state.alive_ranks == frozenset()
        await monitors.look_at_ranks()
        assert state.termination.cut_short is None
