"""Who has the wire: the newest, but not so that nothing is ever finished."""

import random

import pytest
from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent.commands import CancelWork, CreateUpload
from keepstep_agent.core.agent.events import Committed, PartStored, TerminationNoticed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Kind, Phase


def _send(play: Play, count: int) -> None:
    """Let that many transfers succeed, whichever come first."""
    for _ in range(count):
        work = next(work for work in play.in_flight if work.save in play.transfers())
        play.answer(work)


def test_a_newer_checkpoint_takes_the_wire_between_two_parts() -> None:
    play = Play()
    play.announce("old", (PART_BYTES * 10,))
    # Begun, and three of ten parts there.
    _send(play, 4)
    assert play.state.checkpoints["old"].durable_bytes == PART_BYTES * 3
    play.announce("new", (PART_BYTES,) * 5)
    _send(play, 2)
    assert play.transfers() == ["new", "new"]


def test_what_was_pushed_aside_goes_on_where_it_was() -> None:
    play = Play()
    play.announce("old", (PART_BYTES * 10,))
    _send(play, 4)
    play.announce("new", (PART_BYTES,) * 5)
    play.finish()
    assert play.phase("old") is Phase.RELEASED
    parts = [event.work for event in play.journal if isinstance(event, PartStored)]
    assert len(parts) == len(set(parts)) == 10


def test_a_save_that_pushed_one_aside_is_not_pushed_aside_itself() -> None:
    play = Play(max_concurrency=1)
    play.announce("first", (PART_BYTES * 3,))
    play.announce("second", (PART_BYTES,) * 3)
    _send(play, 1)
    assert play.transfers() == ["second"]
    play.announce("third", (PART_BYTES,) * 3)
    _send(play, 2)
    assert play.transfers() == ["second"]
    play.finish("second")
    assert set(play.transfers()) == {"third"}


@pytest.mark.parametrize("files", [1, 2])
def test_of_several_small_ones_at_most_one_is_committed_before_the_newest(files: int) -> None:
    play = Play(max_concurrency=8)
    for save in ("first", "second", "third", "fourth"):
        play.announce(save, (PART_BYTES,) * files)
        cancelled = [work for work in play.in_flight if work in play.state.cancelling]
        for work in cancelled:
            play.cancel(work)
        assert len(set(play.transfers()) - {save}) <= 1
    # "second" preempted "first", and is protected for it.
    assert set(play.transfers()) == {"second", "fourth"}
    play.finish()
    committed = [event.work.save for event in play.journal if isinstance(event, Committed)]
    assert committed.index("fourth") <= 1
    assert len(committed) == 4


@pytest.mark.parametrize("kind", [Kind.JUST_IN_TIME, Kind.FINAL])
def test_only_a_last_save_goes_before_a_protected_one(kind: Kind) -> None:
    play = Play(max_concurrency=1)
    play.announce("first", (PART_BYTES * 3,))
    play.announce("second", (PART_BYTES,) * 3)
    _send(play, 1)
    play.announce("last", (PART_BYTES,) * 3, kind=kind)
    _send(play, 1)
    assert play.transfers() == ["last"]


def test_a_trainer_that_saves_faster_than_the_store_takes_still_gets_checkpoints_committed() -> None:
    play = Play(max_concurrency=2)
    committed: list[int] = []
    for step in range(1, 41):
        play.announce(f"s{step}", (PART_BYTES,) * 6)
        # The store takes four of six files between two saves.
        _send(play, 4)
        for save in [work.save for work in play.in_flight if work.operation is Operation.CHECK_SENT]:
            play.finish(save)
            committed.append(step - int(save[1:]))
    assert len(committed) >= 15
    # What commits is at most two saves old: one for the protected one, one for its own upload.
    assert max(committed) <= 2


def test_an_older_checkpoint_that_is_staged_later_does_not_take_the_wire() -> None:
    play = Play(max_concurrency=1)
    play.announce("old", (PART_BYTES,) * 3, world_size=2, local_world_size=2)
    play.announce("new", (PART_BYTES,) * 3)
    play.announce("old", (PART_BYTES,) * 3, rank=1, world_size=2, local_world_size=2)
    _send(play, 2)
    assert play.transfers() == ["new"]


def test_a_save_that_waits_for_a_rank_protects_nothing() -> None:
    play = Play(max_concurrency=1)
    play.announce("first", (PART_BYTES,) * 2)
    play.announce("second", (PART_BYTES,), world_size=2, local_world_size=2)
    _send(play, 2)
    play.announce("third", (PART_BYTES,) * 2)
    _send(play, 1)
    play.announce("fourth", (PART_BYTES,) * 2)
    play.finish()
    assert [play.phase(save) for save in ("first", "third", "fourth")] == [Phase.RELEASED] * 3


def test_the_last_parts_of_the_first_share_the_wire_with_nobody() -> None:
    play = Play(max_concurrency=4)
    play.announce("old", (PART_BYTES,) * 8)
    play.announce("new", (PART_BYTES * 2,))
    _send(play, 4)
    # The multipart upload of the new one is begun, then its two parts are on the wire.
    for expected in (["new"], ["new", "new"], ["new"]):
        assert play.transfers() == expected
        play.answer(next(work for work in play.in_flight if work.save == "new"))
    # Completing it sends no bytes.
    assert play.transfers() == ["new", "old", "old", "old"]


