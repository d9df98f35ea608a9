"""How the outside is told: again and again until it is taken, with one line for each kind of problem."""

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs
from tests.harness.bounds import HANG_SECONDS
from tests.runtime.patience import until

from keepstep_agent.core.errors import ClusterError, ErrorKind
from keepstep_agent.runtime.outside import outbox
from keepstep_agent.runtime.outside.outbox import Outbox, Pace, last_words

PACE = Pace(between_seconds=7.0, shortest_pause_seconds=1.0, longest_pause_seconds=5.0)


def refused(number: int) -> ClusterError:
    return ClusterError(ErrorKind.ACCESS_DENIED, f"events/{number} may not be written", hint="a Role")


class Telling:
    """A sender whose tries end as told, and then in success."""

    to = "somebody"

    def __init__(self, ends: Sequence[Exception | None]) -> None:
        self._ends = list(ends)

    async def until_due(self) -> None:
        if not self._ends:
            await asyncio.Event().wait()

    async def send(self) -> None:
        if (end := self._ends.pop(0)) is not None:
            raise end

    @property
    def is_done(self) -> bool:
        return not self._ends


async def pauses(telling: Telling, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Between all its tries."""
    taken: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        taken.append(seconds)
        await sleep(0)

    with monkeypatch.context() as patching:
        patching.setattr(asyncio, "sleep", pause)
        running = asyncio.create_task(Outbox(telling, PACE).run())
        async with asyncio.timeout(HANG_SECONDS):
            while not telling.is_done:
                await sleep(0)
            await sleep(0)
        running.cancel()
        await asyncio.wait({running})
    return taken


async def test_a_pause_doubles_up_to_the_longest_and_begins_anew_after_a_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    telling = Telling([*(refused(number) for number in range(5)), None, refused(5), None])
    assert await pauses(telling, monkeypatch) == [1.0, 2.0, 4.0, 5.0, 5.0, 7.0, 1.0, 7.0]


async def test_a_kind_of_problem_is_said_once_whatever_its_text_and_once_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = ClusterError(ErrorKind.UNREACHABLE, "it is away")
    with capture_logs() as lines:
        await pauses(Telling([refused(1), refused(2), refused(3), away, None, refused(4), None]), monkeypatch)
    events = ["not_taken", "not_taken", "taken_again", "not_taken", "taken_again"]
    assert [line["event"] for line in lines] == [f"outbox.{event}" for event in events]
    assert (lines[0]["to"], lines[0]["error"], lines[0]["hint"]) == (
        "somebody",
        "events/1 may not be written",
        "a Role",
    )


async def test_a_receiver_that_does_not_answer_in_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as lines:
        await pauses(Telling([TimeoutError(), TimeoutError(), None]), monkeypatch)
    assert [line["event"] for line in lines] == ["outbox.not_taken", "outbox.taken_again"]
    assert lines[0]["error"] == "no answer in time"


@pytest.mark.parametrize("trouble", ["deaf", "failing"])
async def test_last_words_give_up_and_say_so(monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    monkeypatch.setattr(outbox, "_LAST_SECONDS_IN_A_HURRY", 0.01)

    async def send() -> None:
        if trouble == "failing":
            raise RuntimeError("a bug")
        await asyncio.Event().wait()

    with capture_logs() as lines:
        saying = asyncio.create_task(last_words("somebody", send, in_a_hurry=True))
        await until(saying.done)
    assert [(line["event"], line["to"]) for line in lines] == [("outbox.left", "somebody")]
    assert lines[0]["error"] == {"deaf": "no time left", "failing": "a bug"}[trouble]
