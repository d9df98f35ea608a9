"""What the agent makes of the step files: of live ranks alone, bounded, and by its own clock."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs
from tests.core.play import settings
from tests.harness.trainer_process import TrainerProcess

from keepstep_agent.adapters.liveness import RankLocks
from keepstep_agent.core.agent.events import Event
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.policies.progress import StepSign
from keepstep_agent.core.settings.values import Duration, ProgressSettings
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.monitors.progress import StepWatch
from keepstep_agent.runtime.monitors.ranks import LiveRanks, RanksLook
from keepstep_api.names import RANKS_DIRECTORY, STATE_DIRECTORY
from keepstep_api.step_file import StepRecord, encode

NOW_UNIX = 1_700_000_000.0
TIMEOUT_SECONDS = 1800.0
CALM_SECONDS = 10.0


def write_step(volume: Path, local_rank: int, step: int, at_unix: float) -> Path:
    path = volume / STATE_DIRECTORY / RANKS_DIRECTORY / f"{local_rank}.step"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(StepRecord(step=step, at_unix=at_unix)))
    return path


def look(volume: Path) -> RanksLook:
    return LiveRanks(RankLocks(volume), lambda: NOW_UNIX).look()


def test_only_live_ranks_tell_steps_and_the_newest_sign_counts(tmp_path: Path) -> None:
    write_step(tmp_path, 0, 40, NOW_UNIX - 30)
    write_step(tmp_path, 1, 41, NOW_UNIX - 5)
    write_step(tmp_path, 2, 99, NOW_UNIX)
    with TrainerProcess(tmp_path, local_rank=0), TrainerProcess(tmp_path, local_rank=1) as other:
        found = look(tmp_path)
        assert found.alive == {0, 1}
        assert found.newest == StepRecord(step=41, at_unix=NOW_UNIX - 5)
        assert found.age_seconds == pytest.approx(5)
        other.die()
        assert look(tmp_path).newest == StepRecord(step=40, at_unix=NOW_UNIX - 30)
    assert look(tmp_path).newest is None


def test_a_step_from_before_a_program_attached_is_not_its_own(tmp_path: Path) -> None:
    ranks = LiveRanks(RankLocks(tmp_path), lambda: NOW_UNIX)
    write_step(tmp_path, 0, 40, NOW_UNIX - 1)
    with ranks.attached(0):
        assert ranks.look().newest is None
        write_step(tmp_path, 0, 41, NOW_UNIX + 1)
        assert ranks.look().newest == StepRecord(step=41, at_unix=NOW_UNIX + 1)


@pytest.mark.parametrize("at_unix", [NOW_UNIX - 10**8, NOW_UNIX + 10**8, 0.0])
def test_a_moment_that_makes_no_sense_is_ignored(tmp_path: Path, at_unix: float) -> None:
    write_step(tmp_path, 0, 40, at_unix)
    with TrainerProcess(tmp_path):
        assert look(tmp_path).newest is None


@pytest.mark.parametrize("what", ["a link", "a pipe", "a folder", "too much", "noise"])
def test_anything_else_in_place_of_a_step_file_says_nothing(tmp_path: Path, what: str) -> None:
    path = write_step(tmp_path, 0, 40, NOW_UNIX)
    elsewhere = path.rename(tmp_path / "elsewhere")
    match what:
        case "a link":
            path.symlink_to(elsewhere)
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "too much":
            path.write_bytes(elsewhere.read_bytes() + b"\n")
        case _:
            path.write_bytes(b"\xff" * 32)
    with TrainerProcess(tmp_path):
        assert look(tmp_path) == RanksLook(alive=frozenset({0}), newest=None, age_seconds=0.0)


@dataclass
class Watched:
    """A StepWatch, with an engine that applies its events at once and a clock that a test moves."""

    state: State = field(
        default_factory=lambda: State(
            settings=replace(settings(), progress=ProgressSettings(step_timeout=Duration(TIMEOUT_SECONDS)))
        )
    )
    seconds: float = 1000.0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = StepWatch(cast(Engine, self), self)

    def now(self) -> float:
        return self.seconds

    async def submit(self, event: Event) -> None:
        self.events.append(event)
        advance(self.state, event)

    async def look(self, newest: StepRecord | None, age_seconds: float = 0.0) -> None:
        await self.watch.take(RanksLook(alive=frozenset({0}), newest=newest, age_seconds=age_seconds))


def record(step: int, at_unix: float = NOW_UNIX) -> StepRecord:
    return StepRecord(step=step, at_unix=at_unix)


async def test_a_look_that_finds_nothing_new_is_no_event() -> None:
    watched = Watched()
    await watched.look(None)
    await watched.look(record(1))
    watched.seconds += CALM_SECONDS
    await watched.look(record(1), age_seconds=CALM_SECONDS)
    assert len(watched.events) == 1


async def test_stuck_trainers_are_said_once_and_so_is_that_they_go_on() -> None:
    watched = Watched()
    await watched.look(record(41))
    with capture_logs() as lines:
        for _ in range(3):
            watched.seconds += TIMEOUT_SECONDS
            await watched.look(record(41), age_seconds=TIMEOUT_SECONDS)
        watched.seconds += 1
        await watched.look(record(42, NOW_UNIX + 1))
    assert [(line["event"], line["step"]) for line in lines] == [("trainer.stuck", 41), ("trainer.no_longer_stuck", 42)]
    assert lines[0]["seconds"] == TIMEOUT_SECONDS


async def test_trainers_are_not_stuck_because_somebody_sets_the_wall_clock() -> None:
    watched = Watched()
    await watched.look(record(41))
    watched.seconds += CALM_SECONDS
    # The trainer wrote, then the clock was moved by a day.
    await watched.look(record(42, NOW_UNIX + CALM_SECONDS), age_seconds=24 * 3600.0)
    assert not watched.state.progress.stuck
    assert watched.state.progress.newest == StepSign(at=watched.seconds - CALM_SECONDS, step=42)
    watched.seconds += CALM_SECONDS
    await watched.look(record(42, NOW_UNIX + CALM_SECONDS), age_seconds=24 * 3600.0)
    assert not watched.state.progress.stuck


async def test_an_agent_that_starts_beside_stuck_trainers_says_so() -> None:
    watched = Watched()
    await watched.look(record(41), age_seconds=TIMEOUT_SECONDS)
    assert watched.state.progress.stuck


async def test_trainers_that_have_ended_are_no_longer_stuck() -> None:
    watched = Watched()
    await watched.look(record(41), age_seconds=TIMEOUT_SECONDS)
    await watched.look(None)
    assert not watched.state.progress.stuck
    assert watched.state.progress.newest is None


async def test_the_next_look_is_when_they_may_be_stuck_and_no_sooner_than_in_a_second() -> None:
    watched = Watched()
    assert watched.watch.seconds_to_next_look(CALM_SECONDS) == CALM_SECONDS
    await watched.look(record(41))
    assert watched.watch.seconds_to_next_look(CALM_SECONDS) == CALM_SECONDS
    watched.seconds += TIMEOUT_SECONDS - 4
    assert watched.watch.seconds_to_next_look(CALM_SECONDS) == pytest.approx(4)
    watched.seconds += 3.9
    assert watched.watch.seconds_to_next_look(CALM_SECONDS) == 1
    watched.seconds += 1
    await watched.look(record(41), age_seconds=TIMEOUT_SECONDS)
    assert watched.watch.seconds_to_next_look(CALM_SECONDS) == CALM_SECONDS
