"""Tells later starts of the run, by an object in the destination, that this pod ends and may still commit.

Nothing waits for it: it is written by a task of its own, beside the uploads, and what is not renewed expires soon.
docs/design/0026.
"""

import asyncio
import socket
from contextlib import suppress
from typing import Final

import structlog

from keepstep_agent.core.agent.events import Event
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import PASSING, KeepstepError
from keepstep_agent.core.limits import SECONDS
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.core.stored.draining import Draining, encode_draining
from keepstep_agent.core.stored.object_layout import draining_key
from keepstep_agent.ports import Clock
from keepstep_agent.runtime.work.ready_store import ReadyStore

_RENEWAL_SECONDS: Final = 15.0
_REQUEST_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 2.0
# The process has two seconds to close in, and SIGKILL may be near.
_LAST_WORDS_SECONDS: Final = 0.5

log = structlog.get_logger("keepstep.draining")


class DrainingNotice:
    """`hear` is the engine's listener; `keep` runs for as long as the agent does. `pod` is the pod's id."""

    def __init__(self, *, store: ReadyStore, clock: Clock, settings: Settings, pod: str) -> None:
        self._store = store
        self._clock = clock
        self._holder = settings.cluster.pod_name or socket.gethostname()
        self._key = draining_key(pod)
        self._deadline: float | None = None
        self._changed = asyncio.Event()
        self._request: asyncio.Task[None] | None = None
        self._may_be_stored = False

    def hear(self, state: State, event: Event) -> None:
        deadline = state.termination.deadline if state.termination.noticed else None
        if deadline != self._deadline:
            self._deadline = deadline
            self._changed.set()

    async def keep(self) -> None:
        """Write the notice when there is a deadline, renew it until then, and delete it when there is none any more."""
        while True:
            renews = self._deadline is not None and self._clock.now() < self._deadline
            with suppress(TimeoutError):
                async with asyncio.timeout(_RENEWAL_SECONDS if renews else None):
                    await self._changed.wait()
            self._changed.clear()
            if self._deadline is None and not self._may_be_stored:
                continue
            self._request = asyncio.create_task(self._write() if self._deadline is not None else self._delete())
            try:
                # Not cancelled with this task: what is half sent at the exit could be stored after it was deleted.
                await asyncio.shield(self._request)
            except (KeepstepError, TimeoutError) as error:
                log.info("draining.not_written", error=str(error) or "the store did not answer in time")
                if isinstance(error, TimeoutError) or error.kind in PASSING:
                    await asyncio.sleep(_RETRY_SECONDS)
                    self._changed.set()

    async def last_words(self) -> None:
        """Delete the notice. Takes only a moment, or gives up: it then expires."""
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                if self._request is not None:
                    with suppress(KeepstepError, TimeoutError):
                        await self._request
                if self._may_be_stored:
                    await self._delete()
        except Exception as error:
            # Whatever it is, the agent exits with its own code.
            log.info("draining.left", error=str(error) or "no time left")

    async def _write(self) -> None:
        async with asyncio.timeout(_REQUEST_SECONDS):
            store = await self._store.get()
            if self._deadline is None:
                return
            seconds_left = min(max(0.0, self._deadline - self._clock.now()), float(SECONDS))
            self._may_be_stored = True
            await store.put(self._key, encode_draining(Draining(holder=self._holder, seconds_left=seconds_left)))

    async def _delete(self) -> None:
        async with asyncio.timeout(_REQUEST_SECONDS):
            await (await self._store.get()).delete(self._key)
            self._may_be_stored = False
