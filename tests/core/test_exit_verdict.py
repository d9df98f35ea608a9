"""What an agent says at its exit: is all stored, which step is not, and did the trainers leave for a save?"""

import pytest
from tests.core.play import Play
from tests.core.pod_end import notice, ranks_alive, stop

from keepstep_agent.core.agent import drain
from keepstep_agent.core.agent.commands import Exit
from keepstep_agent.core.agent.events import RanksSeen, StepSeen
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.progress import StepSign
from keepstep_agent.core.policies.run_exit import Drained, run_exit_code
from keepstep_api.names import NOT_DURABLE_EXIT_CODE


def training_at(step: int) -> Play:
    play = Play()
    ranks_alive(play, 0)
    play.feed(StepSeen(at=play.now, newest=StepSign(at=play.now, step=step)))
    return play


def dies(play: Play, *, at: int | None) -> None:
    """`at`: what its step file says; None if it had ended its training."""
    sign = None if at is None else StepSign(at=play.now, step=at)
    play.feed(RanksSeen(at=play.now, alive=frozenset(), cut_short=sign))
    play.feed(StepSeen(at=play.now, newest=None))


def end(play: Play) -> Exit:
    stop(play, trainers_gone=True)
    play.finish()
    assert play.exit is not None
    return play.exit


def test_a_rank_that_dies_after_the_notice_without_a_save_leaves_its_step_unsaved() -> None:
    play = training_at(37)
    play.announce("before")
    play.finish()
    notice(play)
    dies(play, at=37)
    assert end(play).code == NOT_DURABLE_EXIT_CODE
    assert play.exit is not None
    assert play.exit.lost == (
        "step 37 or later: the trainers were asked to save it and did not; they announced step 1 last",
    )


def test_a_rank_that_hangs_leaves_its_step_unsaved() -> None:
    play = training_at(37)
    notice(play)
    said = end(play)
    assert said.code == NOT_DURABLE_EXIT_CODE
    assert "step 37" in said.lost[0]
    assert "nothing" in said.lost[0]


@pytest.mark.parametrize("at", [None, 1])
def test_a_rank_that_ends_its_training_or_whose_step_is_saved_leaves_nothing_unsaved(at: int | None) -> None:
    play = training_at(1)
    play.announce("before")
    play.finish()
    notice(play)
    dies(play, at=at)
    assert end(play) == Exit(code=0, lost=())


def test_a_rank_that_died_before_the_notice_was_asked_for_nothing() -> None:
    play = training_at(37)
    dies(play, at=37)
    notice(play)
    assert end(play) == Exit(code=0, lost=())


def test_a_rank_that_died_long_after_its_last_sign_may_have_gone_on_after_its_last_save() -> None:
    play = training_at(1)
    sign = StepSign(at=play.now, step=1)
    play.now += 5
    play.announce("before")
    play.finish()
    notice(play)
    play.feed(RanksSeen(at=play.now, alive=frozenset(), cut_short=sign))
    assert end(play).code == NOT_DURABLE_EXIT_CODE


def test_a_just_in_time_save_that_an_earlier_life_has_left_unannounced_is_none_of_this_one() -> None:
    """The agent finds its record when it starts, and announces it."""
    play = Play()
    play.steps["left"], play.recorded_at["left"] = 40, play.now - 60
    play.announce("left", kind=Kind.JUST_IN_TIME)
    play.finish()
    ranks_alive(play, 0)
    play.feed(StepSeen(at=play.now, newest=StepSign(at=play.now, step=50)))
    notice(play)
    assert drain.waiting_for_save(play.state)
    dies(play, at=50)
    assert end(play).code == NOT_DURABLE_EXIT_CODE
    assert play.exit is not None
    assert not play.exit.stopped


def test_trainers_that_leave_for_the_notice_of_another_node_have_left() -> None:
    play = training_at(1)
    play.announce("last", kind=Kind.JUST_IN_TIME)
    play.feed(RanksSeen(at=play.now, alive=frozenset(), left=True))
    assert end(play) == Exit(code=0, lost=(), stopped=True)


