"""When the agent looks at everything and when only at the newest, and what it removes where retention is off."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.core.play import Play
from tests.fakes.fake_ready_store import FakeReadyStore, StoreClock
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.core.agent.commands import Prune
from keepstep_agent.core.agent.events import Committed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.policies.restore_choice import Pin, encode_pin
from keepstep_agent.core.policies.retention import horizon as horizon_rules
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import RESUME_PREFIX, pin_key, save_prefix
from keepstep_agent.runtime.work import pruner
from keepstep_agent.runtime.work.pruner import LeftoverRemover, Pruner

DAY = 24 * 3600.0


class _MayNotDelete(FakeStore):
    async def delete(self, key: str) -> None:
        self.calls.append(("delete", key))
        raise StoreError(ErrorKind.ACCESS_DENIED, "no leave to delete", hint="")


async def _with_two_old_pins(store: FakeStore) -> FakeStore:
    for attempt in ("first", "second"):
        await store.put(pin_key(attempt, 0), encode_pin(Pin(attempt=attempt)))
        store.now += 2 * DAY
    store.calls.clear()
    return store


async def _calls_after_a_commit(store: FakeStore, settings: RetentionSettings, *, rank: int = 0) -> list[str]:
    """What is asked of the store until nothing more is."""
    play = Play()
    play.announce("save")
    if rank:
        (checkpoint,) = play.state.checkpoints.values()
        checkpoint.contributions = {rank: replace(checkpoint.contributions[0])}
    remover = LeftoverRemover(cast(Any, FakeReadyStore(store)), cast(Any, StoreClock(store)), settings)
    watching = asyncio.ensure_future(remover.watch())
    for _ in range(2):
        remover.hear(play.state, Committed(at=play.now, work=WorkId(Operation.COMMIT, "save")))
        async with asyncio.timeout(HANG_SECONDS):
            before = -1
            while before != len(store.calls):
                before = len(store.calls)
                for _ in range(20):
                    await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
    return [method for method, _ in store.calls]


async def test_old_pins_go_once_after_the_first_commit_where_all_checkpoints_are_kept() -> None:
    store = await _with_two_old_pins(FakeStore())
    assert (await _calls_after_a_commit(store, RetentionSettings())).count("delete") == 1
    assert list(store.objects) == [pin_key("second", 0)]


@pytest.mark.parametrize(("keep_last", "rank"), [(1, 0), (0, 1)], ids=["prune does it", "another agent does it"])
async def test_an_agent_leaves_litter_to_whoever_else_removes_it(keep_last: int, rank: int) -> None:
    store = await _with_two_old_pins(FakeStore())
    assert await _calls_after_a_commit(store, RetentionSettings(keep_last=keep_last), rank=rank) == []


async def test_credentials_that_may_not_delete_cost_one_line_in_the_log() -> None:
    store = await _with_two_old_pins(_MayNotDelete())
    with capture_logs() as logs:
        assert (await _calls_after_a_commit(store, RetentionSettings())).count("delete") == 1
    assert [line["log_level"] for line in logs if line["event"] == "leftovers.not_removed"] == ["info"]


@pytest.mark.parametrize(
    ("kind", "again"), [(None, True), (ErrorKind.UNREACHABLE, True), (ErrorKind.ACCESS_DENIED, False)]
)
async def test_leftovers_are_looked_for_again_after_a_later_commit_unless_that_is_refused(
    kind: ErrorKind | None, again: bool
) -> None:
    store, play = FakeStore(), Play()
    play.announce("save")
    if kind:
        store.fail("list", kind)
    remover = LeftoverRemover(
        cast(Any, FakeReadyStore(store)), cast(Any, StoreClock(store)), RetentionSettings(), between_removals_seconds=0
    )

    def looks() -> int:
        return store.calls.count(("list", RESUME_PREFIX))

    async def commit() -> int:
        remover.hear(play.state, Committed(at=play.now, work=WorkId(Operation.COMMIT, "save")))
        for _ in range(200):
            await asyncio.sleep(0)
        return looks()

    watching = asyncio.ensure_future(remover.watch())
    assert await commit() == 1
    assert await commit() == (2 if again else 1)
    watching.cancel()


class _Agent:
    """An agent that commits and prunes."""

    def __init__(self, store: FakeStore, state_directory: Path) -> None:
        self._store = store
        self.play = Play()
        self.retention = RetentionSettings(keep_last=2)
        self._pruner = Pruner(
            state=lambda: self.play.state, clock=cast(Any, StoreClock(store)), state_directory=state_directory
        )

    async def looks_at_everything(self, step: int) -> bool:
        """Commit a checkpoint of that step and prune; return whether everything is listed for that."""
        info = await store_checkpoint(self._store, step, ranks=[{"model.pt": b""}])
        self.play.steps[info.save] = step
        self.play.announce(info.save)
        self.play.finish(info.save)
        self._store.calls.clear()
        without = self.play.state.settings
        self.play.state.settings = replace(without, retention=self.retention)
        try:
            await self._pruner.prune(self._store, Prune(work=WorkId(Operation.PRUNE, "")))
        finally:
            self.play.state.settings = without
            self._store.now += 60
        return "" in [key for method, key in self._store.calls if method == "list"]


async def _steps(store: FakeStore) -> list[int]:
    return [one.step for one in await list_committed(store)]


async def test_an_agent_looks_at_everything_after_its_first_commit_and_four_times_a_day(tmp_path: Path) -> None:
    store = FakeStore()
    agent = _Agent(store, tmp_path)
    assert [await agent.looks_at_everything(step) for step in range(1, 6)] == [True, False, False, False, False]
    assert await _steps(store) == [5, 4]
    store.now += DAY / 4
    assert [await agent.looks_at_everything(step) for step in (6, 7)] == [True, False]
    assert await _Agent(store, tmp_path).looks_at_everything(8)
    assert await _steps(store) == [8, 7]


async def test_what_waits_unread_in_the_journal_is_not_pruned(tmp_path: Path) -> None:
    store = FakeStore()
    unread, abandoned = [
        await store_checkpoint(store, step, save=f"89abcdef-{step:06d}", committed=False) for step in (1, 2)
    ]
    store.now += 9 * DAY
    agent = _Agent(store, tmp_path)
    agent.play.state.unread = {unread.save: 1}
    assert [await agent.looks_at_everything(step) for step in (3, 4)] == [True, False]
    assert [key for key in store.objects if key.startswith(save_prefix(unread))]
    assert not [key for key in store.objects if key.startswith(save_prefix(abandoned))]


async def test_an_agent_looks_at_everything_after_many_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruner, "_WHOLE_PRUNE_COMMITS", 3)
    agent = _Agent(FakeStore(), tmp_path)
    looks = [await agent.looks_at_everything(step) for step in range(1, 10)]
    assert looks == [True, False, False, False, True, False, False, False, True]


async def test_an_agent_looks_at_everything_after_a_prune_that_failed_or_refused(tmp_path: Path) -> None:
    store = FakeStore()
    agent = _Agent(store, tmp_path)
    assert [await agent.looks_at_everything(step) for step in (10, 20)] == [True, False]
    store.fail("delete", ErrorKind.UNREACHABLE)
    with pytest.raises(StoreError):
        await agent.looks_at_everything(30)
    assert [await agent.looks_at_everything(step) for step in (40, 50)] == [True, False]
    del store.objects[(await list_committed(store))[0].key]
    with capture_logs() as logs:
        assert [await agent.looks_at_everything(step) for step in (45, 46)] == [True, True]
    assert [line["event"] for line in logs] == ["retention.refused"] * 2
    assert await _steps(store) == [46, 45, 40]


async def test_an_agent_that_fell_back_below_what_it_looks_at_looks_at_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horizon_rules, "_RECENT", 3)
    store = FakeStore()
    for step in range(1, 8):
        await store_checkpoint(store, 10 * step, save=f"89abcdef-{step:06d}", ranks=[{"model.pt": b""}])
    agent = _Agent(store, tmp_path)
    # For once everything stays, so that something lies below.
    agent.retention, wanted = RetentionSettings(), agent.retention
    assert await agent.looks_at_everything(80)
    agent.retention = wanted
    assert await agent.looks_at_everything(15)
    assert await _steps(store) == [80, 70, 60, 50, 40, 30, 20, 15, 10]
    assert not await agent.looks_at_everything(81)
    assert await _steps(store) == [81, 80, 70, 60, 50, 40, 30, 20, 15, 10]
    assert not await agent.looks_at_everything(82)
    assert await _steps(store) == [82, 81, 40, 30, 20, 15, 10]
