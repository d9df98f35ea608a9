"""A sidecar that is a regular container leaves once its trainer is gone for good, and not before."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.core.play import Play, settings

from mooring_agent.adapters.neighbours import Neighbours
from mooring_agent.core.errors import ErrorKind, VolumeError
from mooring_agent.core.model import Kind
from mooring_agent.core.settings import Settings, TerminationSettings
from mooring_agent.runtime.trainer_watch import TrainerWatch, trainer_watch

TRAINER = Neighbours(trainer=True, anybody=True)
OTHERS = Neighbours(trainer=False, anybody=True)
NOBODY = Neighbours(trainer=False, anybody=False)
SHORT_SECONDS = 0.05
LONG_SECONDS = 3600.0
# It bounds a hang and judges no speed.
LIMIT_SECONDS = 60.0


class Pod:
    """What the watch sees, and whether it has asked to leave."""

    def __init__(self) -> None:
        self.play = Play()
        self.neighbours: Neighbours | None = NOBODY
        self.looks = 0
        self.left = asyncio.Event()
        self.times_left = 0

    def look(self) -> Neighbours:
        self.looks += 1
        if self.neighbours is None:
            raise VolumeError(ErrorKind.VOLUME_UNUSABLE, "no /proc here")
        return self.neighbours

    async def leave(self) -> None:
        self.times_left += 1
        self.left.set()

    async def see(self, neighbours: Neighbours | None) -> None:
        """Returns once the watch has taken it in."""
        self.neighbours = neighbours
        await self.look_again()

    async def look_again(self) -> None:
        seen = self.looks
        await until(lambda: self.looks >= seen + 3)

    @asynccontextmanager
    async def watched(
        self,
        *,
        gone_seconds: float = SHORT_SECONDS,
        after_final_seconds: float = LONG_SECONDS,
        unseen_seconds: float = LONG_SECONDS,
    ) -> AsyncIterator[None]:
        with ThreadPoolExecutor(1) as executor:
            watch = TrainerWatch(
                state=lambda: self.play.state,
                look=self.look,
                leave=self.leave,
                executor=executor,
                gone_seconds=gone_seconds,
                after_final_seconds=after_final_seconds,
                unseen_seconds=unseen_seconds,
                look_seconds=0.001,
            )
            task = asyncio.create_task(watch.watch())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait({task})

    async def leaves(self) -> bool:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self.left.wait()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not holds():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.001)


@pytest.fixture
async def pod() -> Pod:
    return Pod()


async def test_it_leaves_once_and_only_after_the_trainer_is_gone(pod: Pod) -> None:
    async with pod.watched():
        await pod.see(TRAINER)
        assert not pod.left.is_set()
        await pod.see(NOBODY)
        assert await pod.leaves()
        await pod.look_again()
    assert pod.times_left == 1


async def test_a_trainer_that_is_started_again_in_time_is_waited_for_anew(pod: Pod) -> None:
    async with pod.watched(gone_seconds=LONG_SECONDS):
        for neighbours in (TRAINER, NOBODY, TRAINER, NOBODY):
            await pod.see(neighbours)
    assert not pod.left.is_set()


async def test_after_a_final_save_nobody_is_waited_for(pod: Pod) -> None:
    pod.play.announce("save", kind=Kind.FINAL)
    async with pod.watched(gone_seconds=LONG_SECONDS, after_final_seconds=SHORT_SECONDS):
        assert await pod.leaves()


async def test_after_a_just_in_time_save_the_trainer_may_come_back(pod: Pod) -> None:
    pod.play.announce("save", kind=Kind.JUST_IN_TIME)
    async with pod.watched(gone_seconds=LONG_SECONDS, after_final_seconds=SHORT_SECONDS):
        await pod.look_again()
        assert not pod.left.is_set()


async def test_a_rank_whose_lock_is_held_needs_no_look_and_counts_as_seen(pod: Pod) -> None:
    pod.play.state.alive_ranks = frozenset({0})
    async with pod.watched():
        await asyncio.sleep(0)
        assert not pod.left.is_set()
        assert not pod.looks
        pod.play.state.alive_ranks = frozenset()
        assert await pod.leaves()


async def test_a_trainer_of_whom_there_is_no_sign_yet_has_longer(pod: Pod) -> None:
    async with pod.watched(unseen_seconds=LONG_SECONDS):
        await pod.look_again()
        assert not pod.left.is_set()


async def test_where_none_ever_comes_the_pod_is_not_held_for_ever(pod: Pod) -> None:
    async with pod.watched(unseen_seconds=SHORT_SECONDS):
        assert await pod.leaves()


async def test_other_containers_are_company_only_until_the_trainer_has_been_seen(pod: Pod) -> None:
    async with pod.watched(unseen_seconds=SHORT_SECONDS):
        await pod.see(OTHERS)
        await pod.look_again()
        assert not pod.left.is_set()
        await pod.see(TRAINER)
        await pod.see(OTHERS)
        assert await pod.leaves()


async def test_an_agent_that_was_restarted_knows_by_its_journal_that_there_was_a_trainer(pod: Pod) -> None:
    pod.play.announce("save")
    async with pod.watched(unseen_seconds=LONG_SECONDS):
        assert await pod.leaves()


async def test_where_nobody_can_be_seen_it_stays(pod: Pod) -> None:
    async with pod.watched(unseen_seconds=SHORT_SECONDS):
        await pod.see(None)
        await pod.look_again()
        assert not pod.left.is_set()


def _settings(volume: Path, seconds: float) -> Settings:
    return replace(settings(), volume=str(volume), termination=TerminationSettings(exit_after_trainer_seconds=seconds))


@pytest.mark.parametrize(
    ("seconds", "first_process", "watches"), [(5.0, False, True), (0.0, False, False), (5.0, True, False)]
)
def test_it_watches_where_it_was_asked_to_and_can_see_others(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, first_process: bool, watches: bool
) -> None:
    if first_process:
        monkeypatch.setattr(os, "getpid", lambda: 1)
    with ThreadPoolExecutor(1) as executor:
        watch = trainer_watch(
            _settings(tmp_path, seconds), state=lambda: pod.play.state, leave=pod.leave, executor=executor
        )
    assert (watch is not None) == watches
