"""Tries committed saves, the newest first, until one can be restored.

Invariants: damage to one save is reported, noted for prune, and leads to the next older one; trouble with the store or
the disk is an error; if none of them can be restored, that is an error too, never a start from nothing.
"""

import gc
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from typing import TypeVar, assert_never

import structlog

from keepstep_agent.adapters.volume.work_note import WorkNote
from keepstep_agent.catalog.damage import note_damage
from keepstep_agent.catalog.markers import has_marker
from keepstep_agent.catalog.object_reads import DAMAGE
from keepstep_agent.catalog.reading import CommittedCheckpoint, load
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.limits import NAME_CHARACTERS
from keepstep_agent.core.policies.repeated_deaths import MEMORY_HINT, Task
from keepstep_agent.core.policies.restore_choice import CommittedSave, GiveUp, Pin, StartFresh, Take, choose
from keepstep_agent.ports import StoreWriter

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
_Taken = TypeVar("_Taken")


class Candidates:
    """The saves of one restore. `failures` maps the id of each save that was tried to what is wrong with it.

    `relist` returns all that is committed now.
    """

    def __init__(
        self,
        store: StoreWriter,
        relist: Callable[[], Awaitable[Sequence[CommittedSave]]],
        note: WorkNote | None = None,
    ) -> None:
        """`note`: of what is restored, so that what killed two restores in a row is tried last."""
        self.failures: dict[str, str] = {}
        self._note = note
        self._tried_last = {} if note is None else note.set_aside
        self._store = store
        self._relist = relist

    async def first(
        self,
        committed: Sequence[CommittedSave],
        take: Callable[[CommittedCheckpoint], Awaitable[_Taken]],
        *,
        pin: Pin | None = None,
    ) -> _Taken | None:
        """Return what `take` makes of the newest save that can be restored; None if there is none.

        `committed` and what `relist` returns are of one output directory or series. `take` reads the files, and raises
        StoreError if they are damaged. Raises StoreError(CHECKPOINT_CORRUPT) if there are saves and none can be
        restored.
        """
        for candidate in committed:
            if candidate.save in self._tried_last:
                suspect = self._tried_last[candidate.save]
                self.failures[candidate.save] = f"{suspect}; {MEMORY_HINT}"
                _log.error("restore.set_aside", **_fields(candidate), deaths=suspect.deaths, hint=MEMORY_HINT)
        while True:  # ends: every round adds a failure, and `choose` gives up when all have failed
            choice = choose(committed, pin=pin, failures=self.failures)
            match choice:
                case StartFresh():
                    _log.info("restore.starts_fresh", because=choice.because)
                    return None
                case GiveUp() if self._tried_last:
                    self.failures = {save: why for save, why in self.failures.items() if save not in self._tried_last}
                    self._tried_last = {}
                case GiveUp():
                    raise StoreError(ErrorKind.CHECKPOINT_CORRUPT, choice.because, hint=choice.hint)
                case Take(committed=candidate):
                    _log.info("restore.tries", **_fields(candidate), because=choice.because)
                    try:
                        return await self._take(candidate, take)
                    except StoreError as error:
                        if error.kind not in (*DAMAGE, ErrorKind.MEMORY_SHORT, ErrorKind.FORMAT_UNKNOWN):
                            raise
                        damaged, reason = error.kind in DAMAGE, str(error)
                    # Outside the `except`: the error holds everything that was read of that checkpoint.
                    if damaged and not await has_marker(self._store, candidate):
                        # Retention deletes checkpoints that newer ones have replaced. A deleted one still counts as a
                        # failure: if none is left, somebody is emptying the destination, and that is no fresh start.
                        damaged, reason = False, f"{candidate.key} was deleted meanwhile"
                        committed = _joined(committed, await self._relist())
                    await self._skip(candidate, reason, damaged=damaged)
                case _:
                    assert_never(choice)

    async def _skip(self, candidate: CommittedSave, reason: str, *, damaged: bool) -> None:
        """Skip a candidate, and note damage to it at the destination.

        Too little memory here, or a version of Keepstep that is too old, says nothing about the checkpoint.
        """
        self.failures[candidate.save] = reason
        _log.warning("restore.skipped", **_fields(candidate), reason=reason)
        # Reference cycles with errors and tasks would keep the checkpoint's values in memory beside the next one's.
        gc.collect()
        if damaged:
            await note_damage(self._store, candidate.save, reason)

    async def _take(self, candidate: CommittedSave, take: Callable[[CommittedCheckpoint], Awaitable[_Taken]]) -> _Taken:
        if self._note is None:
            return await self._load_and_take(candidate, take)
        title = f"{candidate.series or 'checkpoint'} {candidate.step}"
        with self._note.doing(candidate.save, Task(doing="restore", title=title[:NAME_CHARACTERS])):
            return await self._load_and_take(candidate, take)

    async def _load_and_take(
        self, candidate: CommittedSave, take: Callable[[CommittedCheckpoint], Awaitable[_Taken]]
    ) -> _Taken:
        checkpoint = await load(self._store, candidate)
        seen = _seen(checkpoint)
        try:
            return await take(checkpoint)
        except StoreError as error:
            if error.kind not in DAMAGE:
                raise
            # A copy without the traceback, which holds what was read: there is no memory for that twice.
            damage = StoreError(error.kind, str(error), hint=error.hint)
        del checkpoint
        gc.collect()
        # Perhaps the files are right, and the listing or what was read of a small object was wrong: load it again.
        checkpoint = await load(self._store, candidate)
        if _seen(checkpoint) == seen:
            raise damage
        return await take(checkpoint)


def _joined(committed: Sequence[CommittedSave], more: Sequence[CommittedSave]) -> Sequence[CommittedSave]:
    return tuple({one.key: one for one in (*committed, *more)}.values())


def _fields(candidate: CommittedSave) -> dict[str, object]:
    """Return the fields of the log that say which save it is."""
    if candidate.series:
        return {"series": candidate.series, "number": candidate.step, "save": candidate.save}
    return {"step": candidate.step, "save": candidate.save}


def _seen(checkpoint: CommittedCheckpoint) -> bytes:
    """Return a digest of everything that was read or listed of a checkpoint.

    The marker has the checksums of all manifests.
    """
    digest = sha256(repr(checkpoint.marker).encode())
    for file in checkpoint.files:
        digest.update(f"{file.key}\n{file.version}\n{file.object_bytes}\n".encode())
    return digest.digest()