def test_what_trainers_have_lost_that_were_started_again_is_past() -> None:
    play = training_at(50)
    play.feed(RanksSeen(at=play.now, alive=frozenset(), left=True, lost_at=50))
    ranks_alive(play, 0)
    play.announce("last", kind=Kind.FINAL)
    play.feed(RanksSeen(at=play.now, alive=frozenset()))
    assert end(play) == Exit(code=0, lost=())


def test_a_save_from_before_the_first_look_at_the_steps_counts() -> None:
    """A short program: the agent looks at its steps once it is gone, and is told to end at once."""
    play = Play()
    ranks_alive(play, 0)
    play.announce("only")
    play.finish()
    play.feed(StepSeen(at=play.now, newest=StepSign(at=play.now, step=1)))
    notice(play)
    dies(play, at=1)
    assert end(play) == Exit(code=0, lost=())


def test_a_rank_that_leaves_with_a_loss_has_lost_its_step_whatever_was_saved_before() -> None:
    """A training before this one, in the same process, has made more steps and its final save."""
    play = training_at(1)
    play.steps["first"] = 1000
    play.announce("first", kind=Kind.FINAL)
    play.finish()
    notice(play)
    play.feed(RanksSeen(at=play.now, alive=frozenset(), left=True, lost_at=50))
    assert end(play) == Exit(code=75, lost=("step 50: the trainers left without a save of it",), stopped=True)


def test_what_an_earlier_training_of_the_process_has_saved_is_no_save_of_this_ones_steps() -> None:
    play = training_at(1000)
    play.steps["first"] = 1000
    play.announce("first", kind=Kind.FINAL)
    play.finish()
    play.feed(StepSeen(at=play.now, newest=StepSign(at=play.now, step=50)))
    notice(play)
    dies(play, at=50)
    assert end(play).code == NOT_DURABLE_EXIT_CODE


@pytest.mark.parametrize(("kind", "stopped"), [(Kind.JUST_IN_TIME, True), (Kind.FINAL, False), (Kind.PERIODIC, False)])
def test_only_a_just_in_time_save_says_that_training_was_left(kind: Kind, stopped: bool) -> None:
    play = training_at(1)
    notice(play)
    play.announce("last", kind=kind)
    dies(play, at=None)
    assert end(play) == Exit(code=0, lost=(), stopped=stopped)


@pytest.mark.parametrize(
    ("program_code", "drained", "noticed", "code"),
    [
        (0, Drained.STORED, False, 0),
        (0, Drained.STORED, True, 0),
        (0, Drained.STOPPED, True, 143),
        (0, Drained.STOPPED, False, 143),
        (0, Drained.NOT_STORED, False, 75),
        (1, Drained.STORED, False, 1),
        (1, Drained.STORED, True, 143),
        (1, Drained.STOPPED, False, 143),
        (1, Drained.NOT_STORED, False, 1),
        (1, Drained.NOT_STORED, True, 75),
        (1, Drained.STOPPED_NOT_STORED, False, 75),
        (0, Drained.STOPPED_NOT_STORED, False, 75),
        (143, Drained.STORED, False, 143),
        (143, Drained.NOT_STORED, False, 75),
        (75, Drained.STORED, False, 75),
        (75, Drained.STORED, True, 75),
        (75, Drained.STOPPED, True, 143),
        (137, Drained.NOT_STORED, True, 75),
    ],
)
def test_the_exit_code_of_a_run(program_code: int, drained: Drained, noticed: bool, code: int) -> None:
    assert run_exit_code(program_code=program_code, drained=drained, noticed=noticed) == code


def test_a_program_that_was_ended_because_it_was_stuck_has_the_code_of_that() -> None:
    assert run_exit_code(program_code=143, drained=Drained.STOPPED, noticed=True, stuck_code=77) == 77
