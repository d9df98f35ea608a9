"""Work that does not succeed for a reason of its own is tried last, and no drain waits for it for ever."""

from collections.abc import Callable
from random import Random

import pytest
from tests.core.play import PART_BYTES, Play
from tests.core.pod_end import notice, ranks_alive, stop

from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.commands import CancelWork
from keepstep_agent.core.agent.events import CommitWaits, ObjectsLost, Shed, WorkFailed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import RETRYABLE, ErrorKind
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.runtime.engine.status import describe
from keepstep_api.names import NOT_DURABLE_EXIT_CODE

REFUSED = "PutObject: 400 InvalidStorageClass"
HINT = "correct --storage-class"


def refuse(play: Play, work: WorkId, kind: ErrorKind = ErrorKind.REQUEST_REFUSED) -> None:
    del play.in_flight[work]
    play.feed(WorkFailed(at=play.now, work=work, kind=kind, message=REFUSED, hint=HINT, jitter=0.0))


def play_on(
    play: Play,
    is_refused: Callable[[WorkId], bool],
    kind: ErrorKind = ErrorKind.REQUEST_REFUSED,
    *,
    seconds: float = 1e5,
) -> None:
    """For so long, or until the agent leaves or has nothing to do: some work is refused, and all other succeeds."""
    until = play.now + seconds
    while play.exit is None and play.now < until:
        for work in list(play.in_flight):
            if work in play.in_flight:
                refuse(play, work, kind) if is_refused(work) else play.answer(work)
        if play.in_flight or play.exit is not None:
            continue
        if planner.next_wake(play.state) is None:
            return
        play.wait_until(lambda: bool(play.in_flight) or play.exit is not None or play.now >= until)


def sends(save: str, path: str = "") -> Callable[[WorkId], bool]:
    return lambda work: work.save == save and work.operation is Operation.PUT_FILE and path in work.path


def test_a_checkpoint_with_a_file_that_the_store_refuses_is_tried_last() -> None:
    play = Play(max_concurrency=1)
    play.announce("old", (PART_BYTES,) * 2)
    play.announce("new", (PART_BYTES,) * 2)
    play_on(play, sends("new"), seconds=5.0)
    assert play.phase("new") is Phase.UPLOADING
    assert play.phase("old") is Phase.RELEASED
    row = describe(play.state, play.now).checkpoints[0]
    assert row.reason == f"{REFUSED} ({HINT})"


def test_what_is_accepted_after_all_is_taken_up_again() -> None:
    play = Play()
    play.announce("save", (PART_BYTES,) * 2)
    play_on(play, sends("save"), seconds=5.0)
    assert play.state.checkpoints["save"].set_aside
    play_on(play, lambda work: False, seconds=60.0)
    assert play.phase("save") is Phase.RELEASED
    assert not play.state.set_aside


@pytest.mark.parametrize("kind", [ErrorKind.UNREACHABLE, ErrorKind.TIMED_OUT, ErrorKind.STORE_FAILED])
def test_an_outage_sets_nothing_aside(kind: ErrorKind) -> None:
    play = Play()
    play.announce("old")
    play.announce("new", (PART_BYTES,) * 2)
    play_on(play, lambda work: True, kind, seconds=300.0)
    assert not play.state.set_aside
    assert play.state.breaker.is_open


@pytest.mark.parametrize("kind", [ErrorKind.STORE_FAILED, ErrorKind.CORRUPTED_IN_TRANSIT])
@pytest.mark.parametrize("files", [1, 3])
def test_an_object_with_which_the_store_fails_again_and_again_is_tried_last(kind: ErrorKind, files: int) -> None:
    play = Play()
    play.announce("broken", (PART_BYTES,) * files)
    play_on(play, sends("broken", "r0-0"), kind, seconds=90.0)
    assert play.state.set_aside.keys() == {"broken"}
    assert not play.state.breaker.is_open
    play.announce("next", (PART_BYTES,) * files)
    play_on(play, sends("broken", "r0-0"), kind, seconds=90.0)
    assert play.phase("next") is Phase.RELEASED


ANSWERLESS = [ErrorKind.UNREACHABLE, ErrorKind.TIMED_OUT]


@pytest.mark.parametrize("kind", ANSWERLESS)
def test_an_object_at_which_every_connection_ends_is_tried_last(kind: ErrorKind) -> None:
    """Nothing else is to be sent, so the store is asked whether it answers at all."""
    play = Play()
    play.announce("broken", (PART_BYTES,))
    play_on(play, sends("broken", "r0-0"), kind, seconds=120.0)
    assert play.state.set_aside.keys() == {"broken"}
    play.announce("next", (PART_BYTES,))
    play_on(play, sends("broken", "r0-0"), kind, seconds=300.0)
    assert play.phase("next") is Phase.RELEASED
    play_on(play, lambda work: False, seconds=60.0)
    assert play.phase("broken") is Phase.RELEASED


