"""What the agent removes where retention is off."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.core.play import Play
from tests.fakes.fake_ready_store import FakeReadyStore, StoreClock
from tests.fakes.fake_store import FakeStore

from mooring_agent.core.agent.events import Committed
from mooring_agent.core.agent.work import Operation, WorkId
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.policies.restore_choice import Pin, encode_pin
from mooring_agent.core.settings.values import RetentionSettings
from mooring_agent.core.stored.object_layout import pin_key
from mooring_agent.runtime.work.pruner import LeftoverRemover

DAY = 24 * 3600.0
_LIMIT_SECONDS = 60.0


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
        async with asyncio.timeout(_LIMIT_SECONDS):
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
