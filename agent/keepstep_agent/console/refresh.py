"""Reads all runs again and again in the background, and keeps what the pages show.

Invariants: a page costs no request to the store; of a run, its row and its packed details stay in memory, and its
ledger merged and compressed; an error hides nothing that was known before; requests at once are bounded.
"""

import asyncio
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import structlog

from keepstep_agent.adapters.priority import malloc_trim
from keepstep_agent.catalog.damage import damaged_saves
from keepstep_agent.catalog.kept_ledger import KeptLedger
from keepstep_agent.catalog.markers import newest_of_run, read_marker, weights_of_run, with_last_commits
from keepstep_agent.catalog.object_reads import DAMAGE, for_each
from keepstep_agent.catalog.runs import find_runs
from keepstep_agent.console.settings import MOST_KEPT_BYTES, MOST_RUNS, ConsoleSettings
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError
from keepstep_agent.core.model import CommitMarker
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.run_overview import RunDetails, RunOverview, RunStanding, overview_of, usable_newest
from keepstep_agent.ports import StoreReader

_RUNS_AT_ONCE: Final = 8
_MARKERS: Final = 1_000
"""How many committed checkpoints of a run are listed: about one page of a listing."""
_ROUNDS: Final[Mapping[RunStanding, int]] = {
    RunStanding.RUNNING: 1,
    RunStanding.STOPPED: 4,
    RunStanding.FAILED: 4,
    RunStanding.COMPLETE: 20,
    RunStanding.ABANDONED: 20,
}
"""A run is read in each round of so many, by how it stands."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger("keepstep.console")


class KnownRun:
    """A run as it was read last. `overview` is None until then; `error` says why the last reading failed.

    `is_empty`: it has neither a committed checkpoint nor a ledger yet, so it is not shown.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.overview: RunOverview | None = None
        self.read_at: float | None = None
        self.error = ""
        self.is_empty = False
        self.ledger = KeptLedger()
        self._listed: int | None = None
        self._weights: tuple[CommittedSave, ...] = ()
        self._damaged: frozenset[str] = frozenset()
        self._newest: tuple[str, CommitMarker | None] = ("", None)
        self._details = b""

    @property
    def name(self) -> str:
        """The prefix without its slash; `.` if the destination itself is the run."""
        return self.prefix.removesuffix("/") or "."

    def details(self) -> RunDetails | None:
        if not self._details:
            return None
        return msgspec.json.decode(zlib.decompress(self._details), type=RunDetails)

    async def read(self, store: StoreReader, executor: ThreadPoolExecutor) -> None:
        """Read what has changed."""
        committed, all_listed = await newest_of_run(store, self.prefix, most=_MARKERS)
        listed = hash((committed, all_listed))
        # A prune that leaves the weights alone takes the commit marker away, so the listing above changes with them.
        weights = await weights_of_run(store, self.prefix, most=_MARKERS) if listed != self._listed else self._weights
        fresh = await self.ledger.fetch(store, self.prefix, needed=listed != self._listed)
        is_new = fresh is not None or listed != self._listed
        # Whoever finds damage tells the ledger of a start too. Whoever finds a save whole may tell nobody.
        damaged = await damaged_saves(store, self.prefix) if is_new or self._damaged else self._damaged
        if not is_new and damaged == self._damaged:
            return
        committed = await with_last_commits(store, committed, run=self.prefix)
        usable = usable_newest(committed, damaged)
        newest = await self._read_newest(store, usable) if usable else None

        def compute() -> tuple[RunOverview, bytes]:
            self.ledger.add(fresh or ())
            overview, details = overview_of(
                committed,
                newest,
                self.ledger.lives(),
                weights_only=weights,
                damaged=damaged,
                all_listed=all_listed,
                unread=self.ledger.unread,
            )
            return overview, zlib.compress(msgspec.json.encode(details), 6)

        overview, self._details = await asyncio.get_running_loop().run_in_executor(executor, compute)
        # A marker that may not be read is asked for again, because somebody may grant that.
        is_known = usable is None or self._newest[0] == usable.key
        self.overview, self._weights, self._damaged = overview, weights, damaged
        self._listed = listed if is_known else None
        self.is_empty = not (committed or weights or overview.time or overview.unread)

    async def _read_newest(self, store: StoreReader, committed: CommittedSave) -> CommitMarker | None:
        """Return the marker of the newest good checkpoint; None if it cannot be read."""
        if self._newest[0] != committed.key:
            try:
                marker = await read_marker(store, committed, run=self.prefix)
            except StoreError as error:
                if error.kind is ErrorKind.ACCESS_DENIED:
                    return None
                if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN):
                    raise
                marker = None
            self._newest = (committed.key, marker)
        return self._newest[1]


