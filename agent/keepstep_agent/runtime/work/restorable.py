"""Which committed checkpoints this pod can resume from: those of the destination that it has not found damaged."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from keepstep_agent.catalog.markers import list_committed, named
from keepstep_agent.catalog.weights_only import refuse_fresh_start
from keepstep_agent.core.errors import KeepstepError, StoreError, checkpoint_corrupt, retry_delay_seconds
from keepstep_agent.core.policies.restore_choice import CommittedSave, by_line, newest_first
from keepstep_agent.runtime.work.ready_store import ReadyStore

_NEWEST: Final = 20
"""How many checkpoints of an output directory a pod offers its peers: they choose the newest that all of them name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorable:
    """What a start can resume from, the newest first; None as long as the store has not answered."""

    committed: Sequence[CommittedSave] | None
    storage_error: str = ""


class RestorableListing:
    """`known`: what was listed last, by save. `failures`: what is wrong with each save that could not be had."""

    def __init__(self, store: ReadyStore) -> None:
        self.known: dict[str, CommittedSave] = {}
        self.failures: dict[str, str] = {}
        self._store = store

    async def until(self, give_up_at: float, *, output_key: str | None = None, name: str = "") -> Restorable:
        """As `read`; again and again, until this time of the loop's clock, if the store is away."""
        storage_error = "the store has not answered yet"
        with suppress(TimeoutError):
            async with asyncio.timeout_at(give_up_at):
                attempt = 1
                while True:
                    try:
                        return Restorable(committed=await self.read(output_key=output_key, name=name))
                    except StoreError as failure:
                        delay_seconds = retry_delay_seconds(failure.kind, attempt, random.random())  # noqa: S311 - jitter
                        if delay_seconds is None:
                            raise
                        storage_error = line_of(failure)
                    attempt += 1
                    await asyncio.sleep(delay_seconds)
        return Restorable(committed=None, storage_error=storage_error)

    async def read(self, *, output_key: str | None = None, name: str = "") -> Sequence[CommittedSave]:
        """Return the newest that can be restored of this output directory, or of each; with a `name`, all of that name.

        Raises StoreError: StoreError(CHECKPOINT_CORRUPT) if there are some and none can be restored.
        """
        store = await self._store.get()
        outputs = by_line(await list_committed(store))
        if not outputs:
            await refuse_fresh_start(store)
        self.known = {one.save: one for found in outputs.values() for one in found}
        wanted = [found for (_, key), found in outputs.items() if output_key in {None, key}]
        usable = [[one for one in found if one.save not in self.failures] for found in wanted]
        if name:
            return await named(store, name, [one for found in usable for one in found])
        usable = [found[:_NEWEST] for found in usable]
        if wanted and not any(usable):
            raise checkpoint_corrupt("none of the committed checkpoints can be restored")
        return newest_first([one for found in usable for one in found])


def line_of(error: KeepstepError) -> str:
    """Return an error with its hint, in one line for people."""
    return f"{error} ({error.hint})" if error.hint else str(error)
