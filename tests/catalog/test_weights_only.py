"""A prune that drops the optimizer's files of old checkpoints: what is left is whole, and no restore takes it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs
from tests.core.listings import why_kept
from tests.fakes.fake_store import FakeStore
from tests.fakes.memory_store import MemoryStore
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_committed, list_weights_only, read_marker
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.catalog.reading import load
from keepstep_agent.catalog.usage import storage_use
from keepstep_agent.catalog.weights_only import refuse_fresh_start
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.policies.restore_choice import Pin, encode_pin
from keepstep_agent.core.policies.storage_use import AgeLimits, Amount, RunState, UseKind
from keepstep_agent.core.settings.values import Duration, RetentionSettings
from keepstep_agent.core.stored.object_layout import (
    COMMITS_PREFIX,
    RESUME_PREFIX,
    WEIGHTS_PREFIX,
    damage_key,
    file_key,
    pin_key,
)
from keepstep_agent.core.stored.weights_marker import decode_weights_marker, encode_weights_marker
from keepstep_agent.restore.agreement import Agreement
from keepstep_agent.restore.init_step import Restored

_DAY = 24 * 3600.0
_KEEP = RetentionSettings(keep_last=2, keep_every_steps=1, weights_only_after=Duration(_DAY))
_REDUCED = ("checkpoint-1/", "checkpoint-2/", "checkpoint-3/")
_MOST_WRITES = 60
_Answer = TypeVar("_Answer")


def _files(step: int) -> dict[str, bytes]:
    return {"model.pt": b"m" * (10 + step), "optimizer.pt": b"o" * 100, "optimizer_0/a.distcp": b"p" * 50}


async def _fill(store: MemoryStore, steps: int = 5) -> None:
    """A checkpoint a day."""
    for step in range(1, steps + 1):
        await store_checkpoint(store, step, ranks=[_files(step), {f"model-1-{step}.pt": b"n", "optimizer-1.bin": b"q"}])
        store.now += _DAY


async def _steps(store: MemoryStore) -> tuple[list[int], list[int]]:
    """Return the steps that are whole, and those of which only the weights are left; every byte of both is right."""
    committed = await list_committed(store)
    saves = {one.save for one in committed}
    left = [one for one in await list_weights_only(store) if one.save not in saves]
    for one in (*committed, *left):
        assert await check(store, one) == ()
    for one in left:
        checkpoint = await load(store, one)
        assert [file.entry.path for file in checkpoint.files] == sorted(["model.pt", f"model-1-{one.step}.pt"])
        assert checkpoint.marker.left_bytes == checkpoint.size_bytes
    return [one.step for one in committed], [one.step for one in left]


async def _restore(store: MemoryStore, volume: Path, *, attempt: str) -> Restored | None:
    return await restore(
        store,
        checkpoint_directory=volume / "checkpoints",
        volume=volume,
        state_directory=volume / "state",
        attempt=attempt,
    )


async def test_a_prune_drops_what_is_old_and_leaves_the_rest_whole() -> None:
    store = FakeStore()
    await _fill(store)
    committed_at = {one.step: one.modified_at for one in await list_committed(store)}
    before = len(store.objects)
    shown = await prune(store, _KEEP, now=store.now, dry_run=True)
    assert [one.committed.step for one in shown.reductions] == [3, 2, 1]
    assert len(store.objects) == before
    report = await prune(store, _KEEP, now=store.now)
    assert (report.reductions, report.freed_bytes) == (shown.reductions, 3 * 151)
    assert await _steps(store) == ([5, 4], [3, 2, 1])
    assert len(store.objects) == before - 3 * 3
    for one in await list_weights_only(store):
        left = (await read_marker(store, one)).weights_only
        assert left is not None
        assert (left.committed_at, left.dropped_files, left.dropped_bytes) == (committed_at[one.step], 3, 151)
    again = await prune(store, _KEEP, now=store.now)
    assert (again.reductions, again.plan.deletions) == ((), ())


async def test_a_restore_takes_whole_checkpoints_only(tmp_path: Path) -> None:
    store = FakeStore()
    await _fill(store)
    await prune(store, _KEEP, now=store.now)
    # Both whole ones are lost: a restore would go on with an older one.
    for one in await list_committed(store):
        del store.objects[file_key((await read_marker(store, one)).info, "model.pt")]
    with pytest.raises(StoreError, match="none of 2 committed checkpoints can be restored"):
        await _restore(store, tmp_path, attempt="one")


async def test_a_destination_with_weights_alone_is_no_fresh_start(tmp_path: Path) -> None:
    store = FakeStore()
    await refuse_fresh_start(store)
    await _fill(store)
    await prune(store, _KEEP, now=store.now)
    for key in [key for key in store.objects if key.startswith(COMMITS_PREFIX)]:
        del store.objects[key]
    with pytest.raises(StoreError, match="no whole checkpoint any more") as failure:
        await _restore(store, tmp_path, attempt="one")
    assert failure.value.kind is ErrorKind.CHECKPOINT_CORRUPT
    # A start that is pinned to begin at step 0 knows that.
    agreement = Agreement(store, "two", partial(list_committed, store), place="", node_rank=0, timeout_seconds=9.0)
    assert await agreement.begin(Pin(attempt="two"))
    assert await _restore(store, tmp_path, attempt="two") is None


async def test_weights_that_no_policy_wants_any_more_go_altogether() -> None:
    store = FakeStore()
    await _fill(store)
    await prune(store, _KEEP, now=store.now)
    report = await prune(store, replace(_KEEP, keep_every_steps=2), now=store.now)
    assert await _steps(store) == ([5, 4], [2])
    assert len(report.plan.deletions) == 2
    assert not [key for key in store.objects if key.startswith(("checkpoint-1/", "checkpoint-3/"))]


async def test_a_rule_by_days_goes_on_with_the_times_of_the_commits() -> None:
    store = FakeStore()
    daily = replace(_KEEP, keep_last=1, keep_every_steps=0, keep_daily=3, weights_only_after=Duration(_DAY / 2))
    await _fill(store)
    await prune(store, daily, now=store.now)
    assert await _steps(store) == ([5], [4, 3])
    await store_checkpoint(store, 6, ranks=[_files(6)])
    await prune(store, daily, now=store.now)
    assert await _steps(store) == ([6], [5, 4])


async def test_what_has_a_damaged_marker_stays_as_it_is() -> None:
    store = FakeStore()
    await _fill(store)
    marker = next(one for one in await list_committed(store) if one.step == 2)
    info = (await read_marker(store, marker)).info
    store.objects[marker.key].body = store.objects[marker.key].body[:-9]
    await prune(store, _KEEP, now=store.now)
    assert {marker.key, file_key(info, "optimizer.pt")} <= store.objects.keys()
    left = next(one for one in await list_weights_only(store) if one.step == 1)
    store.objects[left.key].body = b"x"
    before = set(store.objects)
    report = await prune(store, _KEEP, now=store.now)
    assert set(store.objects) == before
    assert report.reductions == ()
    assert why_kept(report.plan)[left.save] == "the marker of its weights cannot be read"


async def test_du_counts_weights_alone_as_such() -> None:
    store = FakeStore()
    await _fill(store)
    await prune(store, _KEEP, now=store.now)
    limits = AgeLimits(now=store.now, abandoned_after_seconds=7 * _DAY, orphan_age_seconds=_DAY)
    for every_kind in (False, True):
        found = await storage_use(store, limits, every_kind=every_kind)
        [run] = found.runs
        assert (run.state, run.step) == (RunState.ACTIVE, 5)
        folders = [store.objects[key] for key in store.objects if key.startswith(_REDUCED)]
        size_bytes = sum(len(one.body) for one in folders)
        assert run.usage.kinds[UseKind.WEIGHTS_ONLY] == Amount(count=3, size_bytes=size_bytes)
        assert UseKind.LEFTOVER not in run.usage.kinds
        assert found.total.size_bytes == sum(len(one.body) for one in store.objects.values())


class _KilledError(Exception):
    """The prune ends here."""


class _MortalStore(MemoryStore):
    """Dies at its request number `at`, before it or, with `late`, after it."""

    def __init__(self, at: int, *, late: bool) -> None:
        super().__init__()
        self.at, self.late = at, late
        self.armed = False

    async def _request(self, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
        if not self.armed:
            return await work()
        self.at -= 1
        if self.at == -1 and not self.late:
            raise _KilledError
        answer = await work()
        if self.at == -1:
            raise _KilledError
        return answer

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        await self._request(partial(super().put, key, body, if_absent=if_absent))

    async def delete(self, key: str) -> None:
        await self._request(partial(super().delete, key))


@pytest.mark.parametrize("late", [False, True], ids=["before a write", "after a write"])
async def test_a_prune_killed_at_any_write_loses_nothing_and_the_next_one_ends_it(late: bool) -> None:
    for at in range(_MOST_WRITES):
        store = _MortalStore(at, late=late)
        await _fill(store)
        store.armed = True
        try:
            await prune(store, _KEEP, now=store.now)
            ended = True
        except _KilledError:
            ended = False
        store.armed = False
        whole, left = await _steps(store)
        assert sorted([*whole, *left]) == [1, 2, 3, 4, 5]
        assert {4, 5} <= set(whole)
        # With other names: those in a marker that is there count.
        other = replace(_KEEP, optimizer_files="model*", keep_last=5)
        await prune(store, other, now=store.now)
        await prune(store, _KEEP, now=store.now)
        assert await _steps(store) == ([5, 4], [3, 2, 1])
        for one in await list_weights_only(store):
            checkpoint = await load(store, one)
            prefix = f"checkpoint-{one.step}/{one.save}/"
            own = {key.removeprefix(prefix) for key in store.objects if key.startswith(prefix)}
            assert {name for name in own if not name.startswith(".keepstep/")} >= {
                file.entry.path for file in checkpoint.files
            }
            assert "optimizer.pt" not in own
        if ended:
            break
    assert ended
    assert at > 9


class _OtherPatternsStore(FakeStore):
    """Another prune, with other names, writes its marker a moment before ours."""

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        if key.startswith(WEIGHTS_PREFIX) and key not in self.objects:
            marker = decode_weights_marker(body, key)
            assert marker.weights_only is not None
            other = replace(marker.weights_only, optimizer_files=("optimizer.pt",), dropped_files=1, dropped_bytes=100)
            await super().put(key, encode_weights_marker(replace(marker, weights_only=other)), if_absent=True)
        await super().put(key, body, if_absent=if_absent)


async def test_of_two_prunes_with_different_names_the_first_marker_says_what_goes() -> None:
    store = _OtherPatternsStore()
    await _fill(store)
    await prune(store, _KEEP, now=store.now)
    left = await list_weights_only(store)
    assert [one.step for one in left] == [3, 2, 1]
    for one in left:
        assert await check(store, one) == ()
        paths = {file.entry.path for file in (await load(store, one)).files}
        assert paths == {"model.pt", "optimizer_0/a.distcp", f"model-1-{one.step}.pt", "optimizer-1.bin"}


class _RefusingStore(FakeStore):
    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        if key.startswith(WEIGHTS_PREFIX):
            raise StoreError(ErrorKind.ACCESS_DENIED, "not there")
        await super().put(key, body, if_absent=if_absent)


async def test_a_store_that_refuses_the_marker_keeps_whole_checkpoints_and_the_prune_says_so() -> None:
    store = _RefusingStore()
    await _fill(store)
    before = set(store.objects)
    with pytest.raises(StoreError, match="not there"):
        await prune(store, _KEEP, now=store.now)
    assert set(store.objects) == before


class _LostAnswerStore(FakeStore):
    """Writes the marker, and answers that it failed."""

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        await super().put(key, body, if_absent=if_absent)
        if key.startswith(WEIGHTS_PREFIX):
            raise StoreError(ErrorKind.UNREACHABLE, "no answer")


@pytest.mark.parametrize("conditional_put", [True, False])
async def test_a_lost_answer_and_a_store_without_conditions_change_nothing(conditional_put: bool) -> None:
    store = _LostAnswerStore(conditional_put=conditional_put)
    await _fill(store)
    await prune(store, _KEEP, now=store.now)
    assert await _steps(store) == ([5, 4], [3, 2, 1])
    # With other names, what is written is not written again.
    await prune(store, replace(_KEEP, optimizer_files="model*"), now=store.now)
    assert await _steps(store) == ([5, 4], [3, 2, 1])


async def test_a_commit_marker_that_comes_back_late_is_removed_again() -> None:
    store = FakeStore()
    await _fill(store)
    markers = {one.key: store.objects[one.key] for one in await list_committed(store)}
    await prune(store, _KEEP, now=store.now)
    store.objects.update(markers)
    await prune(store, _KEEP, now=store.now)
    assert await _steps(store) == ([5, 4], [3, 2, 1])


@pytest.mark.parametrize("kind", ["pin", "damage"])
async def test_a_run_that_starts_meanwhile_ends_the_work(kind: str) -> None:
    store = _StartingStore(pin_key("two", 0) if kind == "pin" else damage_key("x"))
    await _fill(store)
    report = await prune(store, _KEEP, now=store.now)
    # It starts while the first one loses its files.
    assert len(report.reductions) == 1
    assert len((await _steps(store))[0]) == 4
    if kind == "damage":
        await prune(store, _KEEP, now=store.now)
        assert await _steps(store) == ([5, 4], [3, 2, 1])


class _StartingStore(FakeStore):
    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    async def delete(self, key: str) -> None:
        await super().delete(key)
        if self._key not in self.objects:
            await self.put(self._key, encode_pin(Pin(attempt="two")))


async def test_what_a_pin_names_stays_whole_however_old_the_pin_is() -> None:
    store = FakeStore()
    await _fill(store, 2)
    one = (await list_committed(store))[-1]
    await store.put(
        pin_key("one", 0),
        encode_pin(Pin(attempt="one", markers=(one.key,))),
    )
    for step in (3, 4, 5):
        store.now += 3 * _DAY
        await store_checkpoint(store, step, ranks=[_files(step)])
    await prune(store, _KEEP, now=store.now)
    assert [found.step for found in await list_committed(store)] == [5, 4, 1]


@pytest.mark.parametrize("refused", [1, 2])
async def test_what_the_stores_own_retention_protects_keeps_its_optimizer(refused: int) -> None:
    """`refused`: which deletion: that of the commit marker, or that of the first file."""
    store = FakeStore()
    await _fill(store, steps=4)
    delete, deletions = store.delete, 0

    async def refuse(key: str) -> None:
        nonlocal deletions
        deletions += 1
        if deletions == refused:
            raise StoreError(ErrorKind.OBJECT_LOCKED, f"{key} is protected")
        await delete(key)

    store.delete = refuse  # type: ignore[method-assign]
    report = await prune(store, replace(_KEEP, keep_last=1), now=store.now)
    assert [one.committed.step for one in report.reductions] == [1]
    if refused == 1:
        assert await _steps(store) == ([4, 3, 2], [1])
    await prune(store, replace(_KEEP, keep_last=1), now=store.now)
    assert await _steps(store) == ([4, 3], [2, 1])


class _ArchivedPins(FakeStore):
    """What a lifecycle rule has moved to an archive is listed, and not given."""

    def called(self, method: str, key: str) -> StoreError | None:
        if method == "get" and key.startswith(RESUME_PREFIX):
            return StoreError(ErrorKind.REQUEST_REFUSED, f"{key}: the object is archived")
        return super().called(method, key)


async def test_an_old_pin_that_is_archived_keeps_all_files_and_saves_are_pruned_all_the_same() -> None:
    store = _ArchivedPins()
    await store.put(pin_key("job-1", 0), encode_pin(Pin(attempt="job-1", markers=())))
    await _fill(store)
    with capture_logs() as logs:
        report = await prune(store, replace(_KEEP, keep_every_steps=2), now=store.now)
    assert await _steps(store) == ([5, 4, 2], [])
    assert not report.reductions
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["retention.weights_only_waits"]
