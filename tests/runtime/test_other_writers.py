"""Two agents that commit the same steps to one destination, and do not know of each other."""

import asyncio
from typing import Any, cast

from structlog.testing import capture_logs
from tests.core.play import Play
from tests.fakes.fake_ready_store import FakeReadyStore, StoreClock
from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS
from tests.restore.stored_checkpoints import store_checkpoint

from keepstep_agent.core.agent.events import Committed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.runtime.monitors.other_writers import OtherWriters


class _Agent:
    """An agent that commits what a test says, and looks for others."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.play = Play()
        self.others = OtherWriters(cast(Any, FakeReadyStore(store)), cast(Any, StoreClock(store, behind_seconds=3600)))

    async def commits(self, step: int, save: str) -> None:
        self.play.steps[save] = step
        self.play.announce(save)
        await store_checkpoint(self.store, step, save=save)
        commit = Committed(at=self.play.now, work=WorkId(Operation.COMMIT, save))
        self.others.hear(self.play.state, commit)

    async def warned(self) -> list[str]:
        """The other saves that it warns of, once it has looked at all it has heard of."""
        with capture_logs() as logs:
            looking = asyncio.ensure_future(self.others.watch())
            async with asyncio.timeout(HANG_SECONDS):
                # It has looked at everything when it waits for more, or for ever.
                before = -1
                while before != len(self.store.calls):
                    before = len(self.store.calls)
                    for _ in range(20):
                        await asyncio.sleep(0)
            looking.cancel()
        return [str(line["other_save"]) for line in logs if line["event"] == "commit.another_writer"]


async def test_an_agent_warns_once_when_another_commits_its_step_as_a_save_of_its_own() -> None:
    store = FakeStore()
    agent = _Agent(store)
    store.now += 10
    await store_checkpoint(store, 100, save="of-another-pod")
    await agent.commits(100, "ours")
    await store_checkpoint(store, 200, save="of-another-pod-too")
    await agent.commits(200, "ours-too")
    assert await agent.warned() == ["of-another-pod"]


async def test_a_step_that_was_committed_before_this_agent_began_is_an_earlier_attempts() -> None:
    store = FakeStore()
    await store_checkpoint(store, 100, save="earlier")
    store.now += 10
    agent = _Agent(store)
    store.now += 10
    await agent.commits(100, "ours")
    assert await agent.warned() == []


async def test_two_saves_of_one_step_by_one_agent_are_its_own() -> None:
    agent = _Agent(FakeStore())
    await agent.commits(100, "periodic")
    await agent.commits(100, "final")
    await agent.commits(1000, "later")
    assert await agent.warned() == []


def test_a_commit_of_a_checkpoint_that_is_forgotten_already_is_not_looked_at() -> None:
    agent = _Agent(FakeStore())
    forgotten = Committed(at=agent.play.now, work=WorkId(Operation.COMMIT, "forgotten"))
    agent.others.hear(agent.play.state, forgotten)
    assert agent.others._committed.empty()
