"""While the journal cannot be written: nothing runs ahead of its record that only the record would tell."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.core.play import Play, settings
from tests.fakes.fake_journal import FakeJournal
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.agent.commands import Command, Release
from keepstep_agent.core.agent.events import Announced, Committed, Exited, Shed, Staged, WorkCancelled, WorkFailed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.model import Phase
from keepstep_agent.ports import StagedDescriptor
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event
from keepstep_agent.runtime.engine.journaling import recover
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.announcements import Announcement, Announcements


class _FullJournal(FakeJournal):
    """Without room while `full`."""

    full = False
    tries = 0

    def append(self, records: Sequence[bytes]) -> None:
        self.tries += 1
        if self.full:
            raise VolumeError(ErrorKind.DISK_FULL, "the volume is full", hint="make room")
        super().append(records)

    def drop(self, positions: Collection[int]) -> None:
        if self.full:
            raise VolumeError(ErrorKind.DISK_FULL, "the volume is full", hint="make room")
        super().drop(positions)


class _Agent:
    """An engine that really runs; what it lets out is collected, not done."""

    def __init__(self, play: Play, executor: ThreadPoolExecutor, unjournaled: Sequence[bytes]) -> None:
        self.journal = _FullJournal()
        self.clock = SystemClock()
        self.engine = Engine(
            state=play.state, journal=self.journal, clock=self.clock, executor=executor, unjournaled=unjournaled
        )
        self.commands: list[Command] = []

    async def turn(self) -> None:
        """A turn of the engine has passed, and what it has posted to itself."""
        for _ in range(2):
            seen = self.engine.revision
            self.engine.post(WorkFailed(at=0.0, work=_NOBODYS, kind=ErrorKind.TIMED_OUT, message="", hint="", jitter=0))
            await self.engine.next_change(seen)


_TURNS = 500
_NOBODYS = WorkId(Operation.SEND_PART, "nobody's")


@asynccontextmanager
async def _running(play: Play, unjournaled: Sequence[bytes] = ()) -> AsyncIterator[_Agent]:
    with ThreadPoolExecutor(1) as executor:
        agent = _Agent(play, executor, unjournaled)
        async with asyncio.timeout(HANG_SECONDS), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(agent.engine.run(agent.commands.append))
            yield agent
            running.cancel()


async def test_pins_wait_for_the_record_that_their_checkpoint_is_given_up() -> None:
    play = Play()
    play.announce("save")
    shed = Shed(at=play.now, save="save", reason="superseded")
    async with _running(play) as agent:
        agent.journal.full = True
        agent.engine.post(shed)
        await agent.engine.until(lambda state: state.checkpoints["save"].phase is Phase.SHED)
        for work in play.in_flight:
            agent.engine.post(WorkCancelled(at=play.now, work=work))
        await agent.turn()
        assert not any(isinstance(command, Release) for command in agent.commands)
        agent.journal.full = False
        # As after the pause that every failure has.
        agent.engine.state.checkpoints["save"].delayed.clear()
        agent.engine.state.touched["save"] = None
        await agent.turn()
        assert [command for command in agent.commands if isinstance(command, Release)]
        assert encode_event(shed) in list(agent.journal.replay())


async def test_pins_of_a_committed_checkpoint_make_room_for_the_journal() -> None:
    play = Play()
    play.announce("save")
    commit = WorkId(Operation.COMMIT, "save")
    while commit not in play.in_flight:
        play.answer(next(iter(play.in_flight)))
    async with _running(play) as agent:
        agent.journal.full = True
        agent.engine.post(Committed(at=play.now, work=commit))
        await agent.turn()
        assert [command for command in agent.commands if isinstance(command, Release)]


async def test_an_announcement_is_not_acknowledged_from_memory_alone(tmp_path: Path) -> None:
    """The first try is refused, but known; the second must not be answered as if it were on disk."""
    request = Announcement(path="/volume/checkpoint-1", step=1, save="save")
    async with _running(Play()) as agent:
        with ThreadPoolExecutor(1) as executor:
            announcements = Announcements(
                engine=agent.engine,
                clock=agent.clock,
                volume=tmp_path,
                checkpoint_directory=tmp_path / "checkpoints",
                staging=LocalStagingArea(tmp_path),
                workers=executor,
            )
            agent.journal.full = True
            for _ in range(2):
                with pytest.raises(VolumeError):
                    await announcements.enter(request)
            agent.journal.full = False
            await announcements.enter(request)
        assert len(list(agent.journal.replay())) == 1


def test_pins_of_a_save_that_was_announced_again_are_found_though_only_its_failure_is_recorded() -> None:
    play = Play()
    play.announce_only("save")
    stage = WorkId(Operation.STAGE, "save", 0)
    play.fail(stage, ErrorKind.DISK_FULL)
    journal = FakeJournal()
    journal.append([encode_event(event) for event in play.journal])
    play.answer(WorkId(Operation.RELEASE, "save"))
    play.announce("save")
    (again,) = [event for event in play.journal if isinstance(event, Announced)][1:]
    (staged,) = [event for event in play.journal if isinstance(event, Staged)]

    class Pinned(LocalStagingArea):
        def scan(self, may_read: Callable[[str], bool] = lambda _: True) -> list[tuple[StagedDescriptor, StagedFiles]]:
            return [(StagedDescriptor(announcements=(encode_event(again).decode(),)), staged.files)]

    state, _ = recover(settings(), journal, Pinned(Path("/volume")))
    assert state.checkpoints["save"].phase is Phase.STAGED


def test_what_is_found_on_a_full_volume_is_known_and_its_records_wait_for_room() -> None:
    play = Play()
    play.announce("save")
    (announced,) = [event for event in play.journal if isinstance(event, Announced)]
    (staged,) = [event for event in play.journal if isinstance(event, Staged)]
    journal = _FullJournal()
    journal.full = True

    class Pinned(LocalStagingArea):
        def scan(self, may_read: Callable[[str], bool] = lambda _: True) -> list[tuple[StagedDescriptor, StagedFiles]]:
            return [(StagedDescriptor(announcements=(encode_event(announced).decode(),)), staged.files)]

    state, unjournaled = recover(settings(), journal, Pinned(Path("/volume")))
    assert state.checkpoints["save"].phase is Phase.STAGED
    assert [type(decode_event(record)) for record in unjournaled] == [Announced, Staged]


def test_a_journal_that_finds_no_room_to_be_shortened_stays_as_it_is(tmp_path: Path) -> None:
    play = Play()
    play.announce("save")
    play.finish(limit=100)
    journal = _FullJournal()
    journal.append([encode_event(event) for event in play.journal])
    journal.full = True
    state, unjournaled = recover(settings(), journal, LocalStagingArea(tmp_path))
    assert state.checkpoints["save"].phase is Phase.RELEASED
    assert not unjournaled
    assert list(journal.replay()) == [encode_event(event) for event in play.journal]
    journal.full = False
    recover(settings(), journal, LocalStagingArea(tmp_path))
    assert len(list(journal.replay())) < len(play.journal)


async def test_records_that_found_no_room_at_the_start_come_first_in_the_journal() -> None:
    async with _running(Play(), [b"found"]) as agent:
        agent.engine.post(Exited(at=0.0))
        await agent.turn()
        assert list(agent.journal.replay())[:2] == [b"found", encode_event(Exited(at=0.0))]


async def test_records_that_found_no_room_are_not_tried_again_with_every_turn() -> None:
    async with _running(Play()) as agent:
        agent.journal.full = True
        for _ in range(_TURNS):
            seen = agent.engine.revision
            agent.engine.post(Exited(at=0.0))
            await agent.engine.next_change(seen)
        # Once per pause, and the pauses grow.
        assert agent.journal.tries < _TURNS / 10
        agent.journal.full = False
        await agent.engine.close(Exited(at=0.0))
        assert list(agent.journal.replay()) == [encode_event(Exited(at=0.0))] * (_TURNS + 1)


async def test_records_that_found_no_room_are_tried_again_though_nothing_else_happens() -> None:
    async with _running(Play()) as agent:
        agent.journal.full = True
        seen = agent.engine.revision
        agent.engine.post(Exited(at=0.0))
        await agent.engine.next_change(seen)
        agent.journal.full = False
        while not list(agent.journal.replay()):
            await agent.engine.next_change(agent.engine.revision)
        assert list(agent.journal.replay()) == [encode_event(Exited(at=0.0))]
