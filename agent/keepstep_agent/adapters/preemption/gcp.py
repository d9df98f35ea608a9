"""Compute Engine's metadata server: waits for changes of two values instead of polling them.

A spot machine has 30 s from `preempted`. Before a maintenance that stops the machine there is a minute. Machines with
GPUs have an hour, but the value does not say so: they are given a minute, too, which is too early rather than too late.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from keepstep_agent.adapters.preemption.metadata_service import ANSWER_SECONDS, MetadataService, not_understood
from keepstep_agent.core.errors import ErrorKind, PreemptionSourceError
from keepstep_agent.core.settings.table import spelled
from keepstep_agent.ports import TerminationNotice

_FLAVOR: Final = {"Metadata-Flavor": "Google"}
_ROOT: Final = "/computeMetadata/v1/instance/"
_WAIT_SECONDS: Final = 60
_LATE_SECONDS: Final = 15.0
_ENDING_VALUES: Final = {
    "preempted": ("TRUE", 30.0),
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", 60.0),
}
"""By key: the value that means the machine's end, and the seconds that are left from then on."""


class GcpPreemption:
    """The server does not say when the machine ends, so the seconds count from when the value was first seen."""

    cloud = "gcp"
    pause_seconds = 1.0

    def __init__(self, service: MetadataService) -> None:
        self._service = service
        self._etags: dict[str, str] = {}
        self._ends: dict[str, float] = {}
        """By key, for the values that mean an end: the event loop's time at which the machine may end."""
        # The metadata server of GKE does not know all keys.
        self._keys = set(_ENDING_VALUES)

    async def answers(self) -> bool:
        try:
            answer = await self._service.request(_ROOT, headers=_FLAVOR)
        except PreemptionSourceError:
            return False
        return answer.headers.get("Metadata-Flavor") == "Google"

    async def look(self) -> Sequence[TerminationNotice]:
        tasks = {asyncio.create_task(self._hear(key)) for key in self._keys}
        try:
            unheard = self._keys - self._etags.keys()
            await asyncio.wait(tasks, return_when=asyncio.ALL_COMPLETED if unheard else asyncio.FIRST_COMPLETED)
            errors = [error for task in tasks if task.done() and (error := task.exception())]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        now = asyncio.get_running_loop().time()
        found = [
            TerminationNotice(key=key, left_seconds=ends_at - now, source=f"gcp {key}")
            for key, ends_at in self._ends.items()
        ]
        # A notice from one value counts even if the other cannot be read.
        if errors and not found:
            raise errors[0]
        return found

    async def close(self) -> None:
        await self._service.close()

    async def _hear(self, key: str) -> None:
        """Read a value: at once the first time, then when it changes or after `_WAIT_SECONDS`."""
        query, answer_seconds = {}, ANSWER_SECONDS
        if key in self._etags:
            query = {"wait_for_change": "true", "last_etag": self._etags[key], "timeout_sec": str(_WAIT_SECONDS)}
            answer_seconds = _WAIT_SECONDS + _LATE_SECONDS
        answer = await self._service.request(_ROOT + key, headers=_FLAVOR, query=query, answer_seconds=answer_seconds)
        if answer.status == 404:
            self._keys.discard(key)
            if not self._keys:
                self._keys = set(_ENDING_VALUES)
                raise PreemptionSourceError(
                    ErrorKind.NOT_FOUND,
                    "the metadata server knows neither preempted nor maintenance-event",
                    hint="use hostNetwork or another metadata server, or set "
                    f"{spelled('termination.preemption_source')} to off",
                )
            return
        if answer.status != 200:
            raise self._service.refusal(_ROOT + key, answer)
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise not_understood(answer.text)
        self._etags[key] = answer.headers.get("ETag", "0")
        ending_value, seconds = _ENDING_VALUES[key]
        if answer.text.strip() == ending_value:
            self._ends.setdefault(key, asyncio.get_running_loop().time() + seconds)
        else:
            self._ends.pop(key, None)
