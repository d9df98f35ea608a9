"""Ranks of one pod that write one checkpoint into one directory: it is theirs together, however they announce it."""

from dataclasses import replace
from itertools import permutations

import pytest
from tests.core.play import Play, staged_file

from keepstep_agent.core.agent.announcements import check_announcement, known_announcement
from keepstep_agent.core.agent.commands import Commit, Stage, WriteManifest
from keepstep_agent.core.agent.events import Announced, Staged, Started
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.file_lists import staged_files
from keepstep_agent.core.model import Kind, Phase, SaveInfo
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event

_RANKS = (4, 5, 6)
_INFO = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=12)


def _announced(
    rank: int, *, local_world_size: int = len(_RANKS), at: float = 100.0, files: tuple[str, ...] = ()
) -> Announced:
    return Announced(
        at=at,
        info=_INFO,
        rank=rank,
        path="/volume/checkpoints/checkpoint-1",
        files=files,
        local_world_size=local_world_size,
    )


def _announce(play: Play, rank: int, files: tuple[str, ...] = ()) -> None:
    """As the API does: what is known is no news."""
    event = _announced(rank, at=play.now, files=files)
    check_announcement(play.state, event)
    if known_announcement(play.state, event) is None:
        play.feed(event)


def _release(play: Play) -> None:
    """Answer everything until the save is over. It is another agent's to commit, so this one looks after a moment."""
    play.finish()
    if play.phase("save") is Phase.SEALED:
        play.wait_until(lambda: bool(play.in_flight))
        play.finish()
    assert play.phase("save") is Phase.RELEASED


@pytest.mark.parametrize("files", [(), ("shared",)], ids=["everything in it", "the same files"])
@pytest.mark.parametrize("order", list(permutations(_RANKS)))
def test_in_whatever_order_and_how_often_they_announce_the_directory_is_pinned_once_for_all(
    order: tuple[int, ...], files: tuple[str, ...]
) -> None:
    play = Play()
    play.sizes["save", min(_RANKS)] = (10,)
    for rank in order:
        assert not play.in_flight
        play.now += 1
        _announce(play, rank, files)
        _announce(play, rank, files)
    _announce(play, order[0], files)
    (command,) = play.in_flight.values()
    assert isinstance(command, Stage)
    assert command.work == WorkId(Operation.STAGE, "save", min(_RANKS))
    assert [announcement.rank for announcement in command.announcements] == sorted(_RANKS)
    announced_at = {announcement.rank: announcement.at for announcement in command.announcements}
    assert sorted(announced_at, key=announced_at.__getitem__) == list(order)
    play.answer(command.work)
    play.answer(WorkId(Operation.PUT_FILE, "save", min(_RANKS), "shared"))
    for rank in _RANKS:
        assert not any(isinstance(one, WriteManifest) for one in play.in_flight.values())
        play.answer(WorkId(Operation.CHECK_SENT, "save", rank))
    (write,) = play.in_flight.values()
    assert isinstance(write, WriteManifest)
    assert {one.rank: len(one.files) for one in write.ranks} == {4: 1, 5: 0, 6: 0}
    play.answer(write.work)
    play.wait_until(lambda: bool(play.in_flight))
    (commit,) = play.in_flight.values()
    assert isinstance(commit, Commit)
    assert commit.ranks == write.ranks


@pytest.mark.parametrize("events_kept", range(1, 9))
def test_after_a_crash_at_any_moment_they_need_announce_only_what_was_not_acknowledged(events_kept: int) -> None:
    before = Play()
    before.sizes["save", min(_RANKS)] = (10,)
    for rank in _RANKS:
        _announce(before, rank)
    _release(before)
    play = Play()
    play.sizes = before.sizes
    play.state = State(settings=before.state.settings)
    for event in before.journal[:events_kept]:
        advance(play.state, decode_event(encode_event(event)))
    play.feed(Started(at=play.now, fresh=False))
    for rank in _RANKS:
        # Who was told that it is durable asks no more, and who was not asks again.
        if rank not in play.state.checkpoints["save"].contributions:
            _announce(play, rank)
    _release(play)


