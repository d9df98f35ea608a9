"""Makes a start wait for pods of the run that end and still save, so that it resumes from what they commit.

docs/design/0026 says why. Invariants: no start waits longer than `LONGEST_SECONDS`, whatever is in the bucket; it never
waits for its own pod; the clocks of two machines are never compared.
"""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent.adapters.volume.identity import volume_id
from keepstep_agent.catalog.object_reads import DAMAGE, READ_REFUSALS, for_each, read_object
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError, printable
from keepstep_agent.core.limits import DRAINING_BYTES, DRAINING_OBJECTS, DRAINING_SECONDS
from keepstep_agent.core.stored.draining import decode_draining
from keepstep_agent.core.stored.object_layout import DRAINING_PREFIX, check_token, draining_key, parse_draining_key
from keepstep_agent.ports import ObjectInfo, StoreWriter
from keepstep_agent.restore.run_lease import store_time

_MARGIN_SECONDS: Final = 30.0
"""After a pod's deadline: for a request that is under way when it is killed, and for kubelet to be late."""
EXPIRY_SECONDS: Final = 45.0
"""Of a notice that is not renewed any more: a renewal, and two more tries that time out."""
LONGEST_SECONDS: Final = DRAINING_SECONDS + _MARGIN_SECONDS
_LOOK_SECONDS: Final = 1.0
_DELETIONS_AT_ONCE: Final = 8
_UNREADABLE: Final = frozenset({*DAMAGE, *READ_REFUSALS, ErrorKind.FORMAT_UNKNOWN})

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def pod_id(volume: Path, state_directory: Path) -> str:
    """Return what tells this pod from all others, the same after its containers were restarted in place. Blocks."""
    try:
        return check_token(volume_id(volume, state_directory), "volume id")
    except KeepstepError:
        return secrets.token_hex(16)


async def withdraw_own(store: StoreWriter, pod: str) -> None:
    """Delete what an earlier agent of this pod has left behind: it is dead, and others would wait for it."""
    await _delete(store, [draining_key(pod)])


class Predecessors:
    """The pods of the run that still save, as `pod` sees them; `pod` is its own id. For one start."""

    def __init__(self, pod: str) -> None:
        self._pod = pod
        # Times are those of the event loop's clock.
        self._give_up_at: float | None = None
        self._store_ahead_seconds: float | None = None
        """By how much the store's clock is ahead of the loop's; None: unknown."""
        self._expiries: dict[ObjectInfo, float | None] = {}
        """When each object expires that was read; None: it cannot be read, and holds up nobody."""
        self._told: set[str] = set()

    async def wait(self, store: StoreWriter) -> None:
        """Return when none is left, or they have had their time. Raises StoreError."""
        now = asyncio.get_running_loop().time
        if self._give_up_at is None:
            self._give_up_at = now() + LONGEST_SECONDS
        if now() >= self._give_up_at:
            return
        try:
            async with asyncio.timeout_at(self._give_up_at):
                while await self._is_any_left(store):  # noqa: ASYNC110 - the store tells nobody
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            _log.warning("restore.waits_no_longer", seconds=LONGEST_SECONDS)

    async def _is_any_left(self, store: StoreWriter) -> bool:
        """Look for one that is not over, and delete what is."""
        notices: set[ObjectInfo] = set()
        async for one in store.list(DRAINING_PREFIX):
            if parse_draining_key(one.key) not in {None, self._pod} and len(notices) < DRAINING_OBJECTS:
                notices.add(one)
        self._expiries = {one: moment for one, moment in self._expiries.items() if one in notices}
        expired: list[str] = []
        is_left = False
        # The newest is the one that most likely makes this start wait: of the others nothing need be read then.
        for one in sorted(notices, key=lambda one: one.modified_at, reverse=True):
            if one not in self._expiries:
                self._expiries[one] = await self._expires_at(store, one)
            expires_at = self._expiries[one]
            if expires_at is None:
                continue
            if expires_at > asyncio.get_running_loop().time():
                is_left = True
                break
            expired.append(one.key)
        await _delete(store, expired)
        return is_left

    async def _expires_at(self, store: StoreWriter, one: ObjectInfo) -> float | None:
        now = asyncio.get_running_loop().time()
        if self._store_ahead_seconds is None:
            self._store_ahead_seconds = await _store_ahead_seconds(store, now)
        # Where nobody knows its age, it counts from now.
        written_at = now if self._store_ahead_seconds is None else min(now, one.modified_at - self._store_ahead_seconds)
        if written_at + EXPIRY_SECONDS <= now:
            return now
        try:
            draining = await read_object(store, one.key, decode_draining, limit_bytes=DRAINING_BYTES)
        except StoreError as error:
            if error.kind not in _UNREADABLE:
                raise
            if error.kind is not ErrorKind.NOT_FOUND:
                _log.warning("restore.unreadable_predecessor", key=one.key, error=str(error))
            return None
        left_seconds = written_at + draining.seconds_left + _MARGIN_SECONDS - now
        expires_at = min(now + left_seconds, written_at + EXPIRY_SECONDS)
        if expires_at > now and one.key not in self._told:
            self._told.add(one.key)
            at_most_seconds = round(min(left_seconds, (self._give_up_at or now) - now))
            holder = printable(draining.holder)
            _log.warning("restore.waits_for_predecessor", predecessor=holder, at_most_seconds=at_most_seconds)
        return expires_at


async def _store_ahead_seconds(store: StoreWriter, now: float) -> float | None:
    try:
        return await store_time(store) - now
    except StoreError as error:
        _log.info("restore.store_time_unknown", error=str(error), hint=error.hint)
        return None


async def _delete(store: StoreWriter, keys: Sequence[str]) -> None:
    """Delete notices that are over. What cannot be deleted expires, and is left to `prune`."""
    try:
        await for_each(keys, store.delete, at_once=_DELETIONS_AT_ONCE)
    except StoreError as error:
        _log.info("restore.predecessor_not_deleted", error=str(error), hint=error.hint)