@pytest.mark.parametrize("kind", ANSWERLESS)
def test_an_object_that_the_store_takes_at_last_was_never_set_aside(kind: ErrorKind) -> None:
    play = Play()
    play.announce("slow", (PART_BYTES,) * 2)
    tries: list[WorkId] = []

    def fails_at_first(work: WorkId) -> bool:
        if sends("slow", "r0-0")(work):
            tries.append(work)
        return sends("slow", "r0-0")(work) and len(tries) < 8

    play_on(play, fails_at_first, kind, seconds=300.0)
    assert play.phase("slow") is Phase.RELEASED
    assert not play.state.set_aside


@pytest.mark.parametrize("is_sent", [Operation.SEND_PART, Operation.COMPLETE_UPLOAD, Operation.CREATE_UPLOAD])
def test_a_large_file_of_which_no_part_gets_through_is_tried_last(is_sent: Operation) -> None:
    play = Play(max_concurrency=8)
    play.announce("broken", (20 * PART_BYTES,))
    play_on(play, lambda work: work.operation is is_sent, ErrorKind.UNREACHABLE, seconds=1200.0)
    assert play.state.set_aside.keys() == {"broken"}


@pytest.mark.parametrize("kind", [*ANSWERLESS, ErrorKind.THROTTLED])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_network_that_loses_most_requests_sets_nothing_aside(kind: ErrorKind, share: float) -> None:
    random = Random(7)
    play = Play(max_concurrency=8)
    for save in ("first", "second", "third"):
        play.announce(save, (PART_BYTES,) * 50)
    play_on(play, lambda work: random.random() < share, kind, seconds=3600.0)
    assert not play.state.set_aside
    assert {play.phase(save) for save in ("first", "second", "third")} == {Phase.RELEASED}


def test_no_last_save_is_set_aside_for_want_of_an_answer() -> None:
    play = Play()
    ranks_alive(play, 0)
    notice(play, grace_seconds=600)
    play.announce("last", (PART_BYTES,), kind=Kind.JUST_IN_TIME)
    play_on(play, sends("last", "r0-0"), ErrorKind.UNREACHABLE, seconds=500.0)
    assert not play.state.set_aside


@pytest.mark.parametrize("answers", [1, 5])
def test_an_outage_that_begins_with_one_object_left_sets_nothing_aside(answers: int) -> None:
    """As many other requests as may be had succeeded before it began."""
    play = Play()
    play.announce("last", (PART_BYTES,) * (1 + answers))
    play_on(play, sends("last", "r0-0"), ErrorKind.UNREACHABLE, seconds=1.0)
    play_on(play, lambda work: True, ErrorKind.UNREACHABLE, seconds=600.0)
    assert not play.state.set_aside


def test_a_pin_that_waits_to_be_dropped_does_not_wait_for_an_answer() -> None:
    play = Play()
    play.announce("old", (PART_BYTES,))
    ask = WorkId(Operation.ASK, "old")
    for _ in range(3):
        play.wait_until(lambda: any(map(sends("old"), play.in_flight)))
        play.fail(next(filter(sends("old"), play.in_flight)), ErrorKind.UNREACHABLE)
    assert ask in play.in_flight
    commands = play.feed(Shed(at=play.now, save="old", reason="superseded"))
    assert CancelWork(work=ask) in commands
    play.cancel(ask)
    assert WorkId(Operation.RELEASE, "old") in play.in_flight


def test_an_upload_that_is_lost_once_after_an_outage_says_nothing_of_its_file() -> None:
    play = Play()
    play.announce("large", (20 * PART_BYTES,))
    play_on(play, lambda work: True, ErrorKind.UNREACHABLE, seconds=300.0)
    lost: list[WorkId] = []

    def loses_one(work: WorkId) -> bool:
        if work.operation is Operation.COMPLETE_UPLOAD:
            lost.append(work)
        return lost == [work]

    play_on(play, loses_one, ErrorKind.UPLOAD_LOST, seconds=600.0)
    assert play.phase("large") is Phase.RELEASED
    assert not play.state.set_aside


def test_an_exit_does_not_wait_for_the_answer_to_a_doubt() -> None:
    play = Play()
    play.announce("old", (PART_BYTES,))
    for _ in range(3):
        play.wait_until(lambda: any(map(sends("old"), play.in_flight)))
        play.fail(next(filter(sends("old"), play.in_flight)), ErrorKind.UNREACHABLE)
    assert WorkId(Operation.ASK, "old") in play.in_flight
    play.feed(Shed(at=play.now, save="old", reason="superseded"))
    stop(play)
    play.wait_until(lambda: play.exit is not None)


def test_a_store_that_forgets_every_upload_of_a_file_costs_that_file_alone() -> None:
    play = Play()
    play.announce("lost", (20 * PART_BYTES,))
    play_on(play, lambda work: work.operation is Operation.COMPLETE_UPLOAD, ErrorKind.UPLOAD_LOST, seconds=300.0)
    assert play.state.set_aside.keys() == {"lost"}


