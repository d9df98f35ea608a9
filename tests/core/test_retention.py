"""What may be deleted: whatever is listed, valid, pinned or live, the last good checkpoint stays."""

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.listings import DAY, NOW, committed, deleted, folder, ids, plan, snapshot, stored, why_kept

from keepstep_agent.core.policies.restore_choice import CommittedSave, newest_first
from keepstep_agent.core.policies.retention import horizon as horizon_rules
from keepstep_agent.core.policies.retention.deletions import StoredSave
from keepstep_agent.core.policies.retention.horizon import horizon_of, skipped
from keepstep_agent.core.policies.retention.shared_objects import SecondLook, without_named, without_reserved
from keepstep_agent.core.policies.retention.verdict import may_abort_upload
from keepstep_agent.core.settings.values import RetentionSettings


def test_all_but_the_newest_go() -> None:
    assert deleted(plan([committed(step) for step in range(1, 6)], keep_last=2)) == ids(1, 2, 3)


def test_nothing_committed_goes_by_default() -> None:
    assert deleted(plan([committed(1), committed(2)], keep_last=0)) == set()


def test_multiples_of_a_step_stay() -> None:
    assert deleted(plan([committed(step) for step in (10, 15, 20, 25, 30)], every=10)) == ids(15, 25)


def test_the_one_being_resumed_from_stays() -> None:
    found = [committed(step) for step in (1, 2, 3)]
    assert deleted(plan(found, protected=ids(1))) == ids(2)


def test_damaged_newer_ones_do_not_count() -> None:
    found = [committed(step) for step in (1, 2, 3)]
    assert deleted(plan(found, validated=ids(1, 2))) == ids(1)
    assert deleted(plan(found, validated=ids(1))) == set()


def test_what_was_committed_last_stays_and_what_it_skipped_is_no_reason_to_delete() -> None:
    found = [committed(900), committed(1000, modified_at=NOW - 2 * DAY), committed(950, modified_at=NOW - DAY)]
    assert deleted(plan(found)) == ids(900)
    assert deleted(plan(found, keep_last=2)) == set()
    assert deleted(plan([*found, committed(1050, modified_at=NOW)])) == ids(900, 950, 1000)


def test_the_marker_goes_before_the_files_and_these_before_the_manifests() -> None:
    (deletion,) = plan([committed(1), committed(2)]).deletions
    assert [wave[0].split("/")[-1] for wave in deletion.waves] == [
        "999999999998.aaaaaaaa-000001.json",
        "model.pt",
        "manifest-00000-00001.json",
    ]


def test_a_marker_whose_data_is_gone_can_go() -> None:
    (deletion,) = plan([committed(1), committed(2)], data=[]).deletions
    assert deletion.waves == ((committed(1).key,),)


def test_the_oldest_goes_first() -> None:
    found = [committed(step) for step in (3, 1, 2, 4)]
    assert [one.save for one in plan(found).deletions] == sorted(ids(1, 2, 3))


def test_an_empty_listing_refuses() -> None:
    result = plan([], [stored(1)])
    assert (result.deletions, result.refused) == ((), "the destination has no committed checkpoint")


def test_a_listing_that_lacks_what_is_known_refuses() -> None:
    result = plan([committed(1), committed(2)], known=ids(2, 3))
    assert not result.deletions
    assert "aaaaaaaa-000003" in result.refused


ORPHAN = stored(9, "bbbbbbbb-000009")


def test_an_old_save_that_never_committed_goes() -> None:
    assert deleted(plan([committed(10)], [ORPHAN], keep_last=0)) == {ORPHAN.save}


@pytest.mark.parametrize(
    ("orphan", "changes"),
    [
        (stored(9, "bbbbbbbb-000009", NOW - DAY / 2), {}),
        (stored(9, "bbbbbbbb-000009", NOW - 2 * DAY), {}),
        (ORPHAN, {"live": {"bbbbbbbb-000009"}}),
        (ORPHAN, {"live": {"bbbbbbbb"}}),
        (ORPHAN, {"protected": {"bbbbbbbb-000009"}}),
        (stored(9, "photos", manifest=False), {}),
        (stored(9, "shard-000001", manifest=False), {}),
    ],
    ids=["young", "younger than the newest commit", "live", "live attempt", "pinned", "foreign", "foreign too"],
)
def test_a_save_that_never_committed_stays_when_it_is(orphan: StoredSave, changes: dict[str, Any]) -> None:
    assert deleted(plan([committed(10)], [orphan], keep_last=0, **changes)) == set()


@pytest.mark.parametrize(
    "save", ["0123abcd-c000001", "0123abcd-4567cdef", "0123abcd-e89b-12d3-a456-426614174000-c000123"]
)
def test_a_killed_upload_without_a_manifest_is_known_by_its_generated_id(save: str) -> None:
    assert deleted(plan([committed(10)], [stored(9, save, manifest=False)])) == {save}


