"""What an agent notes in the ledger and when it writes: little, complete, and never in anybody's way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from structlog.testing import capture_logs
from tests.core.play import Play, settings
from tests.fakes.fake_ready_store import FakeReadyStore, StoreClock
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.runtime.patience import until

from keepstep_agent.catalog.ledger import read_ledger
from keepstep_agent.core.agent.commands import Exit
from keepstep_agent.core.agent.events import (
    Committed,
    Event,
    RanksSeen,
    SaveBegun,
    Shed,
    Started,
    StepSeen,
    TerminationNoticed,
)
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.policies.progress import StepSign
from keepstep_agent.core.stored.ledger import (
    AgentEnded,
    AgentStarted,
    Alive,
    LedgerEntry,
    Noticed,
    RanksChanged,
    Resumed,
    SaveCommitted,
    Saved,
    SaveLost,
)
from keepstep_agent.restore.start_record import StartRecord
from keepstep_agent.runtime.outside.ledger import LedgerWriter
from keepstep_agent.runtime.outside.outbox import Outbox, Pace, last_words

LONG_SECONDS = 3600.0
RESTORED = StartRecord(began_at=5.0, restored_at=9.0, resumed=Resumed.SAVE, step=70, save="of-70", start="one")


class Agent:
    """An agent that hears what a test says; `store` is where it writes."""

    def __init__(
        self,
        *,
        restored: StartRecord | None = None,
        between_objects_seconds: float = LONG_SECONDS,
        between_signs_seconds: float = LONG_SECONDS,
    ) -> None:
        self.store = FakeStore()
        self.ready = FakeReadyStore(self.store)
        self.play = Play()
        self.writer = LedgerWriter(
            store=cast(Any, self.ready),
            clock=cast(Any, StoreClock(self.store)),
            settings=replace(settings(), attempt="job-1", place="worker-0"),
            restored=restored,
            between_objects_seconds=between_objects_seconds,
            between_signs_seconds=between_signs_seconds,
        )

    def hears(self, event: Event) -> None:
        self.writer.hear(self.play.state, event)

    def starts(self) -> None:
        self.hears(Started(at=10.0, fresh=False))

    def sees(self, at: float, *local_ranks: int) -> None:
        self.hears(RanksSeen(at=at, alive=frozenset(local_ranks)))

    def saves(self, save: str, step: int, *, directory: str = "") -> None:
        self.play.steps[save] = step
        self.play.directories[save] = directory
        begun = SaveBegun(at=self.play.now - 2.0, save=save, attempt="job-1", step=step, size_bytes=1)
        self.play.feed(begun)
        self.hears(begun)
        self.play.announce(save)
        checkpoint = self.play.state.checkpoints[save]
        (contribution,) = checkpoint.contributions.values()
        self.hears(contribution.announced)

    def commits(self, save: str) -> None:
        announced_at = self.play.state.checkpoints[save].announced_at
        self.hears(Committed(at=announced_at + 7.0, work=WorkId(Operation.COMMIT, save)))

    async def ends(self, command: Exit, *, program_failed: bool = False) -> None:
        self.writer.note_end(command, program_failed=program_failed)
        await last_words(self.writer.to, self.writer.send_last, in_a_hurry=True)

    async def entries(self) -> list[LedgerEntry]:
        lives = (await read_ledger(self.store)).lives
        return [entry for life in lives for entry in life.entries]

    @property
    def objects(self) -> int:
        return sum(method == "put" for method, _ in self.store.calls)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        task = asyncio.create_task(Outbox(self.writer, Pace(shortest_pause_seconds=0.0)).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


async def turns() -> None:
    """Let the other task do what it can do now."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_everything_that_a_report_needs_is_noted() -> None:
    agent = Agent(restored=RESTORED)
    agent.starts()
    agent.sees(11.0, 0, 1)
    agent.saves("first", 80)
    agent.commits("first")
    agent.saves("second", 90)
    agent.hears(Shed(at=40.0, save="second", reason="room"))
    agent.hears(TerminationNoticed(at=50.0, deadline=80.0, source="spot"))
    agent.sees(60.0)
    await agent.ends(Exit(code=75, lost=("second",)), program_failed=True)
    start, ranks, saved, commit, _, lost, notice, gone, end = await agent.entries()
    assert start == AgentStarted(
        number=1,
        at=10.0,
        start="one",
        restore_began_at=5.0,
        restored_at=9.0,
        resumed=Resumed.SAVE,
        step=70,
        save="of-70",
    )
    assert (ranks, gone) == (RanksChanged(number=2, at=11.0, ranks=2), RanksChanged(number=8, at=60.0, ranks=0))
    assert isinstance(saved, Saved)
    assert (saved.save, saved.step, saved.save_kind, saved.at - (saved.begun_at or 0)) == ("first", 80, "periodic", 2.0)
    assert isinstance(commit, SaveCommitted)
    assert (commit.save, commit.upload_seconds, commit.size_bytes > 0) == ("first", 7.0, True)
    assert lost == SaveLost(number=6, at=40.0, save="second", outcome="shed", reason="room")
    assert notice == Noticed(number=7, at=50.0, source="spot", grace_seconds=30.0)
    assert isinstance(end, AgentEnded)
    assert (end.code, end.source, end.not_durable, end.program_failed) == (75, "spot", 1, True)


