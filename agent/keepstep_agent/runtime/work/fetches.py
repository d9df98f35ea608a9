"""Brings committed checkpoints to the volume while the trainer runs, as far as its client asks: the lazy restore.

At the agent's start it guesses: it fetches what this pod most likely needs of the newest checkpoint, while the trainer
imports its libraries. What a client asks for comes first. A storage error that may pass is tried again for as long as
somebody asks, and is told to whoever waits; damage to a checkpoint ends its fetch, and `restorable` leaves it out.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from keepstep_agent.catalog.damage import clear_damage, note_damage
from keepstep_agent.catalog.markers import has_marker, with_last_commits
from keepstep_agent.catalog.object_reads import DAMAGE
from keepstep_agent.catalog.reading import StoredFiles, load
from keepstep_agent.core.agent.events import Announced, Committed, Event, TerminationNoticed
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import (
    ErrorKind,
    KeepstepError,
    RequestError,
    StoreError,
    checkpoint_corrupt,
    retry_delay_seconds,
)
from keepstep_agent.core.model import SaveInfo
from keepstep_agent.core.policies.restore_choice import CommittedSave, last_line
from keepstep_agent.core.settings.table import spelled
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.restore.local_copy import LocalCopies
from keepstep_agent.restore.partial_copy import FileRange, PartialCopy
from keepstep_agent.runtime.work.fetch_requests import Fetch
from keepstep_agent.runtime.work.ready_store import ReadyStore
from keepstep_agent.runtime.work.restorable import Restorable, RestorableListing, line_of
from keepstep_api.names import LAZY

_Result = TypeVar("_Result")
Guessing = Callable[[], AbstractContextManager[None]]
"""Makes the context of a guess."""

log = structlog.get_logger("keepstep.fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """How far the fetch of a checkpoint is. `path` is where to read, once it is done.

    `files`: those of the checkpoint, if nothing was asked for.
    """

    save: str
    step: int
    done_bytes: int = 0
    total_bytes: int = 0
    path: Path | None = None
    storage_error: str = ""
    files: StoredFiles | None = None


class Fetches:
    """`run` works until it is cancelled; `hear` is the engine's listener. `disk` has one thread of its own."""

    def __init__(
        self, *, store: ReadyStore, settings: Settings, disk: Executor, guessing: Guessing | None = None
    ) -> None:
        """`guessing`: the trainer has not begun, so what it needs of the newest checkpoint is worth a guess."""
        self._store = store
        self._settings = settings
        self._disk = disk
        self._volume = Path(settings.volume)
        self._local = LocalCopies(self._volume, Path(settings.checkpoint_directory), Path(settings.state_directory))
        self._listing = RestorableListing(store)
        self._current: Fetch | None = None
        self._carrying: asyncio.Task[None] | None = None
        self._guessing = guessing
        self._guesses = guessing is not None and settings.restore == LAZY
        self._was_asked = False
        self._newest_at_start: CommittedSave | None = None
        self._first_announced: SaveInfo | None = None
        self._began = asyncio.Event()

    async def run(self) -> None:
        """Carry out what is asked for, one checkpoint at a time."""
        guessing = asyncio.create_task(self._guess())
        try:
            while True:
                self._began.clear()
                fetch = self._current
                if fetch is not None and fetch.failure is None:
                    await self._carry_out(fetch)
                elif fetch is not None and fetch.is_superseded:
                    await self._discard(fetch)
                    # What was read of its manifests takes memory.
                    self._current = None if self._current is fetch else self._current
                else:
                    await self._began.wait()
        finally:
            guessing.cancel()
            await asyncio.gather(guessing, return_exceptions=True)

    def hear(self, state: State, event: Event) -> None:
        """End the guess when the trainer saves, and the fetch when what it saved is committed or the pod ends."""
        fetch = self._current
        match event:
            case Announced():
                self._warn_if_not_asked(event.info)
                if event.info.is_snapshot:
                    return
                self._guesses = False
                if fetch is not None:
                    fetch.forget_guess()
                    fetch.announced_since.add(event.info.save)
            case Committed() if fetch is not None and event.work.save in fetch.announced_since:
                # Not every commit: a save from before this start may be committed while its ranks still read.
                fetch.is_superseded = True
                self._end(fetch)
            case TerminationNoticed():
                self._guesses = False
                if fetch is not None:
                    self._end(fetch)
            case _:
                pass

    def progress(self) -> FetchProgress | None:
        """Return how far the current fetch is; None if there is none, or nothing is left to do."""
        fetch = self._current
        if fetch is None or fetch.failure is not None or not fetch.is_busy:
            return None
        return self._progress(fetch, fetch.done_bytes, fetch.wanted_bytes)

    async def restorable(self, output_key: str | None, wait_seconds: float, *, name: str = "") -> Restorable:
        """Return the newest that are committed and not known to be damaged, of an output directory or of all.

        With a name, those of this name, however old.
        Waits so long for a store that is away. Raises StoreError(CHECKPOINT_CORRUPT) if there are some, and all of them
        are damaged.
        """
        self._was_asked = True
        return await self._listing.until(_after(wait_seconds), output_key=output_key, name=name)

    async def fetch(self, save: str, ranges: Sequence[FileRange], *, whole: bool, wait_seconds: float) -> FetchProgress:
        """Ask for all of a committed checkpoint or for ranges of its files, and wait so long.

        Without ranges, and not `whole`, only tell what it consists of; its path is then its place.

        Raises StoreError(CHECKPOINT_CORRUPT) if it is damaged, VolumeError, and RequestError for a save or a file that
        does not exist.
        """
        give_up_at = _after(wait_seconds)
        if save in self._listing.failures:
            raise checkpoint_corrupt(f"save {save} cannot be restored: {self._listing.failures[save]}")
        if self._is_unknown(save):
            listed = await self._listing.until(give_up_at)
            if listed.committed is None:
                return FetchProgress(save=save, step=0, storage_error=listed.storage_error)
        fetch = self._begin(save)
        await _wait(fetch.loaded, give_up_at)
        if fetch.failure is not None:
            raise fetch.failure
        if fetch.copy is None:
            return self._progress(fetch, 0, 0)
        if not whole and not ranges:
            return replace(self._progress(fetch, 0, 0, fetch.copy.place), files=fetch.copy.checkpoint.files)
        if not fetch.is_asked_for:
            await self._on_disk(partial(self._local.note_resumed, fetch.copy.checkpoint))
            fetch.is_asked_for = True
        return await (self._whole(fetch, give_up_at) if whole else self._parts(fetch, ranges, give_up_at))

    async def _whole(self, fetch: Fetch, give_up_at: float) -> FetchProgress:
        assert fetch.copy is not None
        # It takes everything.
        fetch.forget_guess()
        fetch.wants_place.set()
        await _wait(fetch.settled, give_up_at)
        if fetch.failure is not None:
            raise fetch.failure
        path = fetch.copy.path if fetch.copy.is_in_place else None
        return self._progress(fetch, fetch.done_bytes, fetch.wanted_bytes, path)

    async def _parts(self, fetch: Fetch, ranges: Sequence[FileRange], give_up_at: float) -> FetchProgress:
        assert fetch.copy is not None
        pieces = fetch.copy.pieces_of(ranges)
        # A reader that knows what it needs makes every guess worse.
        fetch.forget_guess()
        # Not of what was asked for before: to measure a volume takes seconds per million files.
        new = fetch.not_asked(pieces)
        if new:
            await fetch.copy.check_room(new, self._settings.disk.size_limit_bytes)
            fetch.ask(new)
        with fetch.waiting(pieces) as request:
            await _wait(request.settled, give_up_at)
            if fetch.failure is not None:
                raise fetch.failure
            absent = fetch.absent(pieces)
            total_bytes = fetch.copy.pieces.size_bytes(pieces)
            missing_bytes = fetch.copy.pieces.size_bytes(absent)
            path = None if absent else fetch.copy.path
            return self._progress(fetch, total_bytes - missing_bytes, total_bytes, path)

    def _is_unknown(self, save: str) -> bool:
        return save not in self._listing.known and (self._current is None or self._current.committed.save != save)

    def _begin(self, save: str) -> Fetch:
        current = self._current
        if current is not None and current.committed.save == save:
            # After a failure that says nothing about the checkpoint, such as a full disk, it may work now.
            return current if current.failure is None else self._begin_anew(current.committed)
        if save not in self._listing.known:
            raise RequestError(
                ErrorKind.UNKNOWN_SAVE,
                f"no checkpoint with save id {save!r} is committed",
                hint="ask for one that ListRestorable returns",
            )
        return self._begin_anew(self._listing.known[save])

    def _begin_anew(self, committed: CommittedSave) -> Fetch:
        if self._current is not None:
            self._end(self._current)
        self._current = Fetch(committed)
        self._began.set()
        return self._current

    def _end(self, fetch: Fetch) -> None:
        fetch.fail(
            RequestError(
                ErrorKind.UNKNOWN_SAVE,
                "the fetch was ended: another checkpoint is wanted, a newer one is committed, or the pod ends",
                hint="ask ListRestorable again",
            )
        )
        if self._carrying is not None:
            self._carrying.cancel()
        self._began.set()

    async def _guess(self) -> None:
        """Fetch of the newest checkpoint what is needed, before anybody asks, and note that it is being done."""
        if self._guesses and self._guessing is not None:
            with self._guessing():
                await self._fetch_guessed()

    async def _fetch_guessed(self) -> None:
        """Gives up at the first error: it is only a guess."""
        try:
            # Of several output directories, the training that saved last has most likely not ended.
            committed = last_line(await with_last_commits(await self._store.get(), await self._listing.read()))
            self._newest_at_start = committed[0] if committed else None
            if self._first_announced is not None:
                # The program was faster than the store.
                self._warn_if_not_asked(self._first_announced)
            if not committed or self._current is not None or self._first_announced is not None:
                return
            fetch = self._begin_anew(committed[0])
            await fetch.loaded.wait()
            pieces = self._likely_pieces(fetch)
            if pieces and fetch.copy is not None:
                await fetch.copy.check_room(pieces, self._settings.disk.size_limit_bytes)
        except KeepstepError as error:
            log.info("fetch.not_guessed", error=str(error))
            return
        if pieces and self._may_guess(fetch):
            log.info("fetch.guessed", step=fetch.committed.step, pieces=sum(map(len, pieces)))
            await fetch.guess(pieces).wait()

    def _may_guess(self, fetch: Fetch) -> bool:
        return self._guesses and not fetch.is_asked_for

    def _likely_pieces(self, fetch: Fetch) -> Sequence[range]:
        """Return what this pod most likely needs: all that one agent wrote, or what its own place wrote among many."""
        if fetch.copy is None:
            return ()
        if len(fetch.copy.checkpoint.marker.manifests) == 1:
            return fetch.copy.missing([fetch.copy.all_pieces()])
        return fetch.copy.contribution(self._settings.node_rank) if self._settings.place else ()

    async def _carry_out(self, fetch: Fetch) -> None:
        """Work on a fetch until it fails or is ended."""
        self._carrying = asyncio.create_task(self._work(fetch))
        working = self._carrying
        try:
            await asyncio.wait({working})
        finally:
            # The agent ends, or `_end` was called, or it has failed.
            working.cancel()
            await asyncio.wait({working})
        if not working.cancelled() and (error := working.exception()) is not None:
            await self._fail(fetch, error)

    async def _work(self, fetch: Fetch) -> None:
        store = await self._until_it_works(fetch, self._store.get)
        checkpoint = await self._until_it_works(fetch, partial(load, store, fetch.committed))
        copy = PartialCopy(store, checkpoint, self._local, self._volume, self._disk)
        await copy.prepare()
        fetch.load(copy)
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._settings.transfer.max_concurrency):
                workers.create_task(self._bring_pieces(fetch, copy))
            workers.create_task(self._put_in_place(fetch, copy))

    async def _bring_pieces(self, fetch: Fetch, copy: PartialCopy) -> None:
        while True:
            piece = await fetch.next_piece()
            try:
                await self._until_it_works(fetch, partial(copy.bring, piece))
            except KeepstepError as error:
                if fetch.is_asked(piece):
                    raise
                # Nobody waits for it. Whoever asks for it will hear.
                log.info("fetch.not_guessed", error=str(error))
                fetch.forget_guess()
                continue
            fetch.arrived(piece)

    async def _put_in_place(self, fetch: Fetch, copy: PartialCopy) -> None:
        await fetch.wants_place.wait()
        if await copy.take_place_if_whole():
            fetch.all_arrived()
        else:
            pieces = [copy.all_pieces()]
            await copy.check_room(pieces, self._settings.disk.size_limit_bytes)
            fetch.ask(pieces)
            with fetch.waiting(pieces) as request:
                await request.settled.wait()
            await copy.put_in_place()
            await clear_damage(await self._store.get(), fetch.committed.save)
        log.info("fetch.done", step=fetch.committed.step, save=fetch.committed.save)
        fetch.settled.set()

    async def _discard(self, fetch: Fetch) -> None:
        """Remove what was fetched and has no place: a newer checkpoint is committed, so no start resumes from it."""
        if fetch.copy is None or fetch.copy.is_in_place:
            return
        try:
            await self._on_disk(partial(self._local.discard, fetch.copy.checkpoint))
        except KeepstepError as error:
            log.info("fetch.not_discarded", error=str(error))

    async def _until_it_works(self, fetch: Fetch, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Try until it works, or fails for good."""
        attempt = 1
        while True:
            try:
                result = await work()
            except StoreError as error:
                delay_seconds = retry_delay_seconds(error.kind, attempt, random.random())  # noqa: S311 - jitter
                if delay_seconds is None or error.kind in DAMAGE:
                    raise
                if fetch.storage_error != line_of(error):
                    log.warning("fetch.waits", kind=error.kind.value, error=str(error), hint=error.hint)
                fetch.storage_error = line_of(error)
                attempt += 1
                await asyncio.sleep(delay_seconds)
                continue
            fetch.storage_error = ""
            return result

    async def _fail(self, fetch: Fetch, raised: BaseException) -> None:
        error = raised.exceptions[0] if isinstance(raised, ExceptionGroup) else raised
        save = fetch.committed.save
        if not isinstance(error, KeepstepError):
            log.error("fetch.failed", save=save, exc_info=error)
            error = StoreError(ErrorKind.STORE_FAILED, f"the fetch failed: {error!r}", hint="this is a bug: report it")
        log.warning("fetch.failed", step=fetch.committed.step, save=save, error=str(error), hint=error.hint)
        if error.kind in (*DAMAGE, ErrorKind.MEMORY_SHORT, ErrorKind.FORMAT_UNKNOWN):
            self._listing.failures[save] = str(error)
            with suppress(StoreError):
                store = await self._store.get()
                if error.kind in DAMAGE and await has_marker(store, fetch.committed):
                    await note_damage(store, save, str(error))
            error = checkpoint_corrupt(str(error))
        fetch.fail(error)

    def _warn_if_not_asked(self, info: SaveInfo) -> None:
        """Say it, once, if the program has begun anew because it did not ask for what is committed."""
        self._first_announced = self._first_announced or info
        newest = self._newest_at_start
        if newest is not None and not self._was_asked and (info.is_snapshot or info.step <= newest.step):
            self._was_asked = True
            log.warning(
                "restore.nobody_asked",
                committed_step=newest.step,
                hint="restore is lazy and the program did not ask what to resume from, so it has begun anew; "
                f"resume with Keepstep's client, or set {spelled('restore')} to whole",
            )

    def _progress(self, fetch: Fetch, done_bytes: int, total_bytes: int, path: Path | None = None) -> FetchProgress:
        return FetchProgress(
            save=fetch.committed.save,
            step=fetch.committed.step,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
            path=path,
            storage_error=fetch.storage_error,
        )

    async def _on_disk(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


def _after(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def _wait(event: asyncio.Event, until: float) -> None:
    """Wait for the event, at most until this time of the loop's clock."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await event.wait()
