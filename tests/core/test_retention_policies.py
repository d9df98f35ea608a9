"""Policies of retention and their sum: a checkpoint stays if any wants it. An oracle without policies says so too."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.listings import DAY, NOW, committed, deleted, folder, ids, plan, snapshot, stored, why_kept
from tests.core.retention_oracle import must_stay

from keepstep_agent.core.policies.restore_choice import CommittedSave, newest_first
from keepstep_agent.core.policies.retention import horizon as horizon_rules
from keepstep_agent.core.policies.retention.deletions import PrunePlan, StoredSave
from keepstep_agent.core.policies.retention.horizon import horizon_of
from keepstep_agent.core.policies.retention.verdict import without_finals
from keepstep_agent.core.settings.values import RetentionSettings

HOUR = 3600.0


def hourly(*steps: int) -> list[CommittedSave]:
    """A checkpoint an hour, from the midnight before `NOW` on."""
    midnight = NOW - NOW % DAY
    return [committed(step, modified_at=midnight + number * HOUR) for number, step in enumerate(steps)]


def test_a_milestone_is_the_first_checkpoint_at_or_past_each_multiple() -> None:
    result = plan(hourly(0, 5, 10, 15, 22, 28, 45, 49, 60), every=10)
    assert deleted(result) == ids(5, 15, 28, 49)
    assert why_kept(result) == {
        **{f"aaaaaaaa-{step:06d}": f"milestone {step - step % 10}" for step in (0, 10, 22, 45)},
        "aaaaaaaa-000060": "newest 1, milestone 60",
    }


def test_all_saves_of_a_milestone_step_stay() -> None:
    found = [*hourly(10, 20), committed(10, "bbbbbbbb-000010", NOW)]
    assert deleted(plan(found, every=10)) == set()


def test_the_last_checkpoint_of_each_interval_stays() -> None:
    found = hourly(*range(1, 8))
    result = plan(found, settings=RetentionSettings(keep_last=1, keep_every_seconds=3 * HOUR))
    assert deleted(result) == ids(1, 2, 4, 5)
    assert why_kept(result)["aaaaaaaa-000003"] == "one per 10800 s"


def test_the_last_checkpoint_of_each_of_the_last_days_stays() -> None:
    found = hourly(*range(1, 60))
    keep = RetentionSettings(keep_last=1, keep_daily=2)
    result = plan(found, settings=keep)
    assert {save: why_kept(result)[save] for save in ids(48, 59)} == {
        "aaaaaaaa-000048": "daily",
        "aaaaaaaa-000059": "newest 1, daily",
    }
    assert deleted(result) == ids(*range(1, 48), *range(49, 59))


def test_days_without_a_commit_do_not_count() -> None:
    found = [committed(step, modified_at=NOW - age * DAY) for step, age in ((1, 90), (2, 80), (3, 40), (4, 0))]
    assert deleted(plan(found, settings=RetentionSettings(keep_last=1, keep_daily=3))) == ids(1)


def test_of_a_day_on_which_a_run_fell_back_the_one_committed_last_stays() -> None:
    found = [*hourly(100, 90), committed(200, modified_at=NOW + 2 * DAY), committed(210, modified_at=NOW + 3 * DAY)]
    assert deleted(plan(found, settings=RetentionSettings(keep_last=1, keep_daily=9))) == ids(100)


def test_a_damaged_one_that_a_policy_wants_stays_and_so_does_its_substitute() -> None:
    found = hourly(9, 10, 11, 12, 13)
    assert deleted(plan(found, every=10, validated=ids(9, 11, 12, 13), damaged=ids(10))) == ids(9, 12)
    daily = RetentionSettings(keep_last=1, keep_daily=1)
    newer = committed(20, modified_at=NOW + DAY)
    assert deleted(plan([*found, newer], settings=daily, validated=[newer.save], damaged=())) == ids(9, 10, 11, 12, 13)
    two_days = replace(daily, keep_daily=2)
    assert deleted(plan([*found, newer], settings=two_days, validated=[newer.save], damaged=ids(13))) == ids(9, 10, 11)


def test_the_newest_say_whether_they_are_so_many_or_stand_in_for_damaged_ones() -> None:
    result = plan(hourly(1, 2, 3), keep_last=1, validated=ids(1, 2))
    assert (deleted(result), why_kept(result)) == (
        ids(1),
        {"aaaaaaaa-000003": "newest 1", "aaaaaaaa-000002": "fewer than 1 newer are valid"},
    )


def test_intervals_and_days_are_also_for_snapshots_and_milestones_are_not() -> None:
    found = [snapshot(number, modified_at=NOW + number * DAY) for number in (10, 11, 12, 13)]
    data = [folder(one, "a.pt") for one in found]
    keep = RetentionSettings(keep_last=1, keep_daily=2, keep_every_steps=10)
    assert deleted(plan(found, data, settings=keep)) == {one.save for one in found[:2]}


def test_final_checkpoints_stay_and_say_why() -> None:
    result = plan(hourly(1, 2, 3))
    assert without_finals(result, {}) == result
    spared = without_finals(result, {"aaaaaaaa-000001": "final"})
    assert (deleted(spared), why_kept(spared)["aaaaaaaa-000001"]) == (ids(2), "final")


@pytest.mark.parametrize("keep_last", [0, 3])
def test_policies_keep_what_is_pinned_and_what_is_still_written(keep_last: int) -> None:
    result = plan(hourly(1, 2, 3, 4, 5), keep_last=keep_last, protected=ids(1), live=ids(2))
    assert deleted(result) == set()
    if keep_last:
        assert [why_kept(result)[save] for save in sorted(ids(1, 2))] == [
            "it is being resumed from",
            "it is still being written",
        ]


@dataclass(frozen=True)
class _History:
    """A destination with announced checkpoints, what is known of them, and what is wanted."""

    saves: tuple[CommittedSave, ...]
    settings: RetentionSettings
    validated: frozenset[str]
    damaged: frozenset[str]
    protected: frozenset[str]

    def plan(self, saves: tuple[CommittedSave, ...] | None = None, data: tuple[StoredSave, ...] = ()) -> PrunePlan:
        return plan(
            self.saves if saves is None else saves,
            data,
            settings=self.settings,
            validated=self.validated,
            damaged=self.damaged,
            protected=self.protected,
        )

    def folders(self) -> tuple[StoredSave, ...]:
        return tuple(stored(one.step, one.save) for one in self.saves)


_POLICIES = st.builds(
    RetentionSettings,
    keep_last=st.sampled_from([1, 1, 2, 3, 0]),
    keep_every_steps=st.sampled_from([0, 1, 3, 7, 10, 1000]),
    keep_every_seconds=st.sampled_from([0.0, HOUR, 5 * HOUR, 36 * HOUR, 30 * DAY]),
    keep_daily=st.sampled_from([0, 0, 1, 2, 5, 30]),
)


@st.composite
def _histories(draw: st.DrawFn) -> _History:
    """Mostly runs that go on step by step, which fall back now and then, and rest; sometimes no order at all."""
    saves: list[CommittedSave] = []
    step, moment = 0, NOW - NOW % HOUR
    falls_back = draw(st.booleans())
    for number in range(draw(st.integers(1, 16))):
        step = max(0, step + draw(st.integers(-9 if falls_back else 1, 9)))
        moment += draw(st.sampled_from([0, 1, 1, 2, 7, 24, 24 * 9])) * HOUR
        if falls_back and draw(st.integers(0, 9)) == 0:
            moment -= 3 * DAY
        save = f"{number % 3:08x}-{number:06d}"
        # Not read, from a clock of its own, or before somebody copied all of it.
        saved_at = draw(st.sampled_from([0.0, 1.0, 2.0, moment - DAY, moment - HOUR, moment + HOUR]))
        saves.append(replace(committed(step, save, moment), saved_at=saved_at))
    every = [one.save for one in saves]
    damaged = draw(st.frozensets(st.sampled_from(every), max_size=3))
    return _History(
        saves=tuple(saves),
        settings=draw(_POLICIES),
        validated=frozenset(every) - damaged - draw(st.frozensets(st.sampled_from(every), max_size=3)),
        damaged=damaged,
        protected=draw(st.frozensets(st.sampled_from(every), max_size=2)),
    )


@given(_histories())
@settings(max_examples=500)
def test_whatever_the_policies_what_goes_is_what_the_oracle_lets_go(history: _History) -> None:
    wanted = must_stay(
        history.saves,
        history.settings,
        validated=history.validated,
        damaged=history.damaged,
        protected=history.protected,
    )
    result = history.plan()
    assert deleted(result) == {one.save for one in history.saves} - wanted
    assert set(why_kept(result)) == wanted
    assert all(why_kept(result).values())


@given(_histories())
@settings(max_examples=300)
def test_whatever_the_policies_no_promise_breaks(history: _History) -> None:
    foreign = (
        StoredSave(name="photos", save="holiday", sizes_bytes={"photos/holiday/a.jpg": 1}, modified_at=0.0),
        StoredSave(name="checkpoint-9", save="mine", sizes_bytes={"checkpoint-9/mine/x": 1}, modified_at=0.0),
    )
    result = history.plan(data=(*history.folders(), *foreign))
    gone = deleted(result)
    newest = newest_first(history.saves)
    valid = [one for one in newest if one.save in history.validated]
    assert newest[0].save not in gone
    assert not valid or valid[0].save not in gone
    assert max(newest, key=lambda one: one.modified_at).save not in gone
    assert not gone & history.protected
    assert not gone & {"holiday", "mine"}
    own = {key for one in history.folders() for key in one.sizes_bytes} | {one.key for one in history.saves}
    assert own >= {key for one in result.deletions for wave in one.waves for key in wave}


@given(_histories(), st.data())
@settings(max_examples=300)
def test_an_interrupted_prune_leaves_whole_checkpoints_and_the_next_one_ends_it(
    history: _History, data: st.DataObject
) -> None:
    result = history.plan(data=history.folders())
    files = {one.save: set(one.sizes_bytes) for one in history.folders()}
    waves = [wave for one in result.deletions for wave in one.waves]
    whole_waves = data.draw(st.integers(0, len(waves)))
    # The objects of a wave go at the same time, so any of them may be left.
    begun = waves[whole_waves] if whole_waves < len(waves) else ()
    gone = {key for wave in waves[:whole_waves] for key in wave} | data.draw(st.sets(st.sampled_from(begun or ("",))))
    left = tuple(one for one in history.saves if one.key not in gone)
    assert not [one for one in left if files[one.save] & gone]
    assert deleted(history.plan(left)) == deleted(result) & {one.save for one in left}


@given(_histories())
@settings(max_examples=300)
def test_whatever_the_policies_a_second_prune_deletes_nothing_more(history: _History) -> None:
    gone = deleted(history.plan())
    assert deleted(history.plan(tuple(one for one in history.saves if one.save not in gone))) == set()


@given(_histories(), st.integers(1, 6))
@settings(max_examples=300)
def test_above_a_horizon_nothing_goes_that_policies_keep_over_everything(history: _History, recent: int) -> None:
    listed = sorted(history.saves, key=lambda one: one.step, reverse=True)
    with patch.object(horizon_rules, "_RECENT", recent):
        horizon = horizon_of(listed, history.settings)
    visible = tuple(one for one in listed if one.step >= horizon.step)
    trusted = history.validated - horizon.skipped(visible)
    above = deleted(replace(history, validated=trusted).plan(visible))
    whole = deleted(history.plan()) & {one.save for one in visible}
    assert above <= whole
    if not (history.settings.keep_every_steps or history.settings.keep_every_seconds or history.settings.keep_daily):
        assert above == whole
