"""Before the first byte of a save goes out: is its id that of a committed one? Then nothing of it is touched.

The core remembers only the saves that ended last, and nothing from before a new volume; the marker is for ever. One
request per save and life of the agent. A marker may also be our own, written just before we died: then our rank
manifests say when these very ranks announced.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mooring_agent.core.errors import MooringError
from mooring_agent.core.model import AnnouncementTime
from mooring_agent.core.state import State
from mooring_agent.ports import ObjectStore
from mooring_agent.runtime.committer import is_committed


@dataclass(slots=True)
class _Look:
    """At one save. Transfers that wait for the same look fail with it, so that a dead store is asked once."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    clear: bool = False
    failures: int = 0
    error: MooringError | None = None


class FirstLook:
    """`state` gives the state now."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._looks: dict[str, _Look] = {}

    async def require_new(self, store: ObjectStore, save: str) -> None:
        """StoreError(CONTRADICTION) if the save is committed already and that is not what we have here."""
        checkpoint = self._state().checkpoints.get(save)
        if checkpoint is None:
            return
        look = self._looks.setdefault(save, _Look())
        failures = look.failures
        async with look.lock:
            if look.clear:
                return
            if look.error is not None and look.failures > failures:
                raise look.error
            try:
                # Exact: what an earlier agent may have committed by the same record was looked for by Reconcile.
                announced_at = {
                    rank: AnnouncementTime(at=share.announced_at) for rank, share in checkpoint.shares.items()
                }
                await is_committed(store, checkpoint.info, announced_at)
            except MooringError as error:
                look.error, look.failures = error, look.failures + 1
                raise
            look.clear = True

    def forget(self, save: str) -> None:
        """It is over."""
        self._looks.pop(save, None)