async def test_commits_are_written_together_and_not_more_often_than_allowed() -> None:
    agent = Agent()
    agent.starts()
    async with agent.writing():
        await turns()
        assert agent.objects == 0
        agent.saves("first", 1)
        await turns()
        assert agent.objects == 0
        agent.commits("first")
        await until(lambda: agent.objects == 1)
        agent.saves("second", 2)
        agent.commits("second")
        await turns()
        assert agent.objects == 1
    await agent.ends(Exit(code=0, lost=()))
    assert agent.objects == 2
    assert [type(entry) for entry in await agent.entries()] == [
        AgentStarted, Saved, SaveCommitted, Saved, SaveCommitted, AgentEnded,
    ]  # fmt: skip


async def test_a_notice_is_written_at_once() -> None:
    agent = Agent()
    async with agent.writing():
        agent.sees(10.0, 0)
        await until(lambda: agent.objects == 1)
        agent.hears(TerminationNoticed(at=50.0, deadline=80.0, source="spot"))
        await until(lambda: agent.objects == 2)
        agent.hears(TerminationNoticed(at=51.0, deadline=80.0, source="spot"))
        await turns()
        assert agent.objects == 2


async def test_signs_of_life_are_written_while_ranks_are_alive() -> None:
    agent = Agent(between_objects_seconds=0.001, between_signs_seconds=0.001)
    async with agent.writing():
        await turns()
        assert agent.objects == 0
        agent.sees(10.0, 0, 1)
        await until(lambda: agent.objects > 3)
    entries = await agent.entries()
    assert isinstance(entries[-1], Alive)
    assert entries[-1].ranks == 2


async def test_what_could_not_be_written_is_in_the_next_object_and_said_once() -> None:
    agent = Agent(between_objects_seconds=0.001)
    for _ in range(3):
        agent.store.fail("put", ErrorKind.ACCESS_DENIED)
    # An answer that was lost: the object is there.
    agent.store.fail("put", ErrorKind.UNREACHABLE, after_acting=True)
    with capture_logs() as logs:
        async with agent.writing():
            agent.starts()
            agent.sees(11.0, 0)
            await until(lambda: agent.objects == 5)
            agent.sees(12.0)
            await until(lambda: agent.objects >= 6)
    # Once for each of the two kinds.
    assert [line["event"] for line in logs] == ["outbox.not_taken", "outbox.not_taken", "outbox.taken_again"]
    numbers = [entry.number for entry in await agent.entries()]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_notice_after_failures_is_written_at_once() -> None:
    agent = Agent()
    for _ in range(3):
        agent.store.fail("put", ErrorKind.UNREACHABLE)
    async with agent.writing():
        for number in range(1, 5):
            agent.hears(TerminationNoticed(at=50.0, deadline=80.0, source=f"notice-{number}"))
            await until(lambda expected=number: agent.objects == expected)  # type: ignore[misc]
    assert [type(entry) for entry in await agent.entries()] == [Noticed] * 4


