"""Thousands of lives, none of which may show a violation; and proof that the simulation would notice.

`make simulate` runs ten thousand of them and more; here are the first.

A failing seed is printed. Replay it alone with `KEEPSTEP_SIM_SEED=4711 pytest tests/simulation`, or event by event with
`python -m tests.simulation.life 4711` from the repository's root.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.simulation.life import Life
from tests.simulation.store_model import ViolationError

from keepstep_agent.core.agent import disk_pressure, drain, planner, reducer, upload_queue
from keepstep_agent.core.agent import state as state_module
from keepstep_agent.core.agent.checkpoint import Checkpoint, FileProgress
from keepstep_agent.core.agent.commands import Abandon, Command, Exit, WriteManifest
from keepstep_agent.core.agent.events import Announced, PackStored, PartStored, Staged, Started
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.policies.repeated_deaths import Suspect

_LIVES = int(os.environ.get("KEEPSTEP_SIM_LIVES", "300"))
_PER_BATCH = 300
# A batch in which one of these happens less than five times shows little.
_EVENTFUL = (
    *("released", "shed", "failed", "sealed"),
    *("ObjectsLost", "Reconciled", "PackStored", "restart", "set aside", "killed twice", "exit 0", "exit 75"),
)
_ROOT = Path(__file__).parents[2]


def _violation(life: Life) -> str:
    """Empty for a life in which nothing goes wrong; a crash of the core counts as a violation."""
    try:
        life.run()
    except ViolationError as error:
        return f"seed {life.seed}: {error}"
    except Exception as error:
        return f"seed {life.seed}: {type(error).__name__}: {error}"
    return ""


def _batches() -> list[range]:
    if "KEEPSTEP_SIM_SEED" in os.environ:
        seed = int(os.environ["KEEPSTEP_SIM_SEED"])
        return [range(seed, seed + 1)]
    return [range(first, first + _PER_BATCH) for first in range(0, _LIVES, _PER_BATCH)]


@pytest.mark.parametrize("seeds", _batches(), ids=str)
def test_no_storm_of_crashes_and_lost_answers_breaks_a_life(seeds: range) -> None:
    violations: list[str] = []
    seen: Counter[str] = Counter()
    for life in map(Life, seeds):
        violations += filter(None, [_violation(life)])
        _count(life, seen)
    assert not violations, "\n".join(violations)
    missed = {wanted: seen[wanted] for wanted in _EVENTFUL if seen[wanted] < 5}
    assert not missed or len(seeds) < _PER_BATCH, "the lives are less eventful than they should be"


def _count(life: Life, seen: Counter[str]) -> None:
    """How its checkpoints and agents ended, and what happened on the way."""
    for agent in life.agents:
        seen.update(checkpoint.phase.value for checkpoint in agent.state.checkpoints.values())
        seen.update(type(event).__name__ for event in agent.journal)
        seen["restart"] += agent.starts - 1
        seen["killed twice"] += len(agent.were_set_aside)
        seen["set aside"] += len(agent.state.set_aside)
        seen[f"exit {agent.exit.code}" if agent.exit else "no exit"] += 1


def _digests(seeds: range) -> list[int]:
    lives = [Life(seed) for seed in seeds]
    for life in lives:
        life.run()
    return [life.digest for life in lives]


def test_the_same_seed_gives_the_same_life_in_every_process() -> None:
    program = "from tests.simulation.test_simulation import _digests; print(_digests(range(40)))"
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=_ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=HANG_SECONDS,
            # What is logged on the way has the time of day in it.
        ).stdout.splitlines()[-1]
        for hash_seed in ("1", "2")
    }
    assert answers == {f"{_digests(range(40))}"}


# --- the core with one idea missing --------------------------------------------------------------------------------

Mutation = Callable[[pytest.MonkeyPatch], None]


def _seal_when_the_first_rank_has(patch: pytest.MonkeyPatch) -> None:
    def seal(state: State, checkpoint: Checkpoint) -> Iterator[Command]:
        work = WorkId(Operation.WRITE_MANIFEST, checkpoint.info.save, number=len(checkpoint.contributions))
        if checkpoint.any_staged and work not in state.in_flight:
            state.launch(work)
            yield WriteManifest(work=work, ranks=checkpoint.manifests())

    patch.setattr(planner, "_seal", seal)


def _commit_without_looking_for_the_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("keepstep_agent.core.stored.commit.missing_files", lambda manifest, sizes: [])
    patch.setattr("tests.simulation.command_effects.missing_files", lambda manifest, sizes: [])


def _go_on_without_asking_the_store(patch: pytest.MonkeyPatch) -> None:
    started = reducer._started

    def without(state: State, event: Started) -> Iterator[Command]:
        yield from started(state, event)
        for checkpoint in state.checkpoints.values():
            checkpoint.reconciled = True

    patch.setattr(reducer, "_started", without)


def _plan_by_the_setting_of_today(patch: pytest.MonkeyPatch) -> None:
    staged = reducer.staged

    def planned_anew(state: State, checkpoint: Checkpoint, event: Staged) -> Iterator[Command]:
        part_size_bytes = state.settings.transfer.part_size_bytes
        return staged(state, checkpoint, replace(event, part_size_bytes=part_size_bytes))

    patch.setattr(reducer, "staged", planned_anew)


def _oldest_first(patch: pytest.MonkeyPatch) -> None:
    order = upload_queue.order
    patch.setattr(upload_queue, "order", lambda state: reversed(list(order(state))))


def _wait_for_the_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(upload_queue, "_must_wait", lambda state, _, first: upload_queue._has_files_to_store(state, first))


def _share_with_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(upload_queue, "_sharing", lambda state: frozenset())


def _forget_announcements(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reducer, "DURABLE", tuple(cls for cls in reducer.DURABLE if cls is not Announced))


def _drop_pins_ahead_of_the_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.simulation.agent_model.waits_for_its_record", lambda command: False)


def _forget_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reducer, "DURABLE", tuple(cls for cls in reducer.DURABLE if cls is not PartStored))


def _forget_packs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reducer, "DURABLE", tuple(cls for cls in reducer.DURABLE if cls is not PackStored))


def _commit_without_looking_for_the_packs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("keepstep_agent.core.stored.commit.missing_packs", lambda manifest, sizes: [])
    patch.setattr("tests.simulation.command_effects.missing_packs", lambda manifest, sizes: [])


def _put_another_pack_under_its_key(patch: pytest.MonkeyPatch) -> None:
    """Planned anew after a restart, with another size than before."""
    staged = reducer.staged

    def planned_anew(state: State, checkpoint: Checkpoint, event: Staged) -> Iterator[Command]:
        yield from staged(state, checkpoint, replace(event, pack_size_bytes=1024 * (8 if state.live else 16)))

    patch.setattr(reducer, "staged", planned_anew)


def _send_parts_again(patch: pytest.MonkeyPatch) -> None:
    def missing(checkpoint: Checkpoint, rank: int, progress: FileProgress) -> None:
        if progress.multipart is not None:
            progress.multipart.receipts = {}
        enqueue(checkpoint, rank, progress)

    enqueue = upload_queue.enqueue
    patch.setattr(upload_queue, "enqueue", missing)


def _take_an_earlier_lifes_save_for_this_ones(patch: pytest.MonkeyPatch) -> None:
    started = reducer._started

    def forgotten(state: State, event: Started) -> Iterator[Command]:
        yield from started(state, event)
        state.termination.first_sequence = 0

    patch.setattr(reducer, "_started", forgotten)


def _shed_the_newest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        disk_pressure, "_may_be_shed", lambda _, checkpoint: not checkpoint.ended and bool(checkpoint.size_bytes)
    )


def _shed_too_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk_pressure, "budget_bytes", lambda state: None if state.disk is None else 0)


def _leave_uploads_behind(patch: pytest.MonkeyPatch) -> None:
    abandon = planner._abandon

    def without(state: State, checkpoint: Checkpoint) -> Iterator[Command]:
        for command in abandon(state, checkpoint):
            yield replace(command, uploads=()) if isinstance(command, Abandon) else command

    patch.setattr(planner, "_abandon", without)


def _leave_lost_uploads_behind(patch: pytest.MonkeyPatch) -> None:
    abandon = planner._abandon

    def without(state: State, checkpoint: Checkpoint) -> Iterator[Command]:
        for command in abandon(state, checkpoint):
            yield replace(command, sweep_keys=()) if isinstance(command, Abandon) else command

    patch.setattr(planner, "_abandon", without)


def _stay_past_the_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drain, "_EXIT_MARGIN_SECONDS", -1.0)


def _say_that_all_is_well(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drain, "_exit", lambda state: Exit(code=0, lost=()))


def _launch_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_module.State, "launch", lambda state, work: None)


def _look_at_nothing_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_module.State, "advance_to", lambda state, now: setattr(state, "now", now))


def _keep_failed_work_to_itself(patch: pytest.MonkeyPatch) -> None:
    next_wake = planner.next_wake
    patch.setattr(planner, "next_wake", lambda state: next_wake(state) if state.termination.noticed else None)


def _set_nothing_aside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspect, "is_set_aside", False)


def _wait_for_ever_for_what_is_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drain, "gives_up_store_at", lambda state: None)


@pytest.mark.parametrize(
    ("mutation", "violation"),
    [
        (_wait_for_ever_for_what_is_refused, "did not exit"),
        (_seal_when_the_first_rank_has, "KeyError"),
        (_commit_without_looking_for_the_files, "is committed without"),
        (_forget_announcements, "another story"),
        (_drop_pins_ahead_of_the_record, "before its end was in the journal"),
        (_send_parts_again, "sent again"),
        (_shed_too_much, "shed without need"),
        (_stay_past_the_deadline, "deadline"),
        (_say_that_all_is_well, "exit 0"),
        (_set_nothing_aside, "settle"),
        *(
            pytest.param(*planted, marks=pytest.mark.nightly)
            for planted in (
                (_go_on_without_asking_the_store, "settle"),
                (_plan_by_the_setting_of_today, "IndexError"),
                (_oldest_first, "had the wire"),
                (_wait_for_the_leader, "a place is free"),
                (_share_with_all, "share the wire"),
                (_forget_parts, "KeyError"),
                (_forget_packs, "another story"),
                (_commit_without_looking_for_the_packs, "is committed without"),
                (_put_another_pack_under_its_key, "with other bytes than before"),
                (_shed_the_newest, "shed though it is"),
                (_take_an_earlier_lifes_save_for_this_ones, "waits for no save in its next life"),
                (_leave_uploads_behind, "left over"),
                (_leave_lost_uploads_behind, "left over"),
                (_launch_twice, "overlooked"),
                (_look_at_nothing_again, "overlooked"),
                (_keep_failed_work_to_itself, "settle"),
            )
        ),
    ],
    ids=lambda value: value.__name__.lstrip("_") if callable(value) else None,
)
def test_the_simulation_finds_what_goes_wrong_without_one_of_the_ideas(
    mutation: Mutation, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    found = ""
    for seed in range(1_000):
        found = _violation(Life(seed))
        if found and violation in found:
            return
    pytest.fail(f"1,000 lives and no {violation or 'violation'}; last: {found}")
