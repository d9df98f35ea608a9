"""Makes all pods of an attempt resume from the same checkpoint: the first pod's choice, written down as the pin.

Where `put(if_absent)` works, any pod may decide and the store picks the first. Elsewhere only node 0 writes and the
others wait for it. A pod proposes a checkpoint only when it has all of it, verified. A pin based on sizes alone could
name a checkpoint that no pod can read, and every later start of the attempt would follow the pin and fail. The cost is
small: pods that start together download the same checkpoint anyway, and one that sees another choice downloads again,
once.
"""

import asyncio
from typing import Final

from mooring_agent.catalog.object_reads import if_there, read_object
from mooring_agent.core.errors import PASSING, ErrorKind, StoreError, retry_delay_seconds
from mooring_agent.core.limits import PIN_BYTES
from mooring_agent.core.policies.restore_choice import Pin, decode_pin, encode_pin
from mooring_agent.core.stored.object_layout import pin_key
from mooring_agent.ports import StoreReader, StoreWriter

_WRITES: Final = 5
_POLL_SECONDS: Final = 1.0


async def read_pin(store: StoreReader, attempt: str) -> Pin | None:
    """Return what the attempt resumes from; None while that is undecided."""
    return await if_there(read_object(store, pin_key(attempt), decode_pin, limit_bytes=PIN_BYTES))


async def agree(store: StoreWriter, wish: Pin, *, node_rank: int, timeout_seconds: float) -> Pin:
    """Return the pin in force: `wish` or another pod's. Raises StoreError(TIMED_OUT) if node 0 never decides."""
    capabilities = await store.probe()
    if capabilities.conditional_put or node_rank == 0:
        return await _decide(store, wish)
    return await _wait(store, wish.attempt, timeout_seconds)


async def _decide(store: StoreWriter, wish: Pin) -> Pin:
    doubt: StoreError | None = None
    for attempt in range(1, _WRITES + 1):
        pin = await read_pin(store, wish.attempt)
        if pin is not None:
            return pin
        try:
            await store.put(pin_key(wish.attempt), encode_pin(wish), if_absent=True)
        except StoreError as error:
            # Whether the write was refused or is in doubt, the readback above says which pod was first.
            if error.kind is not ErrorKind.ALREADY_EXISTS and error.kind not in PASSING:
                raise
            doubt = error
            await asyncio.sleep(retry_delay_seconds(error.kind, attempt, 1.0) or 0.0)
    pin = await read_pin(store, wish.attempt)
    if pin is not None:
        return pin
    raise StoreError(
        doubt.kind if doubt else ErrorKind.STORE_FAILED,
        f"the resume pin {pin_key(wish.attempt)} cannot be written: {doubt or 'it is missing after the write'}",
        hint="with an attempt, restore needs permission to write below .mooring/resume/",
    ) from doubt


async def _wait(store: StoreReader, attempt: str, timeout_seconds: float) -> Pin:
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                pin = await read_pin(store, attempt)
                if pin is not None:
                    return pin
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        raise StoreError(
            ErrorKind.TIMED_OUT,
            f"node 0 has not decided within {timeout_seconds:g} s what attempt {attempt} resumes from",
            hint="see restore's log on the pod with node rank 0; all pods of a start need the same attempt",
        ) from error
