"""A caller that gives up while it is given leave leaves no room reserved behind."""

import asyncio
from typing import Any, cast

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.agent.disk_pressure import Admission
from keepstep_agent.core.agent.events import Event, SaveAborted, SaveBegun
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.settings.values import Settings, StoreSettings
from keepstep_agent.runtime.api.server import AgentService
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_api.v1 import agent_pb2


class _SlowEngine:
    """Takes events at once and answers never."""

    def __init__(self) -> None:
        store = StoreSettings(destination="file:///bucket")
        settings = Settings(volume="/volume", checkpoint_directory="/volume", socket="", store=store)
        self.state = State(settings=settings)
        self.events: list[Event] = []
        self.taken = asyncio.Event()

    def post(self, event: Event) -> None:
        self.events.append(event)

    async def submit(self, event: Event) -> None:
        self.events.append(event)
        self.taken.set()
        await asyncio.Event().wait()


class _Sensors:
    async def admit(self, *_: object) -> Admission:
        return Admission(admitted=True)


async def test_a_save_whose_caller_is_gone_is_aborted_for_it() -> None:
    engine = _SlowEngine()
    service = AgentService(
        engine=cast(Any, engine),
        clock=SystemClock(),
        announcements=cast(Any, None),
        fetches=cast(Any, None),
        live_ranks=cast(Any, None),
        monitors=cast(Any, _Sensors()),
    )
    call = asyncio.ensure_future(service.BeginSave(agent_pb2.BeginSaveRequest(step=7, attempt="a"), None))
    async with asyncio.timeout(HANG_SECONDS):
        await engine.taken.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    begun, aborted = engine.events
    assert isinstance(begun, SaveBegun)
    assert isinstance(aborted, SaveAborted)
    assert (begun.attempt, begun.step, begun.save) == ("a", 7, aborted.save)
