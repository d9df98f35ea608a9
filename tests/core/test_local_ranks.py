"""Ranks of one pod that write one checkpoint into one directory: it is theirs together, however they announce it."""

from itertools import permutations

import pytest
from tests.core.play import Play

from keepstep_agent.core.agent.announcements import check_announcement, known_announcement
from keepstep_agent.core.agent.commands import Commit, Stage, WriteManifest
from keepstep_agent.core.agent.events import Announced, Started
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.model import Kind, Phase, SaveInfo
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event

_RANKS = (4, 5, 6)
_INFO = SaveInfo(save="save", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=12)


def _announced(rank: int, *, local_world_size: int = len(_RANKS), at: float = 100.0) -> Announced:
    return Announced(
        at=at,
        info=_INFO,
        rank=rank,
        path="/volume/checkpoints/checkpoint-1",
        files=(),
        local_world_size=local_world_size,
    )


def _announce(play: Play, rank: int) -> None:
    """As the API does: what is known is no news."""
    event = _announced(rank, at=play.now)
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


@pytest.mark.parametrize("order", list(permutations(_RANKS)))
def test_in_whatever_order_and_how_often_they_announce_the_directory_is_pinned_once_for_all(
    order: tuple[int, ...],
) -> None:
    play = Play()
    play.sizes["save", min(_RANKS)] = (10,)
    for rank in order:
        assert not play.in_flight
        play.now += 1
        _announce(play, rank)
        _announce(play, rank)
    _announce(play, order[0])
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