def test_what_waits_for_its_retry_leaves_the_wire_to_the_next() -> None:
    play = Play(max_concurrency=4)
    play.announce("old", (PART_BYTES,) * 8)
    play.announce("new", (PART_BYTES,))
    _send(play, 4)
    assert play.transfers() == ["new"]
    (work,) = play.in_flight
    play.fail(work, ErrorKind.TIMED_OUT)
    assert play.transfers() == ["old"] * 4


def test_what_has_failed_once_keeps_nobody_off_the_wire_when_it_is_sent_again() -> None:
    play = Play(max_concurrency=2)
    play.announce("old", (PART_BYTES,) * 8)
    play.announce("new", (PART_BYTES,))
    _send(play, 2)
    (work,) = play.in_flight
    play.fail(work, ErrorKind.TIMED_OUT)
    play.wait_until(lambda: not play.state.checkpoints["new"].delayed)
    _send(play, 1)
    assert sorted(play.transfers()) == ["new", "old"]


def test_the_newest_does_not_wait_for_the_last_part_of_a_protected_older_one() -> None:
    play = Play(max_concurrency=4)
    play.announce("first", (PART_BYTES,) * 8)
    play.announce("protected", (PART_BYTES,) * 2)
    _send(play, 4)
    play.announce("newest", (PART_BYTES,) * 8)
    assert play.state.active_upload == "protected"
    _send(play, 1)
    assert sorted(play.transfers()) == ["newest", "newest", "newest", "protected"]


def test_what_hung_when_the_store_went_away_takes_no_place_once_it_is_back() -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 40)
    for work in list(play.in_flight)[:2]:
        play.fail(work, ErrorKind.UNREACHABLE)
    hanging = set(play.in_flight)
    play.wait_until(lambda: bool(set(play.in_flight) - hanging))
    for _ in range(4):
        # The store is back, and six requests from before still hang.
        play.answer(next(work for work in play.in_flight if work not in hanging))
        assert set(play.in_flight) - hanging
    assert len(play.in_flight) == 8


def test_a_just_in_time_save_in_a_drain_takes_the_whole_wire_at_once() -> None:
    play = Play(max_concurrency=2)
    play.announce("old", (PART_BYTES,) * 4)
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="test"))
    commands = play.announce("last", (PART_BYTES,) * 4, kind=Kind.JUST_IN_TIME)
    cancelled = [command.work for command in commands if isinstance(command, CancelWork)]
    assert [work.save for work in cancelled] == ["old", "old"]
    for work in cancelled:
        play.cancel(work)
    assert play.transfers() == ["last", "last"]
    # Cancelled once, and not again while the last save is on its way.
    play.finish()
    assert play.phase("old") is Phase.RELEASED


def test_a_just_in_time_save_without_a_byte_to_send_takes_nothing_off_the_wire() -> None:
    play = Play(max_concurrency=2)
    play.announce("old", (PART_BYTES,) * 4)
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="test"))
    commands = play.announce("last", (), kind=Kind.JUST_IN_TIME)
    assert not [command for command in commands if isinstance(command, CancelWork)]


def test_in_a_drain_the_newest_goes_before_a_protected_older_one() -> None:
    play = Play(max_concurrency=1)
    play.announce("first", (PART_BYTES * 3,))
    play.announce("second", (PART_BYTES,) * 3)
    _send(play, 1)
    play.announce("third", (PART_BYTES,) * 3)
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="test"))
    _send(play, 1)
    assert play.transfers() == ["third"]


def test_parts_of_a_lost_upload_are_not_sent_to_it_again() -> None:
    play = Play(max_concurrency=2)
    play.announce("save", (PART_BYTES * 4,))
    _send(play, 1)
    first, second = (work for work in play.in_flight if work.operation is Operation.SEND_PART)
    play.fail(first, ErrorKind.UPLOAD_LOST)
    play.fail(second, ErrorKind.TIMED_OUT)
    play.now += 60
    retried = play.tick()
    assert [type(command) for command in retried] == [CreateUpload]
    play.finish()
    assert play.phase("save") is Phase.RELEASED


def test_a_store_that_says_slow_down_gets_half_the_parts_at_a_time() -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 40)
    assert len(play.transfers()) == 8
    for work in list(play.in_flight):
        play.fail(work, ErrorKind.THROTTLED)
    # All eight answers are one and the same complaint.
    assert len(play.transfers()) == 4


def test_the_window_opens_again_with_every_full_window_that_lands() -> None:
    play = Play(max_concurrency=8)
    play.announce("save", (PART_BYTES,) * 80)
    for work in list(play.in_flight):
        play.fail(work, ErrorKind.THROTTLED)
    _send(play, 40)
    assert len(play.transfers()) == 8


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_everything_announced_is_committed(seed: int) -> None:
    chance = random.Random(seed)
    play = Play(max_concurrency=chance.choice((1, 3)))
    for number in range(6):
        play.announce(f"s{number}", tuple(chance.choice((0, 1, PART_BYTES * 3)) for _ in range(chance.randint(0, 3))))
        for _ in range(chance.randint(0, 6)):
            if play.in_flight:
                work: WorkId = chance.choice(sorted(play.in_flight))
                play.answer(work)
    play.finish()
    assert {play.phase(f"s{number}") for number in range(6)} == {Phase.RELEASED}
