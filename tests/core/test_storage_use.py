"""What counts as what below a prefix of many runs, by keys, sizes and times alone."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.run_census import Census, StoredRun, UnfinishedUpload
from keepstep_agent.core.policies.storage_use import Age, AgeLimits, Amount, RunState, UseKind, usage_of, use_of
from keepstep_agent.core.stored.object_layout import (
    file_key,
    manifest_key,
    marker_key,
    parse_marker_key,
    parse_snapshot_key,
    pin_key,
)

DAY = 24 * 3600.0
NOW = 1000 * DAY
LIMITS = AgeLimits(now=NOW, abandoned_after_seconds=7 * DAY, orphan_age_seconds=DAY)
Stored = list[tuple[str, int, float]]


def info(step: int, kind: Kind = Kind.PERIODIC, *, name: str = "", save: str = "") -> SaveInfo:
    name = name or f"checkpoint-{step}"
    return SaveInfo(save=save or f"0123abcd-{step:06d}", name=name, step=step, kind=kind, world_size=1)


def save(run: str, one: SaveInfo, at: float, *, committed: bool = True, size_bytes: int = 1000) -> Stored:
    """The objects of a save: 100 bytes of manifest, 10 of marker."""
    keys = [(file_key(one, "model.pt"), size_bytes), (manifest_key(one, 0, 1), 100)]
    keys += [(marker_key(one), 10)] if committed else []
    return [(run + key, size, at) for key, size in keys]


def census(
    stored: Iterable[tuple[str, int, float]], uploads: Iterable[UnfinishedUpload] = ()
) -> tuple[dict[str, StoredRun], StoredRun]:
    found = Census()
    for key, size_bytes, at in stored:
        found.add(key, size_bytes, at)
        head, mark, rest = f"/{key}".partition("/.keepstep/")
        run, inner = f"{head}/"[1:], mark[1:] + rest
        if parsed := parse_marker_key(inner):
            step, save_id, output_key = parsed
            found.add_marker(
                run, CommittedSave(key=inner, step=step, save=save_id, output_key=output_key, modified_at=at)
            )
        elif snapshot := parse_snapshot_key(inner):
            found.add_marker(
                run,
                CommittedSave(
                    key=inner, step=snapshot.number, save=snapshot.save, series=snapshot.series, modified_at=at
                ),
            )
    runs, outside = found.runs(uploads)
    return {one.prefix: one for one in runs}, outside


def sizes(run: StoredRun, kinds: dict[str, Kind] | None = None) -> dict[UseKind, tuple[int, int]]:
    usage = usage_of(run, kinds or {}, LIMITS)
    return {kind: (amount.count, amount.size_bytes) for kind, amount in usage.kinds.items()}


@pytest.mark.parametrize("seed", range(5))
def test_runs_at_any_depth_are_found_in_a_listing_of_any_order(seed: int) -> None:
    stored = save("", info(1), NOW) + save("a/", info(2), NOW) + save("team/b/", info(3), NOW)
    stored += [*save("team/b/c/", info(4), NOW, committed=False), ("readme", 5, NOW), ("team/notes/x/y", 6, NOW)]
    random.Random(seed).shuffle(stored)

    runs, outside = census(stored)

    assert sorted(runs) == ["", "a/", "team/b/", "team/b/c/"]
    assert sizes(runs["a/"]) == {UseKind.CHECKPOINT: (1, 1100), UseKind.RECORD: (1, 10)}
    assert sizes(runs["team/b/c/"]) == {UseKind.IN_PROGRESS: (1, 1100)}
    # The run at the prefix itself takes what lies in no other run.
    assert sizes(runs[""])[UseKind.FOREIGN] == (2, 11)
    assert sizes(outside) == {}


def test_every_byte_is_counted_once() -> None:
    stored = save("a/", info(1), NOW - 2 * DAY) + save("a/", info(2, Kind.SNAPSHOT, name="node-0"), NOW)
    stored += save("a/", info(3), NOW - 40 * DAY, committed=False) + save("b/", info(1), NOW - 300 * DAY)
    stored += [("x", 7, NOW), ("a/notes.txt", 8, NOW), ("a/b/notes.txt", 9, NOW), ("a/c/d/notes.txt", 11, NOW)]
    stored += [(f"a/{pin_key('job', 0)}", 3, NOW)]

    runs, outside = census(stored)
    usages = [usage_of(one, {}, LIMITS) for one in (*runs.values(), outside)]

    assert sum(usage.size_bytes for usage in usages) == sum(size for _, size, _ in stored)
    assert sum(sum(usage.ages.values()) for usage in usages) == sum(size for _, size, _ in stored)
    assert sizes(runs["a/"])[UseKind.LEFTOVER] == (1, 1100)
    assert usages[0].ages[Age.QUARTER] == 1100
    assert usages[1].ages[Age.OLDER] == 1110


def test_what_looks_like_a_run_in_a_save_is_a_part_of_that_save() -> None:
    outer = info(1, Kind.SNAPSHOT, name="node-0")
    inner = save(f"a/node-0/{outer.save}/out/copy/", info(9), NOW)

    runs, _ = census(save("a/", outer, NOW) + inner)

    assert list(runs) == ["a/"]
    assert sizes(runs["a/"])[UseKind.SNAPSHOT] == (1, 1100 + 1110)


def test_objects_of_a_pruned_snapshot_are_no_leftovers_while_its_series_lives() -> None:
    old = save("a/", info(1, Kind.SNAPSHOT, name="node-0"), NOW - 90 * DAY, committed=False)
    runs, _ = census(old + save("a/", info(2, Kind.SNAPSHOT, name="node-0"), NOW))
    assert sizes(runs["a/"])[UseKind.SNAPSHOT] == (1, 2200)

    runs, _ = census(old + save("a/", info(2, Kind.SNAPSHOT, name="node-1"), NOW))
    assert sizes(runs["a/"])[UseKind.LEFTOVER] == (1, 1100)


def test_a_folder_that_does_not_prove_to_be_a_save_is_foreign() -> None:
    stored = [*save("a/", info(1), NOW), ("a/plots/may/loss.png", 50, NOW - 90 * DAY)]
    stored += [("a/checkpoint-2/0123abcd-000002/model.pt", 60, NOW - 90 * DAY)]

    runs, _ = census(stored)

    assert sizes(runs["a/"])[UseKind.FOREIGN] == (1, 50)
    assert sizes(runs["a/"])[UseKind.LEFTOVER] == (1, 60)


def test_unfinished_uploads_belong_to_their_run_and_are_orphaned_when_they_are_old() -> None:
    uploads = [
        UnfinishedUpload(key="a/checkpoint-2/x/model.pt", started_at=NOW - 2 * DAY, size_bytes=70),
        UnfinishedUpload(key="a/checkpoint-3/x/model.pt", started_at=NOW, size_bytes=80),
        UnfinishedUpload(key="elsewhere/model.pt", started_at=NOW - 2 * DAY, size_bytes=90),
    ]
    # A directory as the destination shows them in the folders of its runs.
    aside = [
        ("a/.keepstep/uploads/1/data", 5, NOW - 9 * DAY),
        ("a/.keepstep/uploads/1/part-00001", 1, NOW - 9 * DAY),
        ("a/.keepstep/uploads/2/data", 4, NOW),
    ]

    runs, outside = census(save("a/", info(1), NOW) + aside, uploads)

    assert sizes(runs["a/"])[UseKind.ORPHANED_UPLOAD] == (2, 76)
    assert sizes(runs["a/"])[UseKind.UPLOAD_IN_PROGRESS] == (2, 84)
    assert sizes(outside) == {UseKind.ORPHANED_UPLOAD: (1, 90)}


def test_a_kind_is_told_where_its_marker_was_read() -> None:
    (run,) = census(save("a/", info(1), NOW) + save("a/", info(2), NOW) + save("a/", info(3), NOW))[0].values()
    kinds = {marker_key(info(1)): Kind.JUST_IN_TIME, marker_key(info(3)): Kind.FINAL}

    assert sizes(run, kinds) == {
        UseKind.JUST_IN_TIME: (1, 1100),
        UseKind.CHECKPOINT: (1, 1100),
        UseKind.FINAL: (1, 1100),
        UseKind.RECORD: (3, 30),
    }


FRESH, STALE = NOW - 6 * DAY, NOW - 8 * DAY
SNAPSHOT = info(5, Kind.SNAPSHOT, name="node-0")


@pytest.mark.parametrize(
    ("stored", "kinds", "state"),
    [
        (save("", info(1), FRESH), {}, RunState.ACTIVE),
        (save("", info(1), STALE), {}, RunState.ABANDONED),
        (save("", info(1), STALE), {marker_key(info(1)): Kind.FINAL}, RunState.COMPLETE),
        (save("", info(1), STALE), {marker_key(info(1)): Kind.JUST_IN_TIME}, RunState.ABANDONED),
        # It was continued after its end.
        (save("", info(1), STALE) + save("", info(2), STALE), {marker_key(info(1)): Kind.FINAL}, RunState.ABANDONED),
        # A second training has begun in a directory of its own.
        (
            save("", info(9), STALE) + save("", replace(info(1), directory="two"), FRESH),
            {marker_key(info(9)): Kind.FINAL},
            RunState.ACTIVE,
        ),
        # Work goes on, and nothing of it is committed: that is a failure, too.
        (save("", info(1), STALE) + save("", info(2), NOW, committed=False), {}, RunState.ABANDONED),
        (save("", info(1), STALE) + save("", SNAPSHOT, FRESH), {}, RunState.ACTIVE),
        (save("", SNAPSHOT, STALE), {}, RunState.QUIET),
        (save("", info(1), FRESH, committed=False), {}, RunState.ACTIVE),
        (save("", info(1), STALE, committed=False), {}, RunState.ABANDONED),
        ([(pin_key("job", 0), 5, STALE)], {}, RunState.ABANDONED),
    ],
)
def test_a_run_stands_as_its_newest_checkpoint_and_its_last_commit_say(
    stored: Stored, kinds: dict[str, Kind], state: RunState
) -> None:
    (run,) = census(stored)[0].values()
    assert use_of(run, kinds, LIMITS, every_kind=False).state is state


def test_a_step_that_two_attempts_saved_is_complete_if_one_of_them_was_final() -> None:
    other = info(3, save="89abcdef-000003")
    (run,) = census(save("", info(3), STALE) + save("", other, STALE))[0].values()
    assert {one.save for one in run.newest} == {info(3).save, other.save}

    found = use_of(run, {marker_key(other): Kind.FINAL}, LIMITS, every_kind=True)

    assert (found.state, found.step, found.committed_at) == (RunState.COMPLETE, 3, STALE)
    assert found.usage.amount_of((UseKind.FINAL, UseKind.CHECKPOINT)) == Amount(count=2, size_bytes=2200)
    assert UseKind.FINAL in found.usage.kinds