def test_while_one_is_missing_nothing_is_pinned_sent_or_committed_and_the_next_save_supersedes_it() -> None:
    play = Play()
    for rank in _RANKS[:-1]:
        _announce(play, rank)
    assert not play.in_flight
    play.announce("next")
    play.finish()
    assert play.phase("next") is Phase.RELEASED
    assert play.phase("save") is Phase.ANNOUNCED
    # Some time later, with whatever happens next.
    play.now += 600
    play.tick()
    play.finish()
    assert play.phase("save") is Phase.SHED
    assert "never completed" in play.state.checkpoints["save"].reason
    # The one that comes after all is told so, and it is no error.
    event = _announced(_RANKS[-1])
    check_announcement(play.state, event)
    assert known_announcement(play.state, event) is play.state.checkpoints["save"]


def test_ranks_that_count_themselves_differently_are_refused() -> None:
    play = Play()
    _announce(play, 4)
    for event in (_announced(5, local_world_size=2), _announced(5, local_world_size=1)):
        with pytest.raises(RequestError) as refused:
            check_announcement(play.state, event)
        assert refused.value.kind is ErrorKind.CONTRADICTION


def test_one_more_rank_than_were_said_to_come_is_refused() -> None:
    play = Play()
    for rank in _RANKS:
        _announce(play, rank)
    with pytest.raises(RequestError) as refused:
        check_announcement(play.state, _announced(7))
    assert refused.value.kind is ErrorKind.CONTRADICTION


def test_ranks_of_one_directory_that_list_different_files_of_it_are_refused() -> None:
    play = Play()
    _announce(play, 4, ("weights", "optimizer"))
    for files in ((), ("weights",), ("weights", "optimizer", "more")):
        with pytest.raises(RequestError, match="list different files") as refused:
            check_announcement(play.state, _announced(5, files=files))
        assert refused.value.kind is ErrorKind.CONTRADICTION
        assert "local_world_size" in refused.value.hint
    check_announcement(play.state, _announced(5, files=("optimizer", "weights")))


def test_a_rank_that_is_known_already_may_ask_again_with_whatever_files() -> None:
    """As after an agent has announced the checkpoint by its record: who asks again gets the same answer."""
    play = Play()
    _announce(play, 4, ("weights",))
    again = _announced(4)
    check_announcement(play.state, again)
    assert known_announcement(play.state, again) is play.state.checkpoints["save"]


def test_ranks_that_share_nothing_are_pinned_each_by_itself_whatever_files_they_list() -> None:
    play = Play()
    for rank in _RANKS:
        event = _announced(rank, local_world_size=1, files=(f"rank-{rank}", "config"))
        check_announcement(play.state, event)
        play.feed(event)
    assert [work.rank for work in play.in_flight] == list(_RANKS)


def test_ranks_of_one_directory_need_not_agree_about_the_program_s_own_files() -> None:
    play = Play()
    for rank, others in ((5, ()), (4, ("train.log",)), (6, ("train.log", "state.json"))):
        event = replace(_announced(rank, files=("weights",)), others=others)
        check_announcement(play.state, event)
        play.feed(event)
    (command,) = play.in_flight.values()
    assert isinstance(command, Stage)
    assert command.announcements[0].others == ("train.log",)


def test_a_copy_of_the_program_s_own_file_is_no_sign_that_the_save_s_files_are_rewritten_in_place() -> None:
    play = Play()
    for step in range(2):
        save = f"save-{step}"
        info = replace(_INFO, save=save, step=step, world_size=1)
        play.feed(replace(_announced(0, local_world_size=1, files=("weights",)), info=info, others=("train.log",)))
        command = play.in_flight.pop(WorkId(Operation.STAGE, save, 0))
        assert isinstance(command, Stage)
        assert not command.private
        weights, log = staged_file("weights", 10, inode=step), staged_file("train.log", 10, inode=100 + step)
        files = staged_files([weights, replace(log, private=True)])
        play.feed(Staged(at=play.now, work=command.work, files=files, part_size_bytes=command.part_size_bytes))
    assert not play.state.rewritten_paths