async def test_a_store_that_is_away_holds_up_no_event_and_the_oldest_entries_are_dropped() -> None:
    agent = Agent()
    agent.ready.opened.clear()
    async with agent.writing():
        for at in range(5_000):
            agent.sees(float(at), *range(at % 2))
        await turns()
    agent.ready.opened.set()
    await agent.ends(Exit(code=0, lost=()))
    entries = await agent.entries()
    assert len(entries) == 4_096
    assert (entries[0].number > 900, type(entries[-1])) == (True, AgentEnded)


async def test_of_more_than_an_object_holds_the_agents_end_is_written() -> None:
    agent = Agent()
    for at in range(5_000):
        agent.hears(Shed(at=float(at), save="one", reason="\u00e9" * 5_000))
    await agent.ends(Exit(code=0, lost=()))
    entries = await agent.entries()
    assert isinstance(entries[-1], AgentEnded)
    assert 1_000 < len(entries) < 4_096


async def test_a_pods_save_has_the_first_begin_and_the_longest_stall_of_its_ranks() -> None:
    agent = Agent()
    agent.play.feed(SaveBegun(at=agent.play.now, save="one", attempt="job-1", step=7, size_bytes=1))
    begun_at = agent.play.state.save_requests.begun_at["one"]
    for rank, stall_seconds in ((0, 9.0), (1, 2.0)):
        agent.play.announce("one", rank=rank, world_size=2, local_world_size=2, stall_seconds=stall_seconds)
        agent.hears(agent.play.state.checkpoints["one"].contributions[rank].announced)
        # What is announced after this agent was started again has no begin.
        agent.play.state.save_requests.begun_at.clear()
    await agent.ends(Exit(code=0, lost=()))
    (saved, _) = await agent.entries()
    assert isinstance(saved, Saved)
    assert (saved.begun_at, saved.stall_seconds) == (begun_at, 9.0)


async def test_signs_of_life_of_ranks_that_came_again_do_not_tell_the_step_of_those_before() -> None:
    agent = Agent(restored=RESTORED, between_objects_seconds=0.001, between_signs_seconds=0.001)
    agent.starts()

    async def step() -> int:
        before = agent.objects
        async with agent.writing():
            await until(lambda: agent.objects > before + 1)
        last = [entry for entry in await agent.entries() if isinstance(entry, Alive)][-1]
        return last.step

    agent.sees(11.0, 0)
    assert await step() == 70
    agent.saves("first", 80)
    assert await step() == 80
    agent.sees(20.0)
    agent.sees(30.0, 0)
    assert await step() == 0
    agent.saves("second", 75)
    assert await step() == 75
    agent.hears(StepSeen(at=40.0, newest=StepSign(at=39.0, step=78)))
    assert await step() == 78
    # Nor do those of another training of the same processes.
    agent.saves("third", 5, directory="stage-two")
    assert await step() == 5
    agent.hears(StepSeen(at=50.0, newest=StepSign(at=49.0, step=6)))
    assert await step() == 6
    saved = [entry for entry in await agent.entries() if isinstance(entry, Saved)]
    assert [entry.output for entry in saved] == ["", "", "stage-two"]


async def test_the_agents_end_does_not_wait_for_a_store_that_is_away() -> None:
    agent = Agent()
    agent.starts()
    agent.ready.opened.clear()
    with capture_logs() as logs:
        async with asyncio.timeout(HANG_SECONDS):
            await agent.ends(Exit(code=0, lost=()))
    assert [line["event"] for line in logs] == ["outbox.left"]


async def test_a_newer_checkpoint_that_is_whole_on_the_volume_is_what_a_start_resumes_from() -> None:
    agent = Agent(restored=RESTORED)
    agent.play.steps["local"] = 95
    agent.play.announce("local")
    agent.starts()
    await agent.ends(Exit(code=0, lost=()))
    start = (await agent.entries())[0]
    assert isinstance(start, AgentStarted)
    assert (start.resumed, start.step, start.save) == (Resumed.SAVE, 95, "local")


async def test_text_that_no_object_can_hold_does_not_end_the_writing() -> None:
    agent = Agent()
    agent.hears(Shed(at=40.0, save="one", reason="\udcff" + "x" * 5_000))
    await agent.ends(Exit(code=0, lost=()))
    (lost, _) = await agent.entries()
    assert isinstance(lost, SaveLost)
    assert lost.reason.startswith("\\udcffxxx")