def test_a_last_save_that_is_refused_leaves_the_wire_to_the_others() -> None:
    """Its every try would cancel what they send, which takes three seconds here."""
    play = Play()
    ranks_alive(play, 0)
    play.announce("before", (PART_BYTES,))
    notice(play, grace_seconds=60)
    play.announce("last", (PART_BYTES,), kind=Kind.JUST_IN_TIME)
    sending_since: dict[WorkId, float] = {}
    for _ in range(40):
        play.now += 0.5
        play.tick()
        for work in list(play.state.cancelling):
            play.cancel(work)
        for work in [work for work in play.in_flight if work.save == "last"]:
            refuse(play, work, ErrorKind.ACCESS_DENIED)
        sending_since = {work: sending_since.get(work, play.now) for work in play.in_flight}
        for work, since in sending_since.items():
            if work.operation is not Operation.PUT_FILE or play.now - since >= 3:
                play.answer(work)
    assert play.phase("before") is Phase.RELEASED
    assert play.phase("last") is Phase.UPLOADING


def test_one_that_is_set_aside_is_given_up_when_a_newer_one_was_committed_for_long() -> None:
    play = Play()
    play.announce("broken", (PART_BYTES,))
    play_on(play, sends("broken"), ErrorKind.VOLUME_UNUSABLE, seconds=60.0)
    play.announce("next", (PART_BYTES,))
    play_on(play, sends("broken"), ErrorKind.VOLUME_UNUSABLE, seconds=900.0)
    assert [(event.save, event.reason) for event in play.journal if isinstance(event, Shed)] == [
        ("broken", f"superseded, and {REFUSED} ({HINT})")
    ]
    stop(play, trainers_gone=True)
    play.finish()
    assert play.exit is not None
    assert play.exit.code == 0


@pytest.mark.parametrize("kind", sorted(RETRYABLE))
@pytest.mark.parametrize(
    "operation", [Operation.PUT_FILE, Operation.CHECK_SENT, Operation.WRITE_MANIFEST, Operation.COMMIT]
)
def test_a_drain_without_a_deadline_ends_whatever_fails_for_ever(kind: ErrorKind, operation: Operation) -> None:
    play = Play()
    play.announce("save", (PART_BYTES,))
    stop(play, trainers_gone=True)
    ended_at = play.now
    play_on(play, lambda work: work.operation is operation, kind)
    assert play.exit is not None
    assert play.exit.code == NOT_DURABLE_EXIT_CODE
    assert play.now <= ended_at + play.state.settings.termination.drain_timeout_seconds + 1
    (line,) = play.exit.lost
    assert REFUSED in line
    assert HINT in line


def test_a_drain_waits_ten_seconds_for_what_is_refused_and_stores_everything_else() -> None:
    play = Play(max_concurrency=1)
    for number in range(4):
        play.announce(f"save{number}", (PART_BYTES,) * 3)
    stop(play, trainers_gone=True)
    ended_at = play.now
    play_on(play, sends("save2", "r0-1"), ErrorKind.ACCESS_DENIED)
    assert play.exit is not None
    assert play.exit.lost[0].startswith("checkpoint-3 ")
    assert len(play.exit.lost) == 1
    assert play.now <= ended_at + 30


def test_a_drain_ends_although_a_store_loses_every_upload_at_its_end() -> None:
    """Parts are stored again and again, which gets nothing further."""
    play = Play()
    play.announce("save", (3 * PART_BYTES,))
    stop(play, trainers_gone=True)
    ended_at = play.now
    play_on(play, lambda work: work.operation is Operation.COMPLETE_UPLOAD, ErrorKind.UPLOAD_LOST)
    assert play.exit is not None
    assert play.now <= ended_at + play.state.settings.termination.drain_timeout_seconds + 11


def test_a_drain_does_not_wait_for_ever_for_agents_that_never_seal() -> None:
    play = Play()
    play.announce("save", world_size=2)
    stop(play, trainers_gone=True)
    ended_at = play.now
    while play.exit is None and play.now < ended_at + 1e5:
        for work in list(play.in_flight):
            if work.operation is Operation.COMMIT:
                del play.in_flight[work]
                play.feed(CommitWaits(at=play.now, work=work, missing_ranks=1))
            else:
                play.answer(work)
        if play.exit is None and not play.in_flight:
            play.wait_until(lambda: bool(play.in_flight) or play.exit is not None)
    assert play.exit is not None
    assert play.now <= ended_at + 3601


def test_a_drain_ends_although_a_store_takes_everything_and_keeps_nothing() -> None:
    play = Play()
    play.announce("save", (PART_BYTES,))
    stop(play, trainers_gone=True)
    ended_at = play.now
    while play.exit is None and play.now < ended_at + 1e4:
        play.now += 1.0
        for work in list(play.in_flight):
            if work.operation is Operation.COMMIT:
                del play.in_flight[work]
                play.feed(ObjectsLost(at=play.now, work=work, files=((0, "r0-0"),)))
            else:
                play.answer(work)
        play.tick()
    assert play.exit is not None
    assert play.exit.code == NOT_DURABLE_EXIT_CODE
    assert play.now <= ended_at + play.state.settings.termination.drain_timeout_seconds + 10
