"""Feeds events to the core one at a time, journals those that must survive, then dispatches the core's commands.

Owns the state: nothing else changes it. Events that arrive together share one journal transaction. If the journal
cannot be written (a full or read-only volume), the agent goes on from memory with what it can find out again from the
store and from the staged directories. Meanwhile it refuses announcements and keeps all pins.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog

from keepstep_agent.adapters.volume.work_note import WorkNote
from keepstep_agent.core.agent import drain, planner
from keepstep_agent.core.agent.commands import Command, Release, waits_for_its_record
from keepstep_agent.core.agent.events import DURABLE, Announced, DurableEvent, Event, Survived, Ticked, WorkFailed
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.policies.repeated_deaths import Task
from keepstep_agent.ports import Clock, Journal
from keepstep_agent.runtime.engine.event_codec import encode_event
from keepstep_agent.runtime.engine.journaling import compact
from keepstep_agent.runtime.engine.telemetry import log_event

_QUEUE_LIMIT: Final = 100_000
_BATCH_LIMIT: Final = 256
# A record is some 300 bytes and a checkpoint of 10,000 files makes 20,000 of them; the volume is not ours to fill.
_RECORDS_BEFORE_COMPACTION: Final = 50_000
# Every try appends all waiting records, so it costs more the longer the volume is full.
_FIRST_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 10.0

log = structlog.get_logger("keepstep.engine")

Guard = Callable[[State], bool]
"""Called in the engine's turn, before the event: False skips it as already known, RequestError refuses it."""

Listener = Callable[[State, Event], None]
"""Called in the engine's turn, after the event and every decision that follows from it. Must return at once."""


@dataclass(slots=True)
class _Item:
    event: Event
    guard: Guard | None = None
    done: "asyncio.Future[None] | None" = None


@dataclass(slots=True)
class _Turn:
    """What one batch of events leads to: records to journal, commands to dispatch, callers to answer."""

    records: list[bytes] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    # The bool says whether the caller's answer depends on the journal.
    waiting: "list[tuple[asyncio.Future[None], bool]]" = field(default_factory=list)

    @property
    def needs_journal(self) -> bool:
        """Whether a caller or a command waits for the records to be durable."""
        return any(durable for _, durable in self.waiting) or any(
            waits_for_its_record(command) for command in self.commands
        )


