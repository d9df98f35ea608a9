"""`restore` for the tests of runs with one output directory."""

from typing import Any

from keepstep_agent.restore import init_step
from keepstep_agent.restore.init_step import Restored


async def restore(*arguments: Any, **keywords: Any) -> Restored | None:
    """Return what was restored; None if the run starts from nothing."""
    restored = await init_step.restore(*arguments, **keywords)
    assert len(restored) <= 1, restored
    return restored[0] if restored else None
