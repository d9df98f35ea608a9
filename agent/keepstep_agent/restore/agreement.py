"""Makes all pods of a start resume from the same checkpoint: the first pod's choice, written down as the pin.

An attempt may be started many times: suspended and resumed, restarted in place. Each start is a generation with a pin
of its own. A pod joins the newest generation, or begins the next one if the job has been started since
(`core.policies.restore_choice.may_join`). It takes its place in the generation last, when the checkpoint is on its
disk, so a pod that is evicted while it restores joins its peers again.

Where `put(if_absent)` works, any pod may begin a generation and the store picks the first. Elsewhere only node 0 does,
and the others wait for it. A pod proposes a checkpoint only when it has all of it, verified. A pin based on sizes alone
could name a checkpoint that no pod can read. The cost is small: pods that start together download the same checkpoint
anyway, and one that sees another choice downloads again, once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from keepstep_agent.catalog.object_reads import if_there, read_object
from keepstep_agent.core.errors import PASSING, ErrorKind, StoreError, retry_delay_seconds
from keepstep_agent.core.limits import PIN_BYTES
from keepstep_agent.core.policies.restore_choice import CommittedSave, Generation, Pin, decode_pin, encode_pin, may_join
from keepstep_agent.core.stored.object_layout import (
    parse_pin_key,
    parse_place_key,
    pin_key,
    pins_prefix,
    place_key,
)
from keepstep_agent.ports import StoreReader, StoreWriter

_WRITES: Final = 5
_POLL_SECONDS: Final = 1.0

log = structlog.get_logger("keepstep.agreement")


async def newest_generation(store: StoreReader, attempt: str) -> Generation | None:
    """Return the newest generation of an attempt; None if there is none."""
    listed = [one async for one in store.list(pins_prefix(attempt))]
    pins = {pin[1]: one for one in listed if (pin := parse_pin_key(one.key))}
    places = [place for one in listed if (place := parse_place_key(one.key))]
    for number in sorted(pins, reverse=True):
        written = await if_there(read_object(store, pins[number].key, decode_pin, limit_bytes=PIN_BYTES))
        # If the pin was removed after the listing, its generation is long over.
        if written is not None:
            taken = frozenset(place for _, generation, place in places if generation == number)
            return Generation(number=number, pin=written, begun_at=pins[number].modified_at, places=taken)
    return None


class Agreement:
    """One pod's part in it. `committed` lists the checkpoints. `place` is empty if nothing tells pods apart."""

    def __init__(
        self,
        store: StoreWriter,
        attempt: str,
        committed: Callable[[], Awaitable[Sequence[CommittedSave]]],
        *,
        place: str,
        node_rank: int,
        timeout_seconds: float,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._committed = committed
        self._place = place
        self._node_rank = node_rank
        self._timeout_seconds = timeout_seconds
        self._number = 0

    async def join(self) -> Pin | None:
        """Return the pin of the newest generation; None if this pod has to begin another one."""
        newest = await newest_generation(self._store, self._attempt)
        if newest is None:
            self._number = 0
            return None
        joins = may_join(newest, self._place, await self._committed())
        self._number = newest.number if joins else newest.number + 1
        return newest.pin if joins else None

    async def begin(self, wish: Pin) -> bool:
        """Begin the next generation with `wish`; whether it is in force. If not, another pod was first: join again.

        Raises StoreError(TIMED_OUT) if only node 0 may begin one, and never does.
        """
        capabilities = await self._store.probe()
        if capabilities.conditional_put or self._node_rank == 0:
            return await self._decide(wish) == wish
        return await self._wait(wish)

    async def take_place(self) -> None:
        """Note that this pod has the pinned checkpoint on its disk."""
        if self._place:
            await self._store.put(place_key(self._attempt, self._number, self._place), b"")

    async def _decide(self, wish: Pin) -> Pin:
        key = pin_key(self._attempt, self._number)
        doubt: StoreError | None = None
        for attempt in range(1, _WRITES + 1):
            pin = await self._read(key)
            if pin is not None:
                return pin
            try:
                await self._store.put(key, encode_pin(wish), if_absent=True)
            except StoreError as error:
                # Whether the write was refused or is in doubt, the readback above says which pod was first.
                if error.kind is not ErrorKind.ALREADY_EXISTS and error.kind not in PASSING:
                    raise
                doubt = error
                await asyncio.sleep(retry_delay_seconds(error.kind, attempt, 1.0) or 0.0)
        pin = await self._read(key)
        if pin is not None:
            return pin
        raise StoreError(
            doubt.kind if doubt else ErrorKind.STORE_FAILED,
            f"the resume pin {key} cannot be written: {doubt or 'it is missing after the write'}",
            hint="with an attempt, restore needs permission to write below .keepstep/resume/",
        ) from doubt

    async def _wait(self, wish: Pin) -> bool:
        """Wait for node 0 to begin the next generation."""
        key = pin_key(self._attempt, self._number)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while True:
                    if await self._read(key):
                        return False
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            if self._number == 0:
                raise StoreError(
                    ErrorKind.TIMED_OUT,
                    f"node 0 has not decided within {self._timeout_seconds:g} s what attempt {self._attempt} "
                    "resumes from",
                    hint="see restore's log on the pod with node rank 0; all pods of a start need the same attempt",
                ) from error
            # Perhaps this pod alone was replaced, and node 0 trains.
            log.warning("restore.begins_without_node_0", attempt=self._attempt, waited_seconds=self._timeout_seconds)
            return await self._decide(wish) == wish

    async def _read(self, key: str) -> Pin | None:
        return await if_there(read_object(self._store, key, decode_pin, limit_bytes=PIN_BYTES))
