"""Announces what the directory watch finds, for programs without a client.

Skips what Mooring knows in other ways: what a live client claims or has announced, what restore brought, and what was
committed before this agent started.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

import structlog

from mooring_agent.adapters.liveness import RankLocks
from mooring_agent.adapters.records import speaks_for
from mooring_agent.adapters.volume.content_check import content_signature
from mooring_agent.adapters.volume.staging_watch import FoundCheckpoint, StagingWatch, signature_of
from mooring_agent.core.errors import MooringError
from mooring_agent.core.settings.values import Settings
from mooring_agent.runtime.engine.engine import Engine
from mooring_agent.runtime.work.announcements import Announcement, Announcements

T = TypeVar("T")

log = structlog.get_logger("mooring.watch")


class DirectoryWatcher:
    """Watches the checkpoint directory: `run` for as long as the agent lives, `last_looks` when it ends."""

    def __init__(self, *, announcements: Announcements, engine: Engine, settings: Settings, executor: Executor) -> None:
        self._announcements = announcements
        self._engine = engine
        self._executor = executor
        newest = engine.state.newest_committed
        self._committed_step = newest.info.step if newest else -1
        self._volume, self._directory = Path(settings.volume), Path(settings.checkpoint_directory)
        self._locks = RankLocks(self._volume)
        self._watch = StagingWatch(
            self._volume,
            self._directory,
            executor=executor,
            world_size=settings.world_size,
            newest_step=max(0, self._committed_step),
            spoken_for=self._is_spoken_for,
            claimed=self._locks.claim,
        )
        self._announcing = asyncio.Lock()

    async def run(self) -> None:
        """Announce each checkpoint that the watch finds, until cancelled."""
        try:
            async for found in self._watch:
                async with self._announcing:
                    await self._announce(found)
        finally:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._watch.close)

    async def last_looks(self, *, writers_gone: bool, limit_seconds: float) -> None:
        """Announce what the training program leaves complete; see `StagingWatch.last_looks`. Never raises."""
        try:
            async for found in self._watch.last_looks(writers_gone=writers_gone, limit_seconds=limit_seconds):
                async with self._announcing:
                    await self._announce(found)
        except Exception:
            # Whatever lies in that directory, the agent must be able to end.
            log.exception("watch.failed", hint="announce the last checkpoint: the agent could not look for it")
        async with self._announcing:
            # Wait until what `run` has found is announced too.
            return

    async def _announce(self, found: FoundCheckpoint) -> None:
        """Announce one checkpoint. Never raises: a problem with one must not hide the others."""
        try:
            if self._is_recorded(found.path) or self._is_old(found.step):
                return
            if not all(self._saves_made_here(found.path)):
                # A client announces this path. What we announced ourselves goes on: its content may have changed.
                return
            signature = await self._run(content_signature, self._volume, found.path)
            if await self._run(signature_of, self._volume, Path(found.path)) != found.signature:
                # It is being written again, and will be found again.
                return
            log.info("watch.found", path=found.path, step=found.step)
            await self._announcements.enter(
                Announcement(path=found.path, step=found.step, name=found.name, signature=signature)
            )
        except MooringError as error:
            log.error("watch.refused", path=found.path, error=str(error), hint=error.hint)
        except Exception:
            log.exception("watch.refused", path=found.path, hint="this is a bug in the agent: please report it")

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _is_spoken_for(self, path: str, step: int | None) -> bool:
        known = self._is_recorded(path) or self._is_old(step) or bool(self._saves_made_here(path))
        return known or self._locks.claim(Path(path))

    def _is_recorded(self, path: str) -> bool:
        """Whether a client or restore has written a record of this path."""
        return speaks_for(self._volume, Path(path), self._directory)

    def _is_old(self, step: int | None) -> bool:
        """Whether the step is no later than the newest that was committed before this agent started."""
        return step is not None and step <= self._committed_step

    def _saves_made_here(self, path: str) -> list[bool]:
        """For each known announcement of a path, whether the agent made its save id. Clients of ours make their own."""
        return [
            contribution.announced.save_made_here
            for checkpoint in self._engine.state.checkpoints.values()
            for contribution in checkpoint.contributions.values()
            if os.path.normpath(contribution.announced.path) == path
        ]
