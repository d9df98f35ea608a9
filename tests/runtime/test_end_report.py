"""What the agent says the moment it knows that the pod ends, and once per save that it gives no leave."""

import pytest
from structlog.testing import capture_logs
from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent.events import RanksSeen, TerminationNoticed
from keepstep_agent.core.agent.work import Operation
from keepstep_agent.core.model import Kind
from keepstep_agent.runtime.engine.telemetry import RefusalLog
from keepstep_agent.runtime.monitors.monitors import say_what_is_open


def _said(play: Play, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, object], list[str]]:
    with capture_logs() as logs:
        say_what_is_open(play.state, "SIGTERM", play.now)
    (line,) = logs
    return dict(line), capsys.readouterr().err.splitlines()


def test_what_is_open_is_said_with_its_bytes_its_time_and_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    play = Play()
    play.announce("older", (PART_BYTES,))
    play.announce("newest", (4 * PART_BYTES,))
    play.answer(next(work for work in play.in_flight if work.operation is Operation.CREATE_UPLOAD))
    play.now += 2
    play.answer(next(work for work in play.in_flight if work.operation is Operation.SEND_PART))
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="SIGTERM"))
    line, said = _said(play, capsys)
    assert (line["event"], line["not_durable"], line["seconds_left"]) == ("termination.open", 2, 30.0)
    assert line["remaining_bytes"] == 4 * PART_BYTES
    assert line["seconds_needed"] == pytest.approx(4 * PART_BYTES / play.state.upload_rate.bytes_per_second, abs=0.1)
    assert said[0].startswith("keepstep: SIGTERM: 30.0 s until SIGKILL")
    assert "checkpoint-2 (step 2, periodic)" in said[1]
    assert f"{3 * PART_BYTES} of {4 * PART_BYTES} bytes left" in said[1]
    assert "checkpoint-1 (step 1, periodic)" in said[2]


def test_with_nothing_open_only_the_log_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    play = Play()
    play.announce("save")
    play.finish()
    line, said = _said(play, capsys)
    assert (line["not_durable"], line["awaits_save"], said) == (0, False, [])


def test_trainers_that_still_owe_their_last_save_are_waited_for_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    play = Play()
    play.feed(RanksSeen(at=play.now, alive=frozenset({0})))
    play.feed(TerminationNoticed(at=play.now, deadline=None, source="SIGTERM"))
    line, said = _said(play, capsys)
    assert line["awaits_save"] is True
    assert said == [
        "keepstep: SIGTERM: no deadline; not durable yet: 0 checkpoints, 0 bytes; waiting for the trainers' last save"
    ]


def test_of_thousands_only_the_newest_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    play = Play()
    for number in range(100):
        play.announce(f"s{number}")
    _, said = _said(play, capsys)
    assert len(said) == 12
    assert said[-1] == "keepstep: open: and 90 older ones"


def test_a_save_that_is_refused_again_and_again_is_one_line() -> None:
    refusals = RefusalLog()
    with capture_logs() as logs:
        for _ in range(20):
            refusals.refused("attempt", 100, Kind.PERIODIC, "no room")
        refusals.refused("attempt", 200, Kind.PERIODIC, "no room")
    assert [(line["event"], line["step"]) for line in logs] == [("save.refused", 100), ("save.refused", 200)]
