"""What is set aside because agents died of it: it waits for everything else, and is tried again alone."""

from collections.abc import Sequence
from dataclasses import replace

from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.events import (
    DurableEvent,
    NewsDue,
    NewsTaken,
    Recalled,
    Staged,
    Started,
    StopRequested,
    Survived,
    Ticked,
)
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.model import Phase, Receiver
from keepstep_agent.core.policies.repeated_deaths import (
    OUTPUT_DIRECTORIES,
    READING,
    Suspect,
    Task,
    after_death,
    after_orderly_end,
)
from keepstep_agent.core.settings.values import Settings

_TASK = Task(doing="put-file", title="a checkpoint")


def _suspect(deaths: int, *, doing: str = "put-file", noted_at: float = 100.0) -> Suspect:
    return Suspect(deaths=deaths, last=Task(doing=doing, title="a checkpoint"), noted_at=noted_at)


def _start_again(play: Play, **suspects: Suspect) -> None:
    play.in_flight.clear()
    play.feed(Started(at=play.now, fresh=False, suspects=suspects))


def test_a_row_of_deaths_is_broken_by_one_without_the_work_unless_it_waits_set_aside() -> None:
    once = after_death({}, {"a": _TASK, "b": _TASK}, 1.0)
    assert {work: one.deaths for work, one in once.items()} == {"a": 1, "b": 1}
    twice = after_death(once, {"a": _TASK}, 2.0)
    assert {work: one.deaths for work, one in twice.items()} == {"a": 2}
    assert after_death(twice, {"c": _TASK}, 3.0).keys() == {"a", "c"}
    assert after_orderly_end(after_death(twice, {"c": _TASK}, 3.0)).keys() == {"a"}


def test_the_pause_before_another_try_grows_up_to_six_hours() -> None:
    pauses = [_suspect(deaths).due_at - 100.0 for deaths in (2, 3, 4, 5, 12, 13, 40)]
    assert pauses == [0.0, 30.0, 60.0, 120.0, 15_360.0, 6 * 3600.0, 6 * 3600.0]


def test_a_checkpoint_that_got_further_between_two_deaths_is_not_set_aside() -> None:
    left = replace(_TASK, left=(-1, 100))
    once = after_death({}, {"a": left, "b": left}, 1.0)
    twice = after_death(once, {"a": replace(left, left=(-1, 99)), "b": left}, 2.0)
    assert {work: one.deaths for work, one in twice.items()} == {"a": 1, "b": 2}
    # What reads it at a start does not know how far it is.
    again = after_death(twice, {"a": _TASK, "b": replace(left, left=(-2, 100))}, 3.0)
    assert {work: one.deaths for work, one in again.items()} == {"a": 2, "b": 1}
    assert after_death(again, {"a": replace(left, left=(-1, 98))}, 4.0)["a"].deaths == 1


def test_a_save_that_is_set_aside_begins_when_all_else_is_stored_and_is_cleared_by_its_commit() -> None:
    play = Play()
    play.announce("fatal", (PART_BYTES,))
    play.announce("other", (PART_BYTES,))
    _start_again(play, fatal=_suspect(2))
    assert {work.save for work in play.in_flight} == {"other"}
    play.finish()
    assert play.state.checkpoints["other"].durable
    assert play.state.checkpoints["fatal"].durable
    assert not play.state.suspects


def test_what_kills_alone_waits_and_what_is_announced_meanwhile_is_stored() -> None:
    play = Play()
    play.announce("fatal", (PART_BYTES,))
    _start_again(play, fatal=_suspect(3, noted_at=play.now))
    assert not play.in_flight
    play.announce("next", (PART_BYTES,))
    play.finish()
    assert play.state.checkpoints["next"].durable
    assert play.state.checkpoints["fatal"].phase is not Phase.COMMITTED
    play.now += 31.0
    play.feed(Ticked(at=play.now))
    assert {work.save for work in play.in_flight} == {"fatal"}


def test_a_new_save_takes_the_turn_of_one_that_is_tried_again() -> None:
    play = Play()
    play.announce("fatal", (PART_BYTES,))
    _start_again(play, fatal=_suspect(2))
    play.answer(WorkId(Operation.RECONCILE, "fatal"))
    play.announce_only("next", (PART_BYTES,))
    assert play.state.checkpoints["fatal"].held_back


def test_an_agent_that_is_told_to_stop_tries_once_and_names_what_it_did_not_store() -> None:
    play = Play()
    play.announce("fatal", (PART_BYTES,))
    _start_again(play, fatal=_suspect(3, noted_at=play.now))
    play.feed(StopRequested(at=play.now, trainers_gone=True))
    assert play.exit is not None
    assert play.exit.code == 75
    (line,) = play.exit.lost
    assert "3 deaths" in line
    assert "keepstep.dev/memory" in line