def test_only_old_uploads_of_ours_that_nobody_continues_are_aborted() -> None:
    settings = RetentionSettings()
    assert may_abort_upload("0123abcd-c000001", NOW - 2 * DAY, settings, (), NOW)
    assert not may_abort_upload("0123abcd-c000001", NOW - DAY / 2, settings, (), NOW)
    assert not may_abort_upload("0123abcd-c000001", NOW - 2 * DAY, settings, {"0123abcd"}, NOW)
    assert not may_abort_upload("holiday", NOW - 2 * DAY, settings, (), NOW)


def look(
    committed: list[CommittedSave], stored: list[StoredSave], reserved: set[tuple[str, str]] | None = None
) -> SecondLook:
    return SecondLook(
        folders={(one.name, one.save): one for one in stored}, reserved=reserved or set(), committed=committed
    )


def test_each_series_of_snapshots_and_the_checkpoints_are_judged_by_themselves() -> None:
    found = [committed(step) for step in (10, 20)]
    found += [snapshot(number) for number in (1, 2, 3)] + [snapshot(9, "node-1")]
    assert deleted(plan(found, [])) == ids(10) | {snapshot(number).save for number in (1, 2)}
    # What is valid or was committed late in one series says nothing of another.
    assert deleted(plan(found, [], validated=[snapshot(9, "node-1").save])) == set()
    late = [snapshot(1, "node-1", NOW), snapshot(2, "node-1", NOW)]
    assert deleted(plan([*found, *late], [])) >= ids(10) | {snapshot(1, "node-1").save}


def test_a_snapshot_number_is_no_step_to_keep() -> None:
    found = [snapshot(number) for number in (10, 20, 30)]
    assert deleted(plan(found, [], every=10)) == {snapshot(number).save for number in (10, 20)}


def test_only_snapshots_and_orphans_beside_them_may_share_objects() -> None:
    orphans = [ORPHAN, folder(snapshot(7), "a.pt")]
    result = plan([committed(10), committed(20)], [*orphans, stored(10), stored(20)])
    # A reservation without any snapshot: somebody was about to share.
    assert {one.save: one.may_share for one in result.deletions} == {ORPHAN.save: True, "aaaaaaaa-000010": False}
    beside = plan([committed(10), committed(20), snapshot(8)], orphans)
    assert {one.save: one.may_share for one in beside.deletions} == {
        ORPHAN.save: True,
        snapshot(7).save: True,
        "aaaaaaaa-000010": False,
    }
    assert not any(one.may_share for one in plan([committed(10), committed(20)], [ORPHAN]).deletions)


def test_an_orphan_stays_until_something_newer_of_its_kind_is_committed() -> None:
    orphan = folder(snapshot(2), "a.pt")
    assert why_kept(plan([committed(10)], [orphan]))[orphan.save] == "nothing of its kind is committed"
    younger = folder(snapshot(2), "a.pt", modified_at=NOW - 4 * DAY)
    older = snapshot(1, modified_at=NOW - 4.5 * DAY)
    assert why_kept(plan([committed(10), older], [younger]))[orphan.save] == "it is younger than the newest commit"
    assert deleted(plan([committed(10), snapshot(3)], [younger])) == {orphan.save}


def test_a_reservation_shows_that_it_is_a_save() -> None:
    orphan = StoredSave(
        name="node-0", save="mine", sizes_bytes={"node-0/mine/.keepstep/base.json": 1}, modified_at=NOW - 5 * DAY
    )
    assert deleted(plan([snapshot(3)], [orphan])) == {"mine"}


def test_what_is_named_stays_with_the_manifest_and_the_reservation_goes() -> None:
    found = [snapshot(1), snapshot(2)]
    first, second = (folder(one, "a.pt", "b.pt") for one in found)
    planned = plan(found, [first, second])
    assert planned.deletions[0].size_bytes == 22
    prefix = f"node-0/{first.save}"
    (reduced,) = without_named(planned, {f"{prefix}/a.pt"}, look(found, [first, second])).deletions
    assert reduced.waves == ((found[0].key,), (f"{prefix}/b.pt",), (f"{prefix}/.keepstep/base.json",))
    assert (reduced.markers, reduced.size_bytes) == ((found[0].key,), 11)
    (whole,) = without_named(planned, set(), look(found, [first, second])).deletions
    assert (len(whole.data), whole.size_bytes) == (2, 22)


def test_a_leftover_of_which_everything_is_named_stays() -> None:
    leftover = folder(snapshot(1), "a.pt", reserves=False)
    found = [snapshot(2)]
    result = without_named(plan(found, [leftover]), {f"node-0/{leftover.save}/a.pt"}, look(found, [leftover]))
    assert (result.deletions, why_kept(result)[leftover.save]) == ((), "other snapshots share what is left of it")