class Engine:
    """Runs the core. `executor` is the journal's own and has one thread, so that its calls keep their order."""

    def __init__(
        self,
        *,
        state: State,
        journal: Journal,
        clock: Clock,
        executor: Executor,
        listeners: Sequence[Listener] = (),
        unjournaled: Sequence[bytes] = (),
        note: WorkNote | None = None,
    ) -> None:
        """`unjournaled`: records that `state` includes and the journal does not have yet. `note`: of what is done."""
        self.state = state
        self._journal = journal
        self._clock = clock
        self._executor = executor
        self._listeners = listeners
        self._queue: asyncio.Queue[_Item] = asyncio.Queue(_QUEUE_LIMIT)
        self._changed = asyncio.Condition()
        self._unjournaled = list(unjournaled)
        self._append_failure: KeepstepError | None = None
        self._append_again_at = 0.0
        self._pause_seconds = 0.0
        self._records_since_compaction = 0
        self._compact_after_records = _RECORDS_BEFORE_COMPACTION
        self.revision = 0
        self._note = note
        if note is not None:
            # Calls are served before the first turn.
            state.suspects = dict(note.suspects)
        self._other_work: dict[str, Task] = {}
        self._doers: Counter[str] = Counter()

    def post(self, event: Event) -> None:
        """Queue an event; return at once."""
        self._queue.put_nowait(_Item(event))

    async def submit(self, event: Event, guard: Guard | None = None) -> None:
        """Queue an event; return when it is applied and durable.

        Raises what `guard` raises, and VolumeError when an announcement cannot be journaled. Any other event succeeds
        without the journal, because only an announcement is a promise.
        """
        done = asyncio.get_running_loop().create_future()
        await self._queue.put(_Item(event, guard, done))
        await done

    async def until(self, holds: Callable[[State], bool]) -> None:
        """Wait for a condition of the state; the caller sets the time-out."""
        async with self._changed:
            await self._changed.wait_for(lambda: holds(self.state))

    async def next_change(self, seen_revision: int) -> int:
        """Wait until the state has changed since `seen_revision`; return the current revision."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.revision != seen_revision)
        return self.revision

    async def run(self, dispatch: Callable[[Command], None]) -> None:
        """Take one turn after the other until cancelled."""
        while True:
            turn = _Turn()
            for item in await self._next_items():
                self._apply(item, turn)
            # Before any of it is begun.
            self._note_work()
            failure = await self._append(turn.records, now=turn.needs_journal)
            for command in turn.commands:
                if failure is not None and waits_for_its_record(command):
                    self.post(_refused(command, failure, self._clock.now()))
                else:
                    dispatch(command)
            for done, durable in turn.waiting:
                _resolve(done, failure if durable else None)
            self.revision += 1
            async with self._changed:
                self._changed.notify_all()

    async def close(self, last: DurableEvent) -> None:
        """Apply and journal a last event, with the records that could not be journaled before. Dispatches nothing."""
        advance(self.state, last)
        if self._note is not None:
            # Before what may hang: the agent ends as it was told to, and has not died.
            self._note.close(self.state.suspects)
            self._note = None
        await self._append([encode_event(last)], now=True)

    @contextmanager
    def doing(self, work: str, title: str, doing: str = "") -> Iterator[None]:
        """Note, while the context is, that work is done which belongs to no save, as `repeated_deaths` names it.

        Several may do the same. `doing`: by default the title says it. Work that is cancelled has not shown that it is
        harmless: its thread may go on.
        """
        has_survived = True
        self._other_work[work] = Task(doing=doing or title, title=title)
        self._doers[work] += 1
        self._note_work()
        try:
            yield
        except asyncio.CancelledError:
            has_survived = False
            raise
        finally:
            self._doers[work] -= 1
            is_last = not self._doers[work]
            if is_last:
                del self._other_work[work], self._doers[work]
            self._note_work()
            if is_last and has_survived and work in self.state.suspects:
                self.post(Survived(at=self._clock.now(), suspect=work))

    def _note_work(self) -> None:
        if self._note is not None:
            self._note.write(
                self.state.under_way() | self._other_work,
                self.state.suspects,
                may_be_killed_at=drain.deadline(self.state) if self.state.termination.noticed else None,
            )

    def _apply(self, item: _Item, turn: _Turn) -> None:
        try:
            wanted = item.guard is None or item.guard(self.state)
        except KeepstepError as error:
            _resolve(item.done, error)
            return
        if wanted:
            ready = advance(self.state, item.event)
            turn.records += [encode_event(event) for event in ready.durable]
            for event in ready.durable:
                log_event(self.state, event)
            news = ready.durable if isinstance(item.event, DURABLE) else (*ready.durable, item.event)
            for listen in self._listeners:
                for one in news:
                    listen(self.state, one)
            turn.commands += ready.commands
        if item.done is not None:
            # A known event waits too: if its first try was refused, only memory knows it.
            turn.waiting.append((item.done, isinstance(item.event, Announced)))

    async def _next_items(self) -> Sequence[_Item]:
        """Return the events that have arrived, or a tick when one is due."""
        wake_at = planner.next_wake(self.state)
        if self._append_failure is not None:
            wake_at = self._append_again_at if wake_at is None else min(wake_at, self._append_again_at)
        timeout_seconds = None if wake_at is None else max(0.0, wake_at - self._clock.now())
        try:
            async with asyncio.timeout(timeout_seconds):
                items = [await self._queue.get()]
        except TimeoutError:
            return [_Item(Ticked(at=max(self._clock.now(), wake_at or 0.0)))]
        while len(items) < _BATCH_LIMIT and not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items

    async def _append(self, records: Sequence[bytes], *, now: bool) -> KeepstepError | None:
        """Journal `records` and those still waiting; on failure log and return the error, and keep them all.

        After a failure the journal is tried again only after a pause, or at once if `now`.
        """
        was_unwritable = bool(self._unjournaled)
        self._unjournaled += records
        if not self._unjournaled:
            return None
        if self._append_failure is not None and not now and self.state.now < self._append_again_at:
            return self._append_failure
        # If this is cancelled, the journal's thread still appends these; they must not be appended a second time.
        pending, self._unjournaled = self._unjournaled, []
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self._journal.append, pending)
        except KeepstepError as error:
            if not was_unwritable:
                log.error("journal.unwritable", error=str(error), hint=error.hint)
            self._unjournaled = pending
            self._append_failure = error
            self._pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * self._pause_seconds or _FIRST_PAUSE_SECONDS)
            self._append_again_at = self.state.now + self._pause_seconds
            return error
        if was_unwritable:
            log.info("journal.writable_again", records=len(pending))
        self._append_failure, self._pause_seconds = None, 0.0
        self._records_since_compaction += len(pending)
        if self._records_since_compaction >= self._compact_after_records:
            await self._compact()
        return None

    async def _compact(self) -> None:
        """Shorten the journal. A failure is only logged."""
        loop = asyncio.get_running_loop()
        kept = 0
        try:
            kept = await loop.run_in_executor(self._executor, compact, self.state, self._journal)
        except KeepstepError as error:
            log.warning("journal.not_compacted", error=str(error), hint=error.hint)
        self._records_since_compaction = 0
        # Another look at records that are still needed would drop none of them.
        self._compact_after_records = max(_RECORDS_BEFORE_COMPACTION, 2 * kept)


def _refused(command: Release, failure: KeepstepError, now: float) -> WorkFailed:
    """The failure of a command that needed the journal; the core tries it again later, like any failed work."""
    return WorkFailed(at=now, work=command.work, kind=failure.kind, message=str(failure), hint=failure.hint, jitter=0.0)


def _resolve(done: "asyncio.Future[None] | None", error: KeepstepError | None) -> None:
    if done is None or done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