def test_a_save_that_was_not_read_is_read_when_all_else_is_stored() -> None:
    play = Play()
    play.announce("fatal", (PART_BYTES,))
    events = tuple(play.journal)
    again = Play()
    again.announce("other", (PART_BYTES,))
    _start_again(again, fatal=_suspect(2, doing=READING))
    assert "fatal" not in again.state.checkpoints
    again.unread["fatal"] = events
    again.finish()
    assert again.state.checkpoints["fatal"].durable


def _unread_before_another(events: Sequence[DurableEvent]) -> Play:
    """An agent that left the save `fatal` unread, with these records, and has another that was announced after it."""
    play = Play()
    play.steps["fatal"] = 1
    play.state.leave_unread("fatal")
    play.announce("other", (PART_BYTES,))
    play.unread["fatal"] = tuple(events)
    _start_again(play, fatal=_suspect(2, doing=READING))
    return play


def test_a_save_that_is_read_late_comes_before_those_announced_after_it() -> None:
    first = Play()
    first.announce("fatal", (PART_BYTES,))
    play = _unread_before_another(first.journal)
    play.finish("other")
    play.answer(WorkId(Operation.RECALL, "fatal"))
    assert list(play.state.checkpoints) == ["fatal", "other"]
    newest = play.state.newest()
    assert newest is play.state.checkpoints["other"]
    play.finish()
    assert play.state.checkpoints["fatal"].durable
    assert play.state.last_committed[""] is newest


def test_a_commit_that_is_read_late_is_told_no_second_time() -> None:
    first = Play()
    first.state.settings = _told(first.state.settings)
    first.announce("fatal", (PART_BYTES,))
    first.finish()
    (news,) = [event for event in first.journal if isinstance(event, NewsDue)]
    told = [NewsTaken(at=first.now, save="fatal", receiver=receiver) for receiver in news.receivers]
    play = _unread_before_another([*first.journal, *told])
    play.state.settings = _told(play.state.settings)
    play.finish()
    assert play.state.checkpoints["fatal"].durable
    assert [one.info.save for one in play.state.untold_news.of(Receiver.URL)] == ["other"]


def _told(settings: Settings) -> Settings:
    return replace(settings, events=replace(settings.events, event_url="http://127.0.0.1:1"))


def test_records_that_are_read_late_do_not_tell_that_the_store_is_there() -> None:
    first = Play()
    first.announce("fatal", (PART_BYTES,) * 2)
    first.answer(next(work for work in first.in_flight if work.operation is Operation.PUT_FILE))
    play = _unread_before_another(first.journal)
    play.announce("third", (PART_BYTES,))
    for work in list(play.in_flight):
        play.fail(work)
    assert play.state.breaker.is_open
    play.feed(Recalled(at=play.now, work=WorkId(Operation.RECALL, "fatal"), events=play.unread["fatal"]))
    assert play.state.breaker.is_open
    assert play.state.checkpoints["fatal"].durable_bytes


def test_files_that_were_rewritten_before_others_were_saved_fail_none_of_these() -> None:
    first = Play()
    first.announce("fatal", (PART_BYTES,))
    play = _unread_before_another(first.journal)
    other = play.state.checkpoints["other"]
    files = next(event for event in first.journal if isinstance(event, Staged)).files
    (contribution,) = other.contributions.values()
    assert contribution.files.pinned.inodes != files.inodes
    # The trainer writes the same file again.
    rewritten = tuple(
        replace(event, files=replace(event.files, inodes=contribution.files.pinned.inodes, mtimes_ns=[9]))
        if isinstance(event, Staged)
        else event
        for event in first.journal
    )
    play.unread["fatal"] = rewritten
    play.feed(Recalled(at=play.now, work=WorkId(Operation.RECALL, "fatal"), events=rewritten))
    assert other.phase is not Phase.FAILED


def test_one_that_is_tried_alone_is_tried_to_its_end() -> None:
    play = Play()
    play.announce("larger", (PART_BYTES,) * 2)
    play.announce("smaller", (PART_BYTES,))
    _start_again(play, larger=_suspect(2), smaller=_suspect(3, noted_at=0.0))
    assert {work.save for work in play.in_flight} == {"larger"}
    # By now the other would be the first choice.
    play.state.suspects["larger"] = _suspect(4, noted_at=0.0)
    play.tick()
    assert {work.save for work in play.in_flight} == {"larger"}
    assert not play.state.checkpoints["larger"].held_back
    play.finish()
    assert play.state.checkpoints["smaller"].durable


def test_work_of_no_save_waits_for_all_else_too_and_is_cleared_when_it_ends() -> None:
    play = Play()
    play.announce("other", (PART_BYTES,))
    _start_again(play, **{OUTPUT_DIRECTORIES: _suspect(2)})
    assert not planner.may_begin(play.state, OUTPUT_DIRECTORIES)
    play.finish()
    assert planner.may_begin(play.state, OUTPUT_DIRECTORIES)
    play.feed(Survived(at=play.now, suspect=OUTPUT_DIRECTORIES))
    assert not play.state.suspects
