"""Replay and compaction of the journal: what a restart still knows."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.core.play import PART_BYTES, Play, settings
from tests.fakes.fake_journal import FakeJournal

from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.agent.commands import Stage
from keepstep_agent.core.agent.events import (
    Announced,
    Committed,
    DurableEvent,
    Exited,
    RankRegistered,
    Staged,
    TerminationNoticed,
)
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.file_lists import StagedFiles
from keepstep_agent.core.model import Kind, Phase, RankManifest, SaveInfo
from keepstep_agent.ports import StagedDescriptor, StageRequest
from keepstep_agent.runtime.engine.event_codec import encode_event
from keepstep_agent.runtime.engine.journaling import compact, recover
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.transfers import stage


class _NothingStaged:
    """A staging area whose volume has nothing that the journal does not know."""

    def make_durable(self, path: str, files: Sequence[str]) -> None: ...

    def check_sent(self, manifest: RankManifest, files: StagedFiles, *, may_read: Callable[[], bool]) -> None: ...

    def stage(self, request: StageRequest) -> StagedFiles:
        raise AssertionError("nothing is staged while recovering")

    def check(self, save: str, rank: int, files: StagedFiles) -> None: ...

    def release(self, save: str) -> None: ...

    def scan(self, may_read: Callable[[str], bool] = lambda _: True) -> Iterable[tuple[StagedDescriptor, StagedFiles]]:
        return []


def _journal_of(play: Play) -> FakeJournal:
    journal = FakeJournal()
    journal.append([encode_event(event) for event in play.journal])
    return journal


def test_a_restart_knows_what_is_unfinished_down_to_the_part() -> None:
    play = Play()
    play.announce("one", (3 * PART_BYTES,))
    play.answer(WorkId(Operation.CREATE_UPLOAD, "one", 0, "r0-0"))
    play.answer(next(work for work in play.in_flight if work.number == 2))
    state, _ = recover(settings(), _journal_of(play), _NothingStaged())
    progress = state.checkpoints["one"].contributions[0].files["r0-0"]
    assert progress.multipart is not None
    assert set(progress.multipart.receipts) == {2}
    assert progress.upload == play.state.checkpoints["one"].contributions[0].files["r0-0"].upload


def test_compaction_keeps_the_unfinished_and_the_newest_committed_and_nothing_else() -> None:
    play = Play()
    for number in range(30):
        play.announce(f"save-{number}", (2 * PART_BYTES, 10))
        play.finish()
    play.announce("open", (2 * PART_BYTES,))
    journal = _journal_of(play)
    before = len(list(journal.replay()))
    kept = compact(play.state, journal)
    assert kept < before / 10
    state, _ = recover(settings(), journal, _NothingStaged())
    assert {save: checkpoint.phase for save, checkpoint in state.checkpoints.items()} == {
        "save-29": Phase.RELEASED,
        "open": Phase.STAGED,
    }
    assert state.newest_committed is state.checkpoints["save-29"]
    assert compact(state, journal) == kept


def test_a_notice_outlives_a_crash_and_an_orderly_exit_uses_it_up() -> None:
    play = Play()
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="preStop"))
    state, _ = recover(settings(), _journal_of(play), _NothingStaged())
    assert state.termination.noticed
    play.feed(Exited(at=play.now + 1))
    journal = _journal_of(play)
    state, _ = recover(settings(), journal, _NothingStaged())
    assert not state.termination.noticed
    assert not list(journal.replay())


def test_an_old_notice_does_not_shorten_a_new_one_after_compaction() -> None:
    play = Play()
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 5, source="old"))
    play.feed(Exited(at=play.now + 10))
    play.feed(TerminationNoticed(at=play.now + 20, deadline=play.now + 60, source="new"))
    journal = _journal_of(play)
    recover(settings(), journal, _NothingStaged())
    state, _ = recover(settings(), journal, _NothingStaged())
    assert (state.termination.source, state.termination.deadline) == ("new", play.now + 60)


def test_compaction_does_not_make_an_earlier_lifes_last_save_one_of_this_life() -> None:
    play = Play()
    play.announce("last", (PART_BYTES,), kind=Kind.JUST_IN_TIME)
    play.feed(Exited(at=play.now))
    journal = _journal_of(play)
    for _ in range(3):
        state, _ = recover(settings(), journal, _NothingStaged())
        assert state.termination.first_sequence > state.checkpoints["last"].sequence


def _staged_on(volume: Path, save: str, step: int, announced_at: float = 1.0) -> list[DurableEvent]:
    """What the journal says of a save that is staged there."""
    source = volume / "checkpoints" / f"checkpoint-{step}"
    source.mkdir(parents=True)
    (source / "model.bin").write_bytes(b"x" * step)
    info = SaveInfo(save=save, name=source.name, step=step, kind=Kind.PERIODIC, world_size=1)
    announced = Announced(at=announced_at, info=info, rank=0, path=str(source), files=(), local_world_size=1)
    return [announced, _stage_on(volume, (announced,))]


def _stage_on(volume: Path, announcements: tuple[Announced, ...], pack_size_bytes: int = 0) -> Staged:
    first = announcements[0]
    command = Stage(
        work=WorkId(Operation.STAGE, first.info.save, first.rank),
        announcements=announcements,
        private=False,
        rewritten_inodes=frozenset(),
        part_size_bytes=2 * PART_BYTES,
        pack_size_bytes=pack_size_bytes,
    )
    with ThreadPoolExecutor(1) as executor:
        return asyncio.run(stage(LocalStagingArea(volume), SystemClock(), executor, command))


_RECORD_OF_ANOTHER_VERSION = b'{"event":"Invented","body":{}}'


@pytest.mark.parametrize("lost", [Announced, Staged])
def test_a_journal_with_an_unreadable_record_is_moved_aside_and_the_volume_rescanned(
    tmp_path: Path, lost: type[DurableEvent]
) -> None:
    events = _staged_on(tmp_path, "save-1", step=1)
    journal = FakeJournal()
    journal.append([_RECORD_OF_ANOTHER_VERSION if isinstance(event, lost) else encode_event(event) for event in events])
    with capture_logs() as logs:
        state, _ = recover(settings(), journal, LocalStagingArea(tmp_path))
    assert state.checkpoints["save-1"].phase is Phase.STAGED
    assert _RECORD_OF_ANOTHER_VERSION in journal.aside[0]
    assert [entry["log_level"] for entry in logs if entry["event"] == "journal.unreadable"] == ["error"]
    again, _ = recover(settings(), journal, _NothingStaged())
    assert list(again.checkpoints) == ["save-1"]
    assert len(journal.aside) == 1


def test_a_journal_in_which_a_digit_changed_by_itself_is_not_believed(tmp_path: Path) -> None:
    events = _staged_on(tmp_path, "save-1", step=1)
    records = [encode_event(event) for event in events]
    committed = encode_event(Committed(at=2.0, work=WorkId(Operation.COMMIT, "save-2")))
    journal = FakeJournal()
    # Else it would say that another save is committed, and drop its pins.
    journal.append([*records, committed.replace(b"save-2", b"save-1")])
    state, _ = recover(settings(), journal, LocalStagingArea(tmp_path))
    assert state.checkpoints["save-1"].phase is Phase.STAGED
    assert len(journal.aside) == 1


def test_a_record_that_changed_while_the_agent_runs_keeps_the_journal_as_long_as_it_is() -> None:
    play = Play()
    play.announce("one", (10,))
    play.finish()
    journal = _journal_of(play)
    first, *others = journal.replay()
    journal.drop(range(1 + len(others)))
    journal.append([first[:-3], *others])
    with pytest.raises(KeepstepError, match="checksum"):
        compact(play.state, journal)
    assert len(list(journal.replay())) == 1 + len(others)


@pytest.mark.parametrize("journaled", [0, 1, 2])
def test_a_directory_that_ranks_share_is_found_again_with_all_of_them(tmp_path: Path, journaled: int) -> None:
    source = tmp_path / "checkpoints" / "checkpoint-1"
    source.mkdir(parents=True)
    (source / "model.bin").write_bytes(b"x")
    info = SaveInfo(save="save-1", name=source.name, step=1, kind=Kind.PERIODIC, world_size=4)
    announcements = tuple(
        Announced(at=3.0 - rank, info=info, rank=rank, path=str(source), files=(), local_world_size=2)
        for rank in (0, 1)
    )
    _stage_on(tmp_path, announcements)
    journal = FakeJournal()
    # In the order in which they came.
    journal.append([encode_event(event) for event in announcements[::-1][:journaled]])
    state, _ = recover(settings(), journal, LocalStagingArea(tmp_path))
    (checkpoint,) = state.checkpoints.values()
    assert checkpoint.info == info
    assert checkpoint.phase is Phase.STAGED
    shares = [share for _, share in sorted(checkpoint.contributions.items())]
    assert [(share.staged, *share.files.pinned.paths) for share in shares] == [(True, "model.bin"), (True,)]
    assert [share.announced.at for _, share in sorted(checkpoint.contributions.items())] == [3.0, 2.0]


def test_which_rank_is_which_outlives_compaction_and_not_an_orderly_end() -> None:
    play = Play()
    for local_rank, rank in ((0, 2), (1, 3), (0, 4), (0, 2)):
        play.feed(RankRegistered(at=play.now, local_rank=local_rank, rank=rank))
    journal = _journal_of(play)
    recover(settings(), journal, _NothingStaged())
    state, _ = recover(settings(), journal, _NothingStaged())
    assert state.ranks == {0: 2, 1: 3}
    journal.append([encode_event(Exited(at=play.now))])
    recover(settings(), journal, _NothingStaged())
    state, _ = recover(settings(), journal, _NothingStaged())
    assert state.ranks == {}


def test_a_journal_that_does_not_replay_is_moved_aside_and_the_volume_rescanned(tmp_path: Path) -> None:
    play = Play()
    play.announce("save-0", (10,))
    play.answer(WorkId(Operation.PUT_FILE, "save-0", 0, "r0-0"))
    journal = FakeJournal()
    journal.append([encode_event(event) for event in play.journal if not isinstance(event, Staged)])
    journal.append([encode_event(event) for event in _staged_on(tmp_path, "save-1", step=1)])
    state, _ = recover(settings(), journal, LocalStagingArea(tmp_path))
    assert list(state.checkpoints) == ["save-1"]
    assert len(journal.aside) == 1


def test_what_is_found_again_on_the_volume_keeps_the_part_size_it_was_staged_with(tmp_path: Path) -> None:
    _staged_on(tmp_path, "save-1", step=1)
    state, _ = recover(settings(), FakeJournal(), LocalStagingArea(tmp_path))
    assert state.checkpoints["save-1"].contributions[0].files["model.bin"].part_size_bytes == 2 * PART_BYTES


@pytest.mark.parametrize(("pack_size_bytes", "packs"), [(0, 0), (16 * 1024, 5), (8 * 1024, 10)])
def test_what_is_found_again_on_the_volume_is_packed_as_it_was_when_it_was_staged(
    tmp_path: Path, pack_size_bytes: int, packs: int
) -> None:
    source = tmp_path / "checkpoints" / "checkpoint-1"
    source.mkdir(parents=True)
    for number in range(70):
        (source / f"{number}").write_bytes(b"x")
    info = SaveInfo(save="save-1", name=source.name, step=1, kind=Kind.PERIODIC, world_size=1)
    announced = Announced(at=1.0, info=info, rank=0, path=str(source), files=(), local_world_size=1)
    _stage_on(tmp_path, (announced,), pack_size_bytes)
    state, _ = recover(settings(), FakeJournal(), LocalStagingArea(tmp_path))
    assert len(state.checkpoints["save-1"].contributions[0].files.packs) == packs


def test_after_a_damaged_journal_the_newest_is_the_one_that_was_announced_last(tmp_path: Path) -> None:
    # Save ids sort otherwise. The clock may be too coarse to tell two saves apart: then the step does.
    for save, step, announced_at in (
        ("b", 100, 1.0),
        ("d", 200, 2.0),
        ("a", 300, 3.0),
        ("c", 150, 4.0),
        ("0", 250, 4.0),
    ):
        _staged_on(tmp_path, save, step, announced_at)
    state, _ = recover(settings(), FakeJournal(), LocalStagingArea(tmp_path))
    by_age = sorted(state.checkpoints.values(), key=lambda checkpoint: checkpoint.sequence)
    assert [checkpoint.info.save for checkpoint in by_age] == ["b", "d", "a", "c", "0"]
    newest = state.newest()
    assert newest is not None
    assert newest.info.save == "0"