def test_what_changed_since_the_plan_was_made_is_withheld() -> None:
    found = [snapshot(number) for number in (1, 2, 3)] + [committed(1), committed(2)]
    orphan = folder(snapshot(0), "a.pt")
    stored_now = [folder(one, "a.pt") for one in found[:3]] + [orphan]
    planned = plan(found, stored_now)
    every = {orphan.save, *(one.save for one in found[:2]), *ids(1)}
    assert deleted(planned) == every
    place = "node-0", found[0].save
    written = folder(snapshot(0), "a.pt", modified_at=NOW)
    for second, withheld in (
        (look(found, stored_now), set[str]()),
        (look(found, stored_now, {place}), {found[0].save}),
        (look([*found, snapshot(0)], stored_now), {orphan.save}),
        (look(found, [*stored_now[:3], written]), {orphan.save}),
        # Another prune has deleted what should remain; or only what is to be deleted anyway.
        (look([*found[:2], *found[3:]], stored_now), {one.save for one in found[:2]}),
        (look(found[1:], stored_now), set[str]()),
    ):
        assert deleted(without_reserved(planned, found, second)) == every - withheld


steps = st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=12)


@given(steps, st.data(), st.integers(0, 5), st.integers(0, 7))
def test_whatever_is_listed_the_promises_hold(
    found: list[int], data: st.DataObject, keep_last: int, every: int
) -> None:
    all_committed = [committed(step, modified_at=NOW - data.draw(st.integers(0, 9)) * DAY) for step in found]
    some = st.sets(st.sampled_from([one.save for one in all_committed]))
    validated, protected = data.draw(some), data.draw(some)
    orphans = [stored(step, f"cccccccc-{step:06d}", NOW - data.draw(st.floats(0, 9)) * DAY) for step in (1, 2)]
    result = plan(
        all_committed,
        [stored(one.step, one.save) for one in all_committed] + orphans,
        keep_last=keep_last,
        every=every,
        validated=validated,
        protected=protected,
    )
    gone = deleted(result)
    newest = newest_first(all_committed)
    assert newest[0].save not in gone
    assert max(newest, key=lambda one: one.modified_at).save not in gone
    assert not gone & protected
    assert not validated or validated - gone
    for index, one in enumerate(newest):
        if one.save in gone:
            assert keep_last
            newer = [other for other in newest[:index] if other.save in validated]
            assert sum(other.modified_at >= one.modified_at for other in newer) >= keep_last
            assert not every or one.step % every
    # Everything is accounted for, exactly once.
    assert sorted([*gone, *(one.save for one in result.kept)]) == sorted(
        [one.save for one in all_committed] + [one.save for one in orphans]
    )


@given(steps, steps, st.data(), st.integers(0, 4))
def test_above_a_horizon_the_verdict_is_that_over_everything(
    found: list[int], later: list[int], data: st.DataObject, keep_last: int
) -> None:
    settings = RetentionSettings(keep_last=keep_last)
    ages = st.integers(0, 9)
    old = [committed(step, modified_at=NOW - data.draw(ages) * DAY) for step in sorted(found, reverse=True)]
    with patch.object(horizon_rules, "_RECENT", data.draw(st.integers(1, 6))):
        horizon = horizon_of(old, settings)
    # Since the whole prune, only checkpoints above its horizon were committed, as far as anybody can know.
    new = [committed(step, f"bbbbbbbb-{step:06d}", NOW) for step in later if step >= horizon.step]
    everything = newest_first([*old, *new])
    visible = [one for one in everything if one.step >= horizon.step]
    validated = data.draw(st.sets(st.sampled_from([one.save for one in everything])))
    whole = plan(list(everything), [], keep_last=keep_last, validated=validated)
    recent = plan(visible, [], keep_last=keep_last, validated=validated - horizon.skipped(visible))
    assert deleted(recent) == deleted(whole) & {one.save for one in visible}
    assert horizon.skipped(visible) == skipped(everything) & {one.save for one in visible}


def test_a_store_with_an_order_of_its_own_has_no_horizon() -> None:
    listed = [committed(step) for step in range(1_000)]
    assert horizon_of(listed, RetentionSettings()).step == 0
    assert horizon_of(listed[::-1], RetentionSettings()).step == 500
    assert horizon_of(listed[::-1], RetentionSettings(keep_last=300)).step == 400


@given(steps, st.integers(1, 4))
def test_pruning_twice_changes_nothing_more(found: list[int], keep_last: int) -> None:
    first = plan([committed(step) for step in found], keep_last=keep_last)
    left = [committed(step) for step in found if f"aaaaaaaa-{step:06d}" not in deleted(first)]
    assert plan(left, keep_last=keep_last).deletions == ()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), unique=True, min_size=1), st.data(), st.integers(0, 3))
def test_whatever_the_series_each_is_pruned_as_if_it_were_alone(
    found: list[tuple[int, int]], data: st.DataObject, keep_last: int
) -> None:
    everything = [
        snapshot(step, f"node-{series}", NOW - data.draw(st.integers(0, 9)) * DAY) if series else committed(step)
        for series, step in found
    ]
    validated = data.draw(st.sets(st.sampled_from([one.save for one in everything])))
    together = deleted(plan(everything, [], keep_last=keep_last, validated=validated))
    alone: set[str] = set()
    for series in {one.series for one in everything}:
        group = [one for one in everything if one.series == series]
        gone = deleted(plan(group, [], keep_last=keep_last, validated=validated))
        assert newest_first(group)[0].save not in gone
        alone |= gone
    assert together == alone