class Runs:
    """All runs of the destination. `error` says why they could not be found again, `refused` as in `FoundRuns`."""

    def __init__(
        self, store: StoreReader, settings: ConsoleSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._known: dict[str, KnownRun] = {}
        self._found: frozenset[str] = frozenset()
        self.found_at: float | None = None
        self.complete = True
        self.refused: tuple[str, ...] = ()
        self.error = ""
        self.hint = ""
        self._store = store
        self._settings = settings
        self._clock = clock
        self._round = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="keepstep-console")

    @property
    def known(self) -> Mapping[str, KnownRun]:
        """The runs that are shown, by name."""
        return {run.name: run for run in self._known.values() if not run.is_empty}

    @property
    def reading(self) -> int:
        """How many runs have not been read yet."""
        return sum(run.overview is None and not run.error for run in self.known.values())

    async def keep_reading(self) -> None:
        """Read for ever."""
        try:
            while True:
                await self.read_all()
                await asyncio.sleep(self._settings.refresh_seconds)
        finally:
            self._executor.shutdown(wait=False)

    async def read_all(self) -> None:
        """Find the runs, and read those whose turn it is."""
        try:
            found = await find_runs(self._store, known=self._found)
        except KeepstepError as error:
            if str(error) != self.error:
                _log.warning("console.store_unreachable", error=str(error))
            self.error, self.hint = str(error), error.hint
            return
        self.error = self.hint = ""
        self.complete = found.complete and len(found.runs) <= MOST_RUNS
        self.refused = found.refused
        self._found = frozenset(found.runs)
        prefixes = found.runs[:MOST_RUNS]
        self._known = {prefix: self._known.get(prefix) or KnownRun(prefix) for prefix in prefixes}
        self.found_at = self._clock()
        due = [run for run in self._known.values() if self._is_due(run)]
        self._round += 1
        await for_each(due, self._read, at_once=_RUNS_AT_ONCE)
        self._forget_largest()
        await asyncio.to_thread(malloc_trim)

    def _is_due(self, run: KnownRun) -> bool:
        if run.overview is None or run.error or run.is_empty:
            return True
        standing = run.overview.standing(self._clock(), self._settings.abandoned_after_seconds)
        return self._round % _ROUNDS[standing] == 0

    async def _read(self, run: KnownRun) -> None:
        try:
            await run.read(self._store, self._executor)
        except KeepstepError as error:
            run.error = str(error)
        except Exception:
            # Whatever a stranger has put there, the other runs are shown.
            _log.exception("console.run_not_read", run=run.name)
            run.ledger = KeptLedger()
            run.error = "it cannot be read because of a bug in Keepstep; the console's log has the details"
        else:
            run.error, run.read_at = "", self._clock()

    def _forget_largest(self) -> None:
        kept = sorted((run.ledger for run in self._known.values()), key=lambda ledger: ledger.kept_bytes)
        total = sum(ledger.kept_bytes for ledger in kept)
        while kept and total > MOST_KEPT_BYTES:
            total -= kept[-1].kept_bytes
            kept.pop().forget()
