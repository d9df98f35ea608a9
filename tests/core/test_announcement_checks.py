"""Whether an announcement may enter: refusals change nothing, repetitions are answered as before."""

from dataclasses import replace

import pytest
from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent.announcements import check_announcement, known_announcement, same_content
from keepstep_agent.core.agent.events import Announced, DiskRead, StopRequested, TerminationNoticed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.model import Kind, Phase, SaveInfo


def _announcement(save: str = "save", *, rank: int = 0, world_size: int = 2, local_world_size: int = 2) -> Announced:
    return Announced(
        at=100.0,
        info=SaveInfo(save=save, name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=world_size),
        rank=rank,
        path="/volume/checkpoints/checkpoint-1",
        files=("a",),
        local_world_size=local_world_size,
    )


def _refusal(play: Play, event: Announced) -> ErrorKind:
    with pytest.raises(RequestError) as refused:
        check_announcement(play.state, event)
    assert refused.value.hint
    return refused.value.kind


def test_a_first_announcement_is_news() -> None:
    play, event = Play(), _announcement()
    check_announcement(play.state, event)
    assert known_announcement(play.state, event) is None


def test_the_same_announcement_again_is_known_and_no_error() -> None:
    play, event = Play(), _announcement()
    play.feed(event)
    check_announcement(play.state, event)
    assert known_announcement(play.state, event) is play.state.checkpoints["save"]


def test_another_rank_of_a_known_save_is_news() -> None:
    play = Play()
    play.feed(_announcement(rank=0))
    event = _announcement(rank=1)
    check_announcement(play.state, event)
    assert known_announcement(play.state, event) is None


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (replace(_announcement(), rank=2), ErrorKind.BAD_REQUEST),
        (replace(_announcement(), rank=-1), ErrorKind.BAD_REQUEST),
        (replace(_announcement(), local_world_size=3), ErrorKind.BAD_REQUEST),
        (replace(_announcement(), files=("../escape",)), ErrorKind.BAD_NAME),
        (replace(_announcement(), others=("../escape",)), ErrorKind.BAD_NAME),
        (replace(_announcement(), files=(), others=("train.log",)), ErrorKind.BAD_REQUEST),
        (replace(_announcement(), info=replace(_announcement().info, name="a/b")), ErrorKind.BAD_NAME),
        (replace(_announcement(), info=replace(_announcement().info, save="")), ErrorKind.BAD_NAME),
    ],
)
def test_what_makes_no_sense_is_refused(event: Announced, kind: ErrorKind) -> None:
    assert _refusal(Play(), event) is kind


@pytest.mark.parametrize(
    "event",
    [
        replace(_announcement(), info=replace(_announcement().info, step=2)),
        replace(_announcement(), info=replace(_announcement().info, world_size=4)),
        replace(_announcement(), path="/volume/checkpoints/other"),
    ],
)
def test_what_contradicts_an_earlier_rank_is_refused(event: Announced) -> None:
    play = Play()
    play.feed(_announcement())
    assert _refusal(play, event) is ErrorKind.CONTRADICTION


def test_a_rank_that_a_committed_save_does_not_have_is_refused() -> None:
    play = Play()
    play.announce("save", world_size=2)
    play.finish()
    assert _refusal(play, _announcement(rank=1)) is ErrorKind.CONTRADICTION


def test_a_save_that_failed_before_a_byte_was_sent_may_be_announced_again() -> None:
    play, event = Play(), _announcement(local_world_size=1)
    play.feed(event)
    play.fail(WorkId(Operation.STAGE, "save", 0), ErrorKind.FILE_MISSING)
    assert play.phase("save") is Phase.FAILED
    check_announcement(play.state, event)
    assert known_announcement(play.state, event) is None
    play.feed(event)
    # What the first try may have pinned goes first, then the second try pins anew.
    assert list(play.in_flight) == [WorkId(Operation.RELEASE, "save")]
    play.answer(WorkId(Operation.RELEASE, "save"))
    assert list(play.in_flight) == [WorkId(Operation.STAGE, "save", 0)]


def test_a_save_of_which_something_was_sent_is_never_announced_again_with_other_bytes() -> None:
    play = Play()
    play.announce("save")
    play.fail(WorkId(Operation.PUT_FILE, "save", 0, "r0-0"), ErrorKind.FILE_CHANGED)
    assert play.phase("save") is Phase.FAILED
    assert _refusal(play, _announcement(world_size=1, local_world_size=1)) is ErrorKind.CONTRADICTION


def test_a_late_rank_of_a_save_that_was_given_up_is_no_error() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES,) * 3, world_size=2)
    play.announce("wire", (PART_BYTES,) * 3)
    play.announce("newest", (PART_BYTES,) * 3)
    play.feed(DiskRead(at=play.now, used_bytes=0, free_bytes=0, total_bytes=1))
    assert play.phase("save") is Phase.SHED
    event = _announcement(rank=1, local_world_size=1)
    check_announcement(play.state, event)
    assert known_announcement(play.state, event) is play.state.checkpoints["save"]


def test_an_agent_that_exits_takes_nothing_more() -> None:
    play = Play()
    play.feed(TerminationNoticed(at=play.now, deadline=None, source="test"))
    play.feed(StopRequested(at=play.now, trainers_gone=True))
    assert _refusal(play, _announcement()) is ErrorKind.SHUTTING_DOWN


def test_the_same_content_of_a_path_is_one_checkpoint_for_clients_without_a_save_id() -> None:
    play = Play()
    event = replace(_announcement(), signature="digest")
    play.feed(event)
    found = same_content(play.state, path=event.path, rank=0, signature="digest")
    assert found is play.state.checkpoints["save"]
    assert same_content(play.state, path=event.path, rank=0, signature="other") is None
    assert same_content(play.state, path="/volume/other", rank=0, signature="digest") is None
