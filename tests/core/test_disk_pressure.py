"""Room on the volume: when a save may begin, and what is given up when it runs short."""

from dataclasses import replace

import pytest
from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent import disk_pressure, planner
from keepstep_agent.core.agent.events import CommitWaits, DiskRead, RanksSeen, SaveAborted, SaveBegun
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.core.settings.values import GIB, DiskSettings


def _read(play: Play, *, free_bytes: int, used_bytes: int = 0, total_bytes: int = 100 * GIB) -> None:
    play.feed(DiskRead(at=play.now, used_bytes=used_bytes, free_bytes=free_bytes, total_bytes=total_bytes))


def _limit(play: Play, **settings: float) -> None:
    play.state.settings = replace(play.state.settings, disk=DiskSettings(**settings))  # type: ignore[arg-type]


def _begin(play: Play, save: str, *, step: int, attempt: str = "attempt") -> None:
    play.feed(SaveBegun(at=play.now, save=save, attempt=attempt, step=step, size_bytes=10))


def test_before_the_first_reading_every_save_may_begin() -> None:
    play = Play()
    assert disk_pressure.budget_bytes(play.state) is None
    assert disk_pressure.admit(play.state, Kind.PERIODIC, 1 << 60).admitted


def test_the_budget_ends_where_kubelet_evicts() -> None:
    play = Play()
    _limit(play, eviction_threshold_percent=10)
    _read(play, free_bytes=15 * GIB)
    assert disk_pressure.budget_bytes(play.state) == 5 * GIB


def test_the_size_limit_counts_where_it_is_tighter() -> None:
    play = Play()
    _limit(play, eviction_threshold_percent=10, size_limit_bytes=8 * GIB)
    _read(play, free_bytes=90 * GIB, used_bytes=5 * GIB)
    assert disk_pressure.budget_bytes(play.state) == 3 * GIB


def test_a_budget_is_never_negative() -> None:
    play = Play()
    _limit(play, eviction_threshold_percent=10)
    _read(play, free_bytes=1)
    assert disk_pressure.budget_bytes(play.state) == 0


@pytest.mark.parametrize(("free_bytes", "admitted"), [(20, True), (19, False)])
def test_a_periodic_save_leaves_room_for_a_just_in_time_one(free_bytes: int, admitted: bool) -> None:
    play = Play()
    _read(play, free_bytes=free_bytes)
    verdict = disk_pressure.admit(play.state, Kind.PERIODIC, 10)
    assert verdict.admitted is admitted
    assert bool(verdict.reason) is not admitted


def test_a_just_in_time_save_is_never_refused() -> None:
    play = Play()
    _read(play, free_bytes=0)
    assert disk_pressure.admit(play.state, Kind.JUST_IN_TIME, 10).admitted


def test_a_save_that_is_being_written_counts_until_it_is_announced_aborted_or_its_trainer_dies() -> None:
    play = Play()
    _read(play, free_bytes=29)
    play.feed(RanksSeen(at=play.now, alive=frozenset({0})))
    ends = [
        lambda: play.feed(SaveAborted(at=play.now, save="begun")),
        lambda: play.feed(RanksSeen(at=play.now, alive=frozenset())),
    ]
    for end in ends:
        _begin(play, "begun", step=1)
        assert not disk_pressure.admit(play.state, Kind.PERIODIC, 10).admitted
        end()
        assert disk_pressure.admit(play.state, Kind.PERIODIC, 10).admitted


def test_a_save_that_nobody_speaks_of_again_keeps_its_room_for_two_minutes_only() -> None:
    play = Play()
    _read(play, free_bytes=29)
    _begin(play, "forgotten", step=1)
    play.now += 119
    _read(play, free_bytes=29)
    assert not disk_pressure.admit(play.state, Kind.PERIODIC, 10).admitted
    play.now += 1
    _read(play, free_bytes=29)
    assert disk_pressure.admit(play.state, Kind.PERIODIC, 10).admitted


def test_a_save_of_a_later_step_ends_the_earlier_ones_of_its_attempt_alone() -> None:
    play = Play()
    for rank in range(2):
        _begin(play, f"first of rank {rank}", step=1)
    _begin(play, "another's", step=1, attempt="another")
    assert len(play.state.begun) == 3
    _begin(play, "second", step=2)
    assert set(play.state.begun) == {"another's", "second"}


def test_a_save_that_is_announced_holds_no_room_in_reserve_whichever_comes_first() -> None:
    play = Play()
    _begin(play, "asked before", step=1)
    play.announce("asked before", (1,))
    play.announce("asked after", (1,))
    _begin(play, "asked after", step=1)
    assert not play.state.begun


def test_the_forecast_is_the_largest_of_the_last_three() -> None:
    play = Play()
    for number, size in enumerate((9, 3, 2, 4)):
        play.announce(f"s{number}", (size,))
    assert disk_pressure.forecast_bytes(play.state) == 4


