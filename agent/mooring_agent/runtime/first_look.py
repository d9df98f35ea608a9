"""Before the first byte of a save goes out: is its id that of a committed one? Then nothing of it is touched.

The core remembers only the saves that ended last, and nothing from before a new volume; the marker is for ever. One
request per save and life of the agent. A marker may also be our own, written just before we died: then our rank
manifests say when these very ranks announced.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mooring_agent.core.errors import ErrorKind, MooringError, StoreError
from mooring_agent.core.object_layout import marker_key
from mooring_agent.core.state import Checkpoint, State
from mooring_agent.ports import ObjectStore
from mooring_agent.runtime.committer import read_if_there, saved_at


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
                await _require_new(store, checkpoint)
            except MooringError as error:
                look.error, look.failures = error, look.failures + 1
                raise
            look.clear = True

    def forget(self, save: str) -> None:
        """It is over."""
        self._looks.pop(save, None)


async def _require_new(store: ObjectStore, checkpoint: Checkpoint) -> None:
    info = checkpoint.info
    if await read_if_there(store, marker_key(info)) is None:
        return
    for rank, share in sorted(checkpoint.shares.items()):
        if await saved_at(store, info, rank) != share.announced_at:
            raise StoreError(
                ErrorKind.CONTRADICTION,
                f"save {info.save} is committed already, by an earlier announcement",
                hint="a save id belongs to one save of one attempt: take a new one for the next",
            )
