"""Which kept checkpoints lose their optimizer's files, and the marker that says so."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.listings import DAY, NOW, committed, deleted, folder, ids, plan, snapshot
from tests.core.retention_oracle import wanted_by_policies

from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import (
    CommitMarker,
    FileEntry,
    Kind,
    ManifestReference,
    PackPlace,
    SaveInfo,
    WeightsOnly,
    is_optimizer_file,
)
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.retention.deletions import PrunePlan, StoredSave
from keepstep_agent.core.policies.retention.weights_only import Reduction, optimizer_keys, plan_reductions
from keepstep_agent.core.settings.values import Duration, RetentionSettings
from keepstep_agent.core.stored.weights_marker import decode_weights_marker, encode_weights_marker

_KEEP = RetentionSettings(keep_last=1, keep_every_steps=1, weights_only_after=Duration(2 * DAY))
_FILES = ("model.safetensors", "optimizer.pt", "optimizer_0/__0_0.distcp", "scheduler.pt")


def stored(one: CommittedSave, *files: str) -> StoredSave:
    prefix = f"checkpoint-{one.step}/{one.save}"
    sizes_bytes = {f"{prefix}/{file}": 10 for file in files or _FILES}
    sizes_bytes |= {f"{prefix}/.keepstep/manifest-00000-00001.json": 1, f"{prefix}/.keepstep/pack-00000-00000.tar": 1}
    return StoredSave(
        name=f"checkpoint-{one.step}", save=one.save, sizes_bytes=sizes_bytes, modified_at=one.modified_at
    )


def reductions(
    found: list[CommittedSave],
    data: list[StoredSave] | None = None,
    *,
    keep: RetentionSettings = _KEEP,
    **changes: Any,
) -> dict[str, Reduction]:
    data = [stored(one) for one in found] if data is None else data
    values: dict[str, Any] = {
        "validated": {one.save for one in found if not one.weights_only},
        "damaged": (),
        "protected": (),
        "live": (),
    }
    values |= {name: value for name, value in changes.items() if name != "recorded"}
    result: PrunePlan = plan(found, data, settings=keep, **values)
    recorded = changes.get("recorded", {})
    planned = plan_reductions(result, found, data, keep, recorded=recorded, **values)
    return {one.committed.save: one for one in planned}


def daily(*steps: int) -> list[CommittedSave]:
    """One a day, the last one at `NOW`."""
    return [committed(step, modified_at=NOW - (len(steps) - 1 - age) * DAY) for age, step in enumerate(steps)]


def test_an_old_checkpoint_that_stays_loses_its_optimizers_files_and_no_others() -> None:
    found = reductions(daily(1, 2, 3, 4, 5))
    assert set(found) == ids(1, 2)
    prefix = "checkpoint-1/aaaaaaaa-000001/"
    assert found["aaaaaaaa-000001"].keys == (f"{prefix}optimizer.pt", f"{prefix}optimizer_0/__0_0.distcp")
    assert found["aaaaaaaa-000001"].size_bytes == 20


def test_what_goes_altogether_is_not_reduced_before() -> None:
    assert reductions(daily(1, 2, 3, 4, 5), keep=replace(_KEEP, keep_every_steps=0)) == {}


@pytest.mark.parametrize(
    ("changes", "left_whole"),
    [
        ({"validated": ids(1, 2)}, ids(2)),
        ({"damaged": ids(1)}, ids(1)),
        ({"protected": ids(2)}, ids(2)),
        ({"live": ids(1)}, ids(1)),
        ({"live": {"aaaaaaaa"}}, ids(1, 2)),
    ],
)
def test_what_a_restore_or_a_writer_may_need_stays_whole(changes: dict[str, Any], left_whole: set[str]) -> None:
    assert set(reductions(daily(1, 2, 3, 4, 5), **changes)) == ids(1, 2) - left_whole


def test_after_a_run_fell_back_the_newest_by_step_and_by_time_stay_whole() -> None:
    # 90 was skipped, and 50 was committed last.
    found = [committed(step, modified_at=NOW - age * DAY) for step, age in ((10, 9), (90, 8), (40, 7), (50, 1))]
    assert set(reductions(found)) == ids(10, 40)


def test_without_a_time_or_with_everything_kept_nothing_is_dropped() -> None:
    for keep in (replace(_KEEP, weights_only_after=Duration(0)), replace(_KEEP, keep_last=0)):
        assert reductions(daily(1, 2, 3, 4, 5), keep=keep) == {}


def test_something_of_a_checkpoint_always_stays() -> None:
    found = daily(1, 2, 3, 4, 5)
    data = [stored(one, "optimizer.pt", "optimizer.bin") for one in found]
    assert reductions(found, data) == {}
    assert reductions(found, keep=replace(_KEEP, optimizer_files="*")) == {}
    assert reductions(found, keep=replace(_KEEP, optimizer_files="momentum*")) == {}


def test_snapshots_keep_all_their_files() -> None:
    found = [snapshot(number, modified_at=NOW - (20 - number) * DAY) for number in (10, 11, 12)]
    keep = replace(_KEEP, keep_daily=9)
    assert reductions(found, [folder(one, "model.pt", "optimizer.pt") for one in found], keep=keep) == {}


def test_an_interrupted_reduction_goes_on_by_the_patterns_in_the_marker() -> None:
    old, *newer = daily(1, 2, 3)
    left = replace(old, weights_only=True)
    found = reductions([left, *newer], keep=replace(_KEEP, optimizer_files="x*"), recorded={old.save: ("sched*",)})
    assert {save: one.keys for save, one in found.items()} == {old.save: ("checkpoint-1/aaaaaaaa-000001/scheduler.pt",)}
    assert reductions([left, *newer], recorded={}) == {}


def test_weights_alone_are_judged_by_the_policies_and_justify_no_deletion() -> None:
    one, two, three = daily(1, 2, 3)
    left = replace(three, weights_only=True)
    assert deleted(plan([one, two, left], keep_last=1, validated=ids(1, 2))) == ids(1)
    assert deleted(plan([replace(one, weights_only=True), two, three], keep_last=1, validated=ids(2, 3))) == ids(1, 2)


def test_a_commit_marker_that_came_back_goes_again_and_one_of_an_interrupted_prune_begins_anew() -> None:
    found = daily(1, 2, 3, 4, 5)
    data = [stored(found[0], "model.safetensors"), *map(stored, found[1:])]
    recorded = {one.save: ("optimizer.pt",) for one in found[:2]}
    reduced = reductions(found, data, recorded=recorded)
    assert {save: one.keys for save, one in reduced.items()} == {
        found[0].save: (),
        found[1].save: ("checkpoint-2/aaaaaaaa-000002/optimizer.pt",),
    }


def test_a_save_with_both_markers_loses_both_first() -> None:
    one, two = daily(1, 2)
    result = plan([one, two], weights_markers={one.save: "second"})
    assert [gone.waves[0] for gone in result.deletions] == [(one.key, "second")]


def test_where_only_weights_are_left_nothing_is_deleted() -> None:
    found = [replace(one, weights_only=True) for one in daily(1, 2, 3)]
    assert plan(found, validated=()).refused == "the destination has no committed checkpoint"
    assert reductions(found, recorded={one.save: ("optimizer*",) for one in found}) == {}


def test_time_alone_drops_nothing_however_late_it_is() -> None:
    long_ago = [replace(one, modified_at=one.modified_at - 5 * DAY) for one in daily(1, 2, 3, 4, 5)]
    assert set(reductions(long_ago)) == ids(1, 2)


@st.composite
def _histories(draw: st.DrawFn) -> list[CommittedSave]:
    found, step, moment = [], 0, NOW - 40 * DAY
    for number in range(draw(st.integers(1, 12))):
        step = max(0, step + draw(st.integers(-6, 9)))
        moment += draw(st.sampled_from([0.0, 0.3, 1.0, 5.0])) * DAY
        save = f"{number % 2:08x}-{number:06d}"
        found.append(replace(committed(step, save, min(moment, NOW)), weights_only=draw(st.integers(0, 5)) == 0))
    return found


_KEEPS = st.builds(
    RetentionSettings,
    keep_last=st.sampled_from([1, 1, 2, 3]),
    keep_every_steps=st.sampled_from([0, 1, 4]),
    keep_daily=st.sampled_from([0, 2, 30]),
    weights_only_after=st.sampled_from([Duration(1), Duration(3 * DAY)]),
)


@given(_histories(), _KEEPS, st.data())
@settings(max_examples=300)
def test_whatever_the_history_what_restore_may_take_stays_whole(
    found: list[CommittedSave], keep: RetentionSettings, data: st.DataObject
) -> None:
    whole = [one for one in found if not one.weights_only]
    saves = [one.save for one in whole]
    validated = set(data.draw(st.sets(st.sampled_from(saves or [""]))))
    protected = set(data.draw(st.sets(st.sampled_from(saves or [""]), max_size=1)))
    reduced = reductions(found, keep=keep, validated=validated, protected=protected)
    stays = {one.save for one in whole} - set(reduced)
    newest = sorted(whole, key=lambda one: (one.step, one.save), reverse=True)
    valid = [one.save for one in newest if one.save in validated]
    if whole and newest[0].step >= max(one.step for one in found):
        assert newest[0].save in stays
    assert set(valid[:1]) <= stays
    assert protected - {""} <= stays
    last_at = max((one.modified_at for one in whole), default=0.0)
    assert all(last_at - one.committed.modified_at > keep.weights_only_after for one in reduced.values())
    # What the policies want of everything is still there, whole or not.
    kept = {one.save for one in found} - deleted(plan(found, [stored(one) for one in found], settings=keep))
    assert wanted_by_policies(found, keep) <= kept


@pytest.mark.parametrize(
    ("path", "is_optimizer"),
    [
        ("optimizer.pt", True),
        ("a/optimizer_0/rank.pt", True),
        ("my_optimizer.pt", False),
        ("Optimizer.pt", False),
        ("model.safetensors", False),
    ],
)
def test_a_pattern_is_for_the_name_of_a_file_or_of_a_folder(path: str, is_optimizer: bool) -> None:
    assert is_optimizer_file(path, ["optimizer*"]) == is_optimizer
    save = StoredSave(name="n", save="s", sizes_bytes={f"n/s/{path}": 1, "n/s/w": 1}, modified_at=0.0)
    assert bool(optimizer_keys(save, ["optimizer*"])) == is_optimizer


_MARKER = CommitMarker(
    info=SaveInfo(save="aaaaaaaa-000007", name="checkpoint-7", step=7, kind=Kind.PERIODIC, world_size=2),
    saved_at=5.5,
    size_bytes=100,
    file_count=4,
    manifests=(ManifestReference(first_rank=0, rank_count=2, size_bytes=90, checksum=3),),
    weights_only=WeightsOnly(
        committed_at=6.5, optimizer_files=("optimizer*", "*.opt"), dropped_files=2, dropped_bytes=60
    ),
)


def test_a_weights_marker_says_all_that_the_commit_marker_said() -> None:
    assert decode_weights_marker(encode_weights_marker(_MARKER), "key") == _MARKER
    assert _MARKER.left_bytes == 40


def test_files_in_packs_are_never_dropped() -> None:
    entry = FileEntry(path="optimizer.pt", size_bytes=0, part_size_bytes=1, checksums=())
    assert _MARKER.has_dropped(entry)
    assert not _MARKER.has_dropped(replace(entry, place=PackPlace(number=0, offset_bytes=0)))
    assert not replace(_MARKER, weights_only=None).has_dropped(entry)


@pytest.mark.parametrize(
    "change",
    [
        {"dropped_bytes": 101},
        {"dropped_files": 4},
        {"optimizer_files": ()},
        {"optimizer_files": ("",)},
        {"optimizer_files": ("x" * 101,)},
        {"optimizer_files": ("x",) * 33},
        {"committed_at": -1.0},
    ],
)
def test_a_weights_marker_that_no_prune_writes_is_refused(change: dict[str, Any]) -> None:
    assert _MARKER.weights_only is not None
    forged = replace(_MARKER, weights_only=replace(_MARKER.weights_only, **change))
    with pytest.raises(StoreError, match="key") as failure:
        decode_weights_marker(encode_weights_marker(forged), "key")
    assert failure.value.kind is ErrorKind.CHECKPOINT_CORRUPT