def _three_waiting(play: Play) -> None:
    """`first` has been begun, `second` has the wire."""
    for save in ("first", "second", "third", "fourth"):
        play.announce(save, (PART_BYTES,) * 4)
        play.answer(next(iter(play.in_flight)))


def test_one_shortage_is_paid_for_once() -> None:
    play = Play(max_concurrency=1)
    _three_waiting(play)
    # Eight parts are needed (a save and a just-in-time one), seven are free: one checkpoint makes the room.
    _read(play, free_bytes=7 * PART_BYTES)
    for _ in range(10):
        play.now += 1
        play.tick()
    assert [play.phase(save) for save in ("first", "third")] == [Phase.SHED, Phase.STAGED]


def test_a_shortage_that_lasts_is_paid_for_again_after_the_next_reading() -> None:
    play = Play(max_concurrency=1)
    _three_waiting(play)
    _read(play, free_bytes=7 * PART_BYTES)
    play.answer(WorkId(Operation.RELEASE, "first"))
    assert play.phase("third") is Phase.STAGED
    _read(play, free_bytes=7 * PART_BYTES)
    assert play.phase("third") is Phase.SHED


def test_the_newest_and_the_one_on_the_wire_are_never_given_up() -> None:
    play = Play(max_concurrency=1)
    _three_waiting(play)
    _read(play, free_bytes=0)
    phases = {save: play.phase(save) for save in ("first", "second", "third", "fourth")}
    assert phases == {
        "first": Phase.SHED,
        "second": Phase.UPLOADING,
        "third": Phase.SHED,
        "fourth": Phase.STAGED,
    }


def test_what_is_sent_to_its_last_byte_and_not_yet_sealed_is_never_given_up() -> None:
    play = Play(max_concurrency=2)
    play.announce("old", (PART_BYTES,))
    play.announce("new", (PART_BYTES,) * 8)
    play.answer(WorkId(Operation.PUT_FILE, "old", 0, "r0-0"))
    assert WorkId(Operation.CHECK_SENT, "old", 0) in play.in_flight
    assert play.state.active_upload == "new"
    _read(play, free_bytes=0)
    assert play.phase("old") is Phase.UPLOADING
    play.finish("old")
    assert play.phase("old") is Phase.RELEASED


def test_what_is_only_announced_supersedes_nothing() -> None:
    play = Play(max_concurrency=1)
    _three_waiting(play)
    play.announce_only("fifth")
    _read(play, free_bytes=0)
    assert [play.phase(save) for save in ("third", "fourth")] == [Phase.SHED, Phase.STAGED]
    for work in (
        WorkId(Operation.STAGE, "fifth", 0),
        *(WorkId(Operation.RELEASE, save) for save in ("first", "third")),
    ):
        play.answer(work)
    _read(play, free_bytes=0)
    assert play.phase("fourth") is Phase.SHED


@pytest.mark.parametrize("kind", [Kind.JUST_IN_TIME, Kind.FINAL])
def test_a_last_save_is_never_given_up(kind: Kind) -> None:
    play = Play(max_concurrency=1)
    play.announce("last", (PART_BYTES,) * 4, kind=kind)
    play.announce("next", (PART_BYTES,) * 4)
    play.announce("newest", (PART_BYTES,) * 4)
    _read(play, free_bytes=0)
    assert play.phase("last") is not Phase.SHED


def _sealed_and_waiting(play: Play, save: str) -> None:
    play.announce(save, world_size=2)
    work = WorkId(Operation.COMMIT, save)
    while work not in play.in_flight:
        play.answer(next(iter(play.in_flight)))
    del play.in_flight[work]
    play.feed(CommitWaits(at=play.now, work=work, missing_ranks=1))


def test_a_sealed_checkpoint_that_other_agents_gave_up_goes_when_a_newer_one_is_committed_and_room_is_short() -> None:
    play = Play()
    _sealed_and_waiting(play, "old")
    _read(play, free_bytes=0)
    assert play.phase("old") is Phase.SEALED
    play.announce("new")
    play.finish()
    assert play.phase("new") is Phase.RELEASED
    assert play.phase("old") is Phase.SHED


def test_a_checkpoint_that_waits_for_ranks_goes_ten_minutes_after_a_newer_one_is_committed() -> None:
    play = Play()
    _sealed_and_waiting(play, "elsewhere")
    play.announce("here", world_size=2, local_world_size=2)
    play.announce("new")
    play.finish()
    for _ in range(118):
        play.now += 5
        work = WorkId(Operation.COMMIT, "elsewhere")
        play.tick()
        if play.in_flight.pop(work, None):
            play.feed(CommitWaits(at=play.now, work=work, missing_ranks=1))
    assert [play.phase(save) for save in ("elsewhere", "here")] == [Phase.SEALED, Phase.ANNOUNCED]
    assert planner.next_wake(play.state) is not None
    play.now += 20
    play.tick()
    assert [play.phase(save) for save in ("elsewhere", "here")] == [Phase.SHED, Phase.SHED]
