"""Keeps this agent's part of the run's ledger: notes what happens, and writes it to the destination from time to time.

Entries are made in the engine's turn. After a failure they wait for the next object; the oldest are dropped when there
are too many. docs/design/0019 says when an object is written.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final

from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.commands import Exit
from keepstep_agent.core.agent.events import (
    Announced,
    Committed,
    Event,
    Failed,
    RanksSeen,
    SaveBegun,
    Shed,
    Started,
    StepSeen,
    TerminationNoticed,
)
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import KeepstepError, printable
from keepstep_agent.core.limits import LEDGER_BYTES, SECONDS, TEXT_CHARACTERS
from keepstep_agent.core.policies.repeated_deaths import Suspect
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.core.stored.ledger import (
    AgentEnded,
    AgentLife,
    AgentStarted,
    Alive,
    LedgerEntry,
    Noticed,
    RanksChanged,
    Resumed,
    SaveCommitted,
    Saved,
    SaveLost,
    WorkSetAside,
    encode_life,
)
from keepstep_agent.core.stored.object_layout import ledger_key
from keepstep_agent.ports import Clock
from keepstep_agent.restore.start_record import StartRecord
from keepstep_agent.runtime.work.ready_store import ReadyStore

_ENTRIES_KEPT: Final = 4_096
_ENTRIES_PER_OBJECT: Final = 1_000
_BETWEEN_OBJECTS_SECONDS: Final = 60.0
_BETWEEN_SIGNS_SECONDS: Final = 300.0
_WRITE_SECONDS: Final = 10.0


class LedgerWriter:
    """The outbox's sender to the destination. `hear` is the engine's listener."""

    to = "ledger"

    def __init__(
        self,
        *,
        store: ReadyStore,
        clock: Clock,
        settings: Settings,
        restored: StartRecord | None,
        between_objects_seconds: float = _BETWEEN_OBJECTS_SECONDS,
        between_signs_seconds: float = _BETWEEN_SIGNS_SECONDS,
    ) -> None:
        """`restored`: what the restore before this agent did; None if none ran."""
        self._store = store
        self._clock = clock
        self._attempt = settings.attempt
        self._place = settings.place
        self._node_rank = settings.node_rank
        self._restored = restored
        self._between_objects_seconds = between_objects_seconds
        self._between_signs_seconds = between_signs_seconds
        self._agent = secrets.token_hex(8)
        self._start = restored.start if restored else settings.cluster.pod_uid or self._agent
        self._entries: deque[LedgerEntry] = deque(maxlen=_ENTRIES_KEPT)
        self._first: LedgerEntry | None = None
        self._noted: deque[LedgerEntry] = deque(maxlen=_ENTRIES_KEPT)
        self._number = 0
        self._objects = 0
        self._ranks = 0
        self._had_ranks = False
        self._step = 0
        self._output = ""
        self._source = ""
        self._wants_object = self._is_urgent = False
        # By the event loop's clock.
        self._next_object_at = self._last_object_at = float("-inf")
        self._news = asyncio.Event()

    def hear(self, state: State, event: Event) -> None:
        match event:
            case Started():
                # A start that nothing follows is written with the end.
                self._add(self._started(state, event.at), wants_object=False)
                for work, suspect in state.works_set_aside().items():
                    self._add(_set_aside(work, suspect, event.at))
            case RanksSeen() if len(event.alive) != self._ranks:
                if not self._ranks and self._had_ranks:
                    # They may have resumed from a lower step than those before them had reached.
                    self._step = 0
                self._ranks = len(event.alive)
                self._had_ranks = True
                self._add(lambda number: RanksChanged(number=number, at=event.at, ranks=self._ranks))
            case SaveBegun():
                self._step = max(self._step, event.step)
            case StepSeen() if event.newest is not None:
                self._step = max(self._step, event.newest.step)
            case Announced() if (found := state.checkpoints.get(event.info.save)) and found.all_announced:
                self._add(self._saved(event, found), wants_object=False)
            case Committed() if found := state.checkpoints.get(event.work.save):
                seconds = _bounded(event.at - found.announced_at)
                self._add(
                    lambda number: SaveCommitted(
                        number=number,
                        at=event.at,
                        save=event.work.save,
                        size_bytes=found.size_bytes,
                        upload_seconds=seconds,
                    )
                )
            case Shed() | Failed():
                outcome = "shed" if isinstance(event, Shed) else "failed"
                reason = _shortened(event.reason)
                self._add(
                    lambda number: SaveLost(number=number, at=event.at, save=event.save, outcome=outcome, reason=reason)
                )
            case TerminationNoticed() if event.source != self._source:
                self._source = event.source
                self._add(self._noticed(event))
                self._is_urgent = True
            case _:
                pass

    def life(self) -> AgentLife:
        """Return the first entry and the newest others, written or not."""
        first = () if self._first is None else (self._first,)
        return self._life_with((*first, *self._noted))

    async def until_due(self) -> None:
        while not self._is_urgent:
            due = [self._next_object_at] if self._wants_object else []
            if self._ranks:
                due.append(max(self._next_object_at, self._last_object_at + self._between_signs_seconds))
            due_at = min(due, default=None)
            if due_at is not None and due_at <= asyncio.get_running_loop().time():
                return
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_at):
                    await self._news.wait()

    async def send(self) -> None:
        """Write an object."""
        if self._ranks:
            self._add(lambda number: Alive(number=number, at=self._clock.now(), ranks=self._ranks, step=self._step))
        # Before the write, because more may be noted meanwhile.
        self._wants_object = self._is_urgent = False
        self._last_object_at = asyncio.get_running_loop().time()
        self._next_object_at = self._last_object_at + self._between_objects_seconds
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                await self._write_one(most=_ENTRIES_PER_OBJECT)
        except (KeepstepError, TimeoutError):
            self._wants_object = True
            raise

    async def send_last(self) -> None:
        await self._write_one(most=_ENTRIES_KEPT)

    def note_end(self, command: Exit, *, program_failed: bool = False, failed_early: bool = False) -> None:
        self._add(
            lambda number: AgentEnded(
                number=number,
                at=self._clock.now(),
                code=command.code,
                source=_shortened(self._source),
                not_durable=len(command.lost),
                program_failed=program_failed,
                failed_early=failed_early,
            )
        )

    def _add(self, make: Callable[[int], LedgerEntry], *, wants_object: bool = True) -> None:
        self._number += 1
        entry = make(self._number)
        self._entries.append(entry)
        if self._first is None:
            self._first = entry
        else:
            self._noted.append(entry)
        self._wants_object |= wants_object
        self._news.set()

    def _started(self, state: State, at: float) -> Callable[[int], AgentStarted]:
        restored = self._restored
        resumed, step, save = Resumed.UNKNOWN, 0, ""
        if restored:
            resumed, step, save = restored.resumed, restored.step, restored.save
        newest = state.newest()
        # The program resumes from a newer checkpoint on its volume if all of it is there.
        is_whole_here = newest is not None and len(newest.contributions) == newest.info.world_size
        if newest and is_whole_here and not newest.info.is_snapshot and newest.info.step > step:
            resumed, step, save = Resumed.SAVE, newest.info.step, newest.info.save
        self._step = max(self._step, step)
        return lambda number: AgentStarted(
            number=number,
            at=at,
            start=self._start,
            restore_began_at=restored.began_at if restored else None,
            restored_at=restored.restored_at if restored else None,
            resumed=resumed,
            step=step,
            save=save,
        )

    def _saved(self, event: Announced, checkpoint: Checkpoint) -> Callable[[int], Saved]:
        """`event` is that of the rank that announced last; begin and stall are those of all ranks of the pod."""
        info = event.info
        begun = [one.announced.begun_at for one in checkpoint.contributions.values()]
        begun_at = min((moment for moment in begun if moment is not None), default=None)
        output = _shortened(info.output_directory)
        if not info.is_snapshot:
            # Another training of the same program begins with steps of its own.
            self._step = max(self._step, info.step) if output == self._output else info.step
            self._output = output
        # What an earlier agent did not take was complete when the client recorded it.
        at = event.at if event.recorded_at is None else event.recorded_at
        return lambda number: Saved(
            number=number,
            at=at,
            save=info.save,
            step=info.step,
            save_kind=info.kind.value,
            output=output,
            begun_at=begun_at,
            stall_seconds=checkpoint.stall_seconds or None,
            units=dict(event.units),
        )

    def _noticed(self, event: TerminationNoticed) -> Callable[[int], Noticed]:
        grace_seconds = None if event.deadline is None else _bounded(event.deadline - event.at)
        return lambda number: Noticed(
            number=number, at=event.at, source=_shortened(event.source), grace_seconds=grace_seconds
        )

    async def _write_one(self, *, most: int) -> None:
        """Write an object with at most so many entries. Raises KeepstepError, and then keeps them."""
        entries = tuple(islice(self._entries, most))
        written, is_full = entries[-1].number, len(entries) == most
        body = self._encoded(entries)
        while len(body) > LEDGER_BYTES and len(entries) > 1:
            # Nobody would read it. The newest entries say most.
            entries = entries[len(entries) // 2 :]
            body = self._encoded(entries)
        self._objects += 1
        key = ledger_key(self._attempt, self._clock.now(), f"{self._agent}.{self._objects}")
        await (await self._store.get()).put(key, body)
        # The oldest of them may have been dropped meanwhile.
        while self._entries and self._entries[0].number <= written:
            self._entries.popleft()
        self._wants_object |= bool(self._entries) and is_full

    def _encoded(self, entries: tuple[LedgerEntry, ...]) -> bytes:
        return encode_life(self._life_with(entries))

    def _life_with(self, entries: tuple[LedgerEntry, ...]) -> AgentLife:
        return AgentLife(
            agent=self._agent, attempt=self._attempt, place=self._place, node_rank=self._node_rank, entries=entries
        )


def _set_aside(work: str, suspect: Suspect, at: float) -> Callable[[int], WorkSetAside]:
    save = "" if work.startswith(":") else work
    return lambda number: WorkSetAside(
        number=number, at=at, work=suspect.last.title, doing=suspect.last.doing, deaths=suspect.deaths, save=save
    )


def _bounded(seconds: float) -> float:
    return min(max(0.0, seconds), float(SECONDS))


def _shortened(text: str) -> str:
    return printable(text)[:TEXT_CHARACTERS]
