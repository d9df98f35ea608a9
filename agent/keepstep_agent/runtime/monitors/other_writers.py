"""Warns when another agent commits the same steps to the destination as saves of its own.

This happens if the pods of a job do not know of each other and each announces a world of one, or if two jobs share a
prefix: every commit is whole, but none is a checkpoint of the job. Looks after each of our own commits, never while the
pod ends. Changes nothing.
"""

import asyncio
from collections import deque
from typing import Final

import structlog

from keepstep_agent.core.agent.events import Committed, Event
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.model import SaveInfo
from keepstep_agent.core.stored.object_layout import marker_key, parse_marker_key, step_prefix
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.work.ready_store import ReadyStore

_LOOKS_WAITING: Final = 16
_OURS_KEPT: Final = 64

log = structlog.get_logger("keepstep.committer")


class OtherWriters:
    """`hear` is the engine's listener; `watch` runs for as long as the agent does. Warns once."""

    def __init__(self, store: ReadyStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._since = clock.now()
        self._ours: deque[str] = deque(maxlen=_OURS_KEPT)
        self._committed: asyncio.Queue[SaveInfo] = asyncio.Queue(_LOOKS_WAITING)

    def hear(self, state: State, event: Event) -> None:
        if isinstance(event, Committed):
            self._ours.append(event.work.save)
            checkpoint = state.checkpoints.get(event.work.save)
            if (
                checkpoint is not None
                and not checkpoint.info.is_snapshot
                and not state.termination.noticed
                and not self._committed.full()
            ):
                self._committed.put_nowait(checkpoint.info)

    async def watch(self) -> None:
        """Look after each commit until there is something to warn of. Runs until cancelled."""
        while not await self._look(await self._committed.get()):
            pass
        await asyncio.Event().wait()

    async def _look(self, info: SaveInfo) -> bool:
        """Whether another agent has committed that step since this one began."""
        try:
            store = await self._store.get()
            modified_at = {found.key: found.modified_at async for found in store.list(step_prefix(info.step))}
        except KeepstepError:
            # The next commit is looked at again.
            return False
        # Both times are of the store's clock. An older marker means that the run went on from an earlier step.
        began_at = modified_at.get(marker_key(info), 0.0) - (self._clock.now() - self._since)
        for key, at in sorted(modified_at.items()):
            parsed = parse_marker_key(key)
            if parsed is None or parsed[1] in self._ours or at < began_at:
                continue
            log.warning(
                "commit.another_writer",
                step=info.step,
                save=info.save,
                other_save=parsed[1],
                world_size=info.world_size,
                destination_key=key,
                hint="another agent commits saves of the same steps here. If both are pods of one job, let "
                "its processes know of each other (torchrun, or RANK and WORLD_SIZE): now each saves for itself, and "
                "restore takes one of them. If they are two jobs, give each a destination of its own",
            )
            return True
        return False
