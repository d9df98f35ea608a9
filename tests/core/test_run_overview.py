"""What a page says of a run, by what its markers and its ledger tell, whichever of them is missing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.core.listings import committed, snapshot
from tests.core.noted_lives import NotedLife, killed_and_resumed

from keepstep_agent.core.model import CommitMarker, Kind, SaveInfo
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.run_overview import (
    MOST_CHECKPOINTS,
    MOST_STARTS,
    CheckpointState,
    RunDetails,
    RunOverview,
    RunStanding,
    overview_of,
    usable_newest,
)
from keepstep_agent.core.stored.ledger import AgentEnded, Alive, SaveLost

DAY = 24 * 3600.0


def of(
    steps: Sequence[int], lives: Sequence[NotedLife], *, newest: CommitMarker | None = None, **options: Any
) -> tuple[RunOverview, RunDetails]:
    listed = [listed_save(step) for step in sorted(steps, reverse=True)]
    return overview_of(listed, newest, [one.life for one in lives], **options)


def listed_save(step: int) -> CommittedSave:
    return committed(step, f"save-{step}", modified_at=1000.0 + step)


def marker(step: int, kind: Kind = Kind.PERIODIC) -> CommitMarker:
    info = SaveInfo(save=f"save-{step}", name=f"checkpoint-{step}", step=step, kind=kind, world_size=1)
    return CommitMarker(info=info, saved_at=900.0 + step, size_bytes=77, file_count=1, manifests=())


def running(*, until: float = 2000.0) -> NotedLife:
    life = NotedLife("agent-1")
    life.start(1000)
    life.ranks(1010, 1)
    life.save(1100, 1105, 100)
    life.commit(1110, 100)
    life.add(Alive, until, ranks=1, step=200)
    return life


def test_markers_and_ledger_together_tell_everything() -> None:
    overview, details = of([100, 200, 720], killed_and_resumed(), newest=marker(720, Kind.JUST_IN_TIME))
    assert overview.recovery is not None
    assert (overview.recovery.step, overview.recovery.kind, overview.recovery.taken_at) == (720, "just-in-time", 1900)
    assert overview.time is not None
    assert (overview.time.goodput, overview.time.steps_lost, overview.time.kept_steps) == (0.726, 60, 520)
    assert (overview.listed, overview.stored_bytes, overview.unsized) == (3, 10 + 10 + 77, 0)
    assert [row.resumed_step for row in details.starts] == [0, 200]
    assert [(row.step, row.state, row.size_bytes, row.stall_seconds) for row in details.checkpoints] == [
        (720, CheckpointState.COMMITTED, 77, 4.0),
        (200, CheckpointState.COMMITTED, 10, 5.0),
        (100, CheckpointState.COMMITTED, 10, 5.0),
    ]


def test_a_copied_run_was_committed_when_its_ledger_says_so() -> None:
    listed = [replace(listed_save(step), modified_at=9_000_000.0 - step) for step in (100, 90)]
    overview, details = overview_of(listed, marker(100), [running().life])
    assert overview.recovery is not None
    assert overview.recovery.committed_at == 1110.0
    assert {row.step: row.committed_at for row in details.checkpoints}[100] == 1110.0
    overview, _ = overview_of(listed[:1], None, [running().life])
    assert overview.last_commit_at == 1110.0
    assert overview.standing(9_000_000.0, DAY) is RunStanding.ABANDONED


def test_markers_alone_tell_what_is_stored() -> None:
    overview, details = of([100, 200], [], newest=marker(200))
    assert overview.time is None
    assert overview.recovery is not None
    assert (overview.recovery.step, overview.recovery.taken_at, overview.recovery.committed_at) == (200, 1100.0, 1100.0)
    assert (overview.stored_bytes, overview.unsized) == (77, 1)
    assert [(row.step, row.kind, row.size_bytes) for row in details.checkpoints] == [
        (200, "periodic", 77),
        (100, "", None),
    ]


def test_a_ledger_alone_tells_what_happened() -> None:
    overview, details = of([], killed_and_resumed())
    assert overview.recovery is None
    assert overview.time is not None
    assert {row.state for row in details.checkpoints} == {CheckpointState.PRUNED}


def test_nothing_at_all_is_a_run_of_which_nothing_is_known() -> None:
    overview, details = of([], [])
    assert (overview.recovery, overview.time, overview.sign_at) == (None, None, None)
    assert (details.starts, details.checkpoints) == ((), ())
    assert overview.standing(0.0, DAY) is RunStanding.RUNNING  # at the beginning of time


@pytest.mark.parametrize(
    ("now", "standing"),
    [(2100.0, RunStanding.RUNNING), (3000.0, RunStanding.STOPPED), (2000.0 + 8 * DAY, RunStanding.ABANDONED)],
)
def test_a_run_without_an_end_runs_until_its_signs_cease(now: float, standing: RunStanding) -> None:
    overview, _ = of([100], [running()])
    assert overview.standing(now, 7 * DAY) is standing


def test_a_run_that_lives_but_commits_nothing_is_not_abandoned() -> None:
    overview, _ = of([100], [running(until=1110 + 30 * DAY)])
    assert overview.standing(1200 + 30 * DAY, 7 * DAY) is RunStanding.RUNNING


def test_a_commit_that_the_ledger_does_not_have_yet_is_a_sign_of_life() -> None:
    life = running(until=1200)
    listed = [replace(listed_save(200), modified_at=2500.0), listed_save(100)]
    overview, details = overview_of(listed, None, [life.life])
    assert overview.standing(2600.0, DAY) is RunStanding.RUNNING
    assert (details.starts[-1].trained, details.starts[-1].ended_at) == (((1010, 2500.0),), 2500.0)


@pytest.mark.parametrize(
    ("code", "kind", "standing"),
    [
        (0, Kind.PERIODIC, RunStanding.STOPPED),
        (75, Kind.PERIODIC, RunStanding.FAILED),
        (0, Kind.FINAL, RunStanding.COMPLETE),
        (75, Kind.FINAL, RunStanding.COMPLETE),
    ],
)
def test_a_run_that_has_ended_says_how(code: int, kind: Kind, standing: RunStanding) -> None:
    life = running()
    life.add(AgentEnded, 2001, code=code, not_durable=int(code > 0))
    overview, _ = of([100], [life], newest=marker(100, kind))
    assert overview.standing(2010.0, 7 * DAY) is standing


@pytest.mark.parametrize("noticed", [False, True])
def test_a_program_that_fails_by_itself_has_failed_and_one_that_was_told_to_end_has_not(noticed: bool) -> None:
    life = running()
    if noticed:
        life.notice(2000)
    life.add(AgentEnded, 2001, code=0, program_failed=True)
    overview, _ = of([100], [life])
    assert overview.standing(2010.0, DAY) is (RunStanding.STOPPED if noticed else RunStanding.FAILED)


def test_a_start_that_follows_a_failed_one_counts() -> None:
    failed = running()
    failed.add(AgentEnded, 2001, code=75)
    again = NotedLife("agent-2", attempt="again")
    again.start(2100)
    again.ranks(2110, 1)
    overview, _ = of([100], [failed, again])
    assert overview.standing(2200.0, DAY) is RunStanding.RUNNING


def test_every_save_that_is_not_stored_says_why() -> None:
    life = NotedLife("agent-1")
    life.start(1000)
    life.ranks(1010, 1)
    for step in (100, 200, 300, 400):
        life.save(1000 + step, 1001 + step, step)
    life.commit(1150, 100)
    life.add(SaveLost, 1250, save="save-200", outcome="shed", reason="superseded")
    life.add(SaveLost, 1350, save="save-300", outcome="failed", reason="gone")
    _, details = of([], [life])
    states = {row.step: (row.state, row.reason) for row in details.checkpoints}
    assert states == {
        100: (CheckpointState.PRUNED, ""),
        200: (CheckpointState.SHED, "superseded"),
        300: (CheckpointState.FAILED, "gone"),
        400: (CheckpointState.IN_PROGRESS, ""),
    }
    life.end(1500)
    _, details = of([], [life])
    assert details.checkpoints[0].state is CheckpointState.LOST


def test_a_save_of_which_only_the_weights_are_left_is_not_called_pruned() -> None:
    life = NotedLife("agent-1")
    life.start(1000)
    for step in (100, 200, 300):
        life.save(1000 + step, 1001 + step, step)
        life.commit(1002 + step, step)
    weights = [replace(listed_save(step), weights_only=True) for step in (200, 100, 50)]
    _, details = overview_of([listed_save(300), listed_save(200)], None, [life.life], weights_only=weights)
    assert [(row.step, row.state, row.size_bytes) for row in details.checkpoints if row.step != 50] == [
        (300, CheckpointState.COMMITTED, 10),
        (200, CheckpointState.COMMITTED, 10),
        (100, CheckpointState.WEIGHTS_ONLY, None),
    ]
    assert {row.state for row in details.checkpoints if row.step == 50} == {CheckpointState.WEIGHTS_ONLY}


def test_what_a_restore_found_damaged_is_stored_but_no_recovery_point() -> None:
    overview, details = of([100, 200], [], newest=marker(100), damaged={"save-200"})
    assert overview.recovery is not None
    assert (overview.recovery.step, overview.recovery.kind) == (100, "periodic")
    assert (overview.listed, overview.stored_bytes, overview.unsized) == (2, 77, 1)
    assert [(row.step, row.state) for row in details.checkpoints] == [
        (200, CheckpointState.DAMAGED),
        (100, CheckpointState.COMMITTED),
    ]


def test_what_the_listing_does_not_reach_is_not_called_pruned() -> None:
    life = NotedLife("agent-1")
    life.start(1000)
    for step in (100, 200, 300):
        life.save(1000 + step, 1001 + step, step)
        life.commit(1002 + step, step)
    _, details = of([300, 200], [life], all_listed=False)
    assert {row.state for row in details.checkpoints} == {CheckpointState.COMMITTED}


def test_snapshots_have_no_step_and_no_sum_of_sizes() -> None:
    listed = [snapshot(1_700_000_500), snapshot(1_700_000_000)]
    overview, details = overview_of(listed, None, [])
    assert overview.recovery is not None
    assert (overview.recovery.step, overview.recovery.kind) == (None, "snapshot")
    assert (overview.stored_bytes, overview.unsized, overview.listed) == (0, 2, 2)
    assert [(row.step, row.series, row.kind) for row in details.checkpoints] == [(None, "node-0", "snapshot")] * 2


def test_details_have_the_newest_and_say_how_many_there_are_besides() -> None:
    lives = []
    for number in range(MOST_STARTS + 5):
        life = NotedLife(f"agent-{number}", attempt=f"attempt-{number}")
        life.start(1000.0 * number)
        life.ranks(1000.0 * number + 1, 1)
        for save in range(3):
            life.save(None, 1000.0 * number + 10 + save, number * 10 + save)
        life.end(1000.0 * number + 500)
        lives.append(life)
    overview, details = of([], lives)
    assert overview.time is not None
    assert overview.time.starts == MOST_STARTS + 5
    assert (len(details.starts), details.more_starts) == (MOST_STARTS, 5)
    assert details.starts[-1].attempt == f"attempt-{MOST_STARTS + 4}"
    assert (len(details.checkpoints), details.more_checkpoints) == (
        MOST_CHECKPOINTS,
        3 * (MOST_STARTS + 5) - MOST_CHECKPOINTS,
    )
    assert details.checkpoints[0].step == (MOST_STARTS + 4) * 10 + 2


def test_of_several_output_directories_the_one_that_was_committed_to_last_is_the_recovery_point() -> None:
    """Stage one has ended with a final checkpoint, and stage two has not come as far yet."""
    life = NotedLife("agent-1")
    life.start(1000)
    life.ranks(1010, 1)
    life.save(1100, 1105, 900, kind="final", output="one")
    life.commit(1110, 900)
    life.save(1200, 1205, 20, output="two")
    life.commit(1210, 20)
    listed = [
        replace(committed(900, "save-900", modified_at=1110.0), output_key="1" * 12),
        replace(committed(20, "save-20", modified_at=1210.0), output_key="2" * 12),
    ]
    unnamed = replace(committed(10, "save-10", modified_at=1150.0), output_key="2" * 12)
    overview, details = overview_of([*listed, unnamed], marker(20), [life.life])
    assert overview.recovery is not None
    assert (overview.recovery.step, overview.recovery.taken_at) == (20, 1200.0)
    assert overview.standing(1300.0, DAY) is RunStanding.RUNNING
    # The marker that is read, the ledger, and nothing but the listing.
    assert {row.save: row.output for row in details.checkpoints} == {
        "save-900": "one",
        "save-20": "",
        "save-10": "2" * 12,
    }
    assert usable_newest(listed, {"save-20"}) == listed[0]
    assert usable_newest([], ()) is None
