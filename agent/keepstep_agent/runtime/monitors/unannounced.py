"""Announces what a client saved and could not announce: the agent was unreachable, and the client may be gone.

The monitors decide when to look. A client that still tries announces the same save id, so that one checkpoint never
becomes two. A record may also be of a save that an earlier agent committed, if the answer to the client was lost and
this agent does not remember the save. So the store is asked first.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.records import RecordedCheckpoint, is_any_handed_over, unannounced
from keepstep_agent.core.agent import planner
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError
from keepstep_agent.core.model import AnnouncementTime, SaveInfo
from keepstep_agent.core.policies.repeated_deaths import RECORDS
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import StoreReader
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.work.announcements import Announcement, Announcements
from keepstep_agent.runtime.work.duplicate_save_guard import is_committed
from keepstep_agent.runtime.work.ready_store import ReadyStore

_BUG_HINT: Final = "this is a bug in the agent: please report it"

log = structlog.get_logger("keepstep.unannounced")


class UnannouncedRecovery:
    """Recovers unannounced checkpoints in the checkpoint directory, if they have a client's record."""

    def __init__(
        self,
        *,
        announcements: Announcements,
        engine: Engine,
        settings: Settings,
        executor: Executor,
        store: ReadyStore,
    ) -> None:
        self._announcements = announcements
        self._engine = engine
        self._executor = executor
        self._store = store
        self._volume = Path(settings.volume)
        self._directory = Path(settings.checkpoint_directory)
        self._committed: set[str] = set()
        self._announcing = asyncio.Lock()

    async def look(self, *, asking_seconds: float | None = None) -> None:
        """Announce what an agent should have and has not. Never raises, because its callers have other work to do.

        `asking_seconds` limits how long the store is opened and asked what it has; None: no limit. What is then still
        unknown is announced all the same, and the store is asked again before it is sent.
        """
        try:
            known = self._known()
            found = await self._unannounced()
            await self._ask(found, asking_seconds)
            async with self._announcing:
                if self._known() != known:
                    # The store has one of them, or one was announced meanwhile: older ones are superseded.
                    found = await self._unannounced()
                # The newest comes last, as if a client had announced them, so it is uploaded first.
                for recorded in found:
                    await self._announce(recorded)
        except Exception:
            log.exception("unannounced.failed", hint=_BUG_HINT)

    async def has_found_any(self) -> bool:
        """Return whether a record says that an agent or the store has its checkpoint, or the store has said so.

        The journal of the agent that had it may be lost.
        """
        if self._committed:
            return True
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, is_any_handed_over, self._volume, self._directory
        )

    def _known(self) -> set[str]:
        return {*self._engine.state.checkpoints, *self._engine.state.unread, *self._committed}

    async def _unannounced(self) -> Sequence[RecordedCheckpoint]:
        if not planner.may_begin(self._engine.state, RECORDS):
            return ()
        known = self._known()
        with self._engine.doing(RECORDS, "read the records of checkpoints"):
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, lambda: unannounced(self._volume, self._directory, known=known)
            )

    async def _ask(self, found: Sequence[RecordedCheckpoint], limit_seconds: float | None) -> None:
        """Note the newest of each output directory that the store has whole, if it answers in time."""
        if not found:
            return
        noted: set[str] = set()
        try:
            async with asyncio.timeout(limit_seconds):
                store = await self._store.get()
                for recorded in reversed(found):
                    if recorded.belongs_to not in noted and await _is_committed(store, recorded):
                        log.info("unannounced.committed_already", path=str(recorded.path), save=recorded.save)
                        self._committed.add(recorded.save)
                        noted.add(recorded.belongs_to)
        except (TimeoutError, KeepstepError) as error:
            log.warning("unannounced.store_not_asked", error=str(error) or "the store does not answer")

    async def _announce(self, recorded: RecordedCheckpoint) -> None:
        """Never raises: a record that cannot be announced must not hide the others."""
        ranks = recorded.ranks or self._known_ranks(recorded.world_size)
        log.info("unannounced.found", path=str(recorded.path), step=recorded.step, save=recorded.save, ranks=ranks)
        for rank in ranks:
            announcement = Announcement(
                path=str(recorded.path),
                step=recorded.step,
                kind=recorded.kind,
                save=recorded.save,
                rank=rank,
                world_size=recorded.world_size,
                local_world_size=len(ranks),
                files=recorded.files,
                others=recorded.others,
                output=recorded.output,
                signature=recorded.signature,
                recorded_at=recorded.saved_at,
            )
            try:
                await self._announcements.enter(announcement)
            except KeepstepError as error:
                log.error("unannounced.refused", path=str(recorded.path), rank=rank, error=str(error), hint=error.hint)
                # The other ranks would be refused for the same reason, with a log line each.
                return
            except Exception:
                log.exception("unannounced.failed", path=str(recorded.path), rank=rank, hint=_BUG_HINT)
                return

    def _known_ranks(self, world_size: int) -> Sequence[int]:
        """The ranks whose files a checkpoint has, as far as they registered here. A world of one has only rank 0."""
        if world_size == 1:
            return [0]
        return sorted(rank for rank in set(self._engine.state.ranks.values()) if rank < world_size)


async def _is_committed(store: StoreReader, recorded: RecordedCheckpoint) -> bool:
    """Whether the store has this save whole: a marker of its id, from an announcement made after the record."""
    info = SaveInfo(
        save=recorded.save,
        name=recorded.path.name,
        step=recorded.step,
        kind=recorded.kind,
        world_size=recorded.world_size,
        directory=recorded.directory,
        output=recorded.output,
    )
    # One rank's manifest is enough, and costs one request.
    announced = AnnouncementTime(at=recorded.saved_at, recorded_at=recorded.saved_at)
    try:
        return await is_committed(store, info, {min(recorded.ranks, default=0): announced})
    except StoreError as error:
        if error.kind is not ErrorKind.CONTRADICTION:
            raise
        return False  # the marker is another save's
