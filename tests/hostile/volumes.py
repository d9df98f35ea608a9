"""Hostile journals and staged descriptors, read by an agent's start: replay, the look at what is pinned, first events.

Each round damages one of them in one way, or writes it as somebody does who knows the form. Invariants: nothing is
raised but Keepstep's own; no round takes longer than the bound; a checkpoint that is soundly pinned and described is
known afterwards.
"""

import asyncio
import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.core.play import PART_BYTES, Play, settings
from tests.harness.agent_process import write_checkpoint
from tests.hostile.mutations import mutated_bytes, mutated_object
from tests.hostile.objects import WORK_SECONDS

from keepstep_agent.adapters.journal import SqliteJournal, open_journal
from keepstep_agent.adapters.volume.disk import Reserve
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.agent.commands import Stage
from keepstep_agent.core.agent.events import (
    Announced,
    DurableEvent,
    RankRegistered,
    Started,
    TerminationNoticed,
    Ticked,
)
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.model import Kind, Phase, SaveInfo
from keepstep_agent.runtime.engine.event_codec import encode_event
from keepstep_agent.runtime.engine.journaling import recover
from keepstep_agent.runtime.engine.status import describe
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.transfers import stage
from keepstep_api.names import JOURNAL, STAGED_DIRECTORY, STATE_DIRECTORY

_RECORD: Final = "record"
_FILE: Final = "file"
_DESCRIPTOR: Final = "descriptor"
_DAMAGED: Final = "damaged-save"
_SOUND: Final = "sound-save"


@dataclass(slots=True, kw_only=True)
class Starts:
    """What the rounds came to; `believed`: with the journal as it was found."""

    rounds: int = 0
    believed: int = 0
    moved_aside: int = 0
    longest_work_seconds: float = 0.0


class Volume:
    """Two staged checkpoints whose descriptors are all that is known of them, and a journal about three others."""

    def __init__(self, folder: Path) -> None:
        self._kept = folder / "kept"
        self._volume = folder / "volume"
        self._journal = self._volume / STATE_DIRECTORY / "agent" / JOURNAL
        self._records = [encode_event(event) for event in _story()]
        for step, save in enumerate((_DAMAGED, _SOUND), 1):
            _stage(self._kept, save, step)

    def round(self, seed: int, starts: Starts) -> None:
        generator = random.Random(seed)
        # The pins stay the files that their descriptors tell of.
        shutil.copytree(self._kept, self._volume, copy_function=os.link)
        try:
            what = self._damage(generator)
            began = time.process_time()
            aside = self._start(what)
            took_seconds = time.process_time() - began
        finally:
            shutil.rmtree(self._volume)
        assert took_seconds < WORK_SECONDS, seed
        starts.longest_work_seconds = max(starts.longest_work_seconds, took_seconds)
        starts.moved_aside += aside
        starts.believed += not aside
        starts.rounds += 1

    def _damage(self, generator: random.Random) -> str:
        what = generator.choice((_RECORD, _FILE, _DESCRIPTOR))
        records = list(self._records)
        if what == _RECORD:
            number = generator.randrange(len(records))
            records[number] = mutated_object(records[number], generator)
        self._journal.parent.mkdir(parents=True)
        with closing(SqliteJournal(self._journal, Reserve(self._volume))) as journal:
            journal.append(records)
        if what == _FILE:
            self._journal.write_bytes(mutated_bytes(self._journal.read_bytes(), generator))
        if what == _DESCRIPTOR:
            descriptor = self._volume / STATE_DIRECTORY / STAGED_DIRECTORY / _DAMAGED / "rank-00000.json"
            changed = _mutated_descriptor(descriptor.read_bytes(), generator)
            # Not in place: the file is the kept volume's too.
            descriptor.unlink()
            descriptor.write_bytes(changed)
        return what

    def _start(self, what: str) -> bool:
        """As an agent starts; whether the journal was moved aside."""
        journal, was_damaged = open_journal(self._journal, Reserve(self._volume))
        with closing(journal):
            state, unjournaled = recover(settings(), journal, LocalStagingArea(self._volume))
            advance(state, Started(at=200.0, fresh=False))
            advance(state, Ticked(at=201.0))
            describe(state, 202.0)
            again, _ = recover(settings(), journal, LocalStagingArea(self._volume))
        aside = was_damaged or any(".damaged-" in path.name for path in self._journal.parent.iterdir())
        assert not unjournaled
        assert state.checkpoints[_SOUND].phase is Phase.STAGED
        assert again.checkpoints[_SOUND].phase is Phase.STAGED
        assert what == _DESCRIPTOR or state.checkpoints[_DAMAGED].phase is Phase.STAGED
        assert what != _DESCRIPTOR or not aside
        return aside


def _story() -> Sequence[DurableEvent]:
    """Of a checkpoint that was committed, one that is halfway, and one that is only announced."""
    play = Play()
    play.feed(RankRegistered(at=play.now, local_rank=0, rank=0))
    play.announce("committed", (10, 2 * PART_BYTES))
    play.finish()
    play.announce("half", (3 * PART_BYTES,))
    play.answer(WorkId(Operation.CREATE_UPLOAD, "half", 0, "r0-0"))
    play.answer(next(work for work in play.in_flight if work.number == 2))
    play.announce_only("announced", world_size=4, local_world_size=2)
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="preStop"))
    return play.journal


def _stage(volume: Path, save: str, step: int) -> None:
    source = write_checkpoint(volume / "checkpoints" / f"checkpoint-{step}", {"model.bin": 5000, "optimizer.bin": 10})
    info = SaveInfo(save=save, name=source.name, step=step, kind=Kind.PERIODIC, world_size=1)
    announced = Announced(at=float(step), info=info, rank=0, path=str(source), files=(), local_world_size=1)
    command = Stage(
        work=WorkId(Operation.STAGE, save, 0),
        announcements=(announced,),
        private=False,
        rewritten_inodes=frozenset(),
        part_size_bytes=PART_BYTES,
        pack_size_bytes=0,
    )
    with ThreadPoolExecutor(1) as executor:
        asyncio.run(stage(LocalStagingArea(volume), SystemClock(), executor, command))


def _mutated_descriptor(body: bytes, generator: random.Random) -> bytes:
    """The files that it lists, or the announcement that it holds as a journal record has it."""
    if generator.random() < 0.5:
        return mutated_object(body, generator, sealed=False)
    value = json.loads(body)
    (record,) = value["descriptor"]["announcements"]
    value["descriptor"]["announcements"] = [mutated_object(record.encode(), generator).decode(errors="replace")]
    return json.dumps(value).encode()


def attack(folder: Path, *, rounds: int, seed: int) -> Starts:
    volume = Volume(folder)
    starts = Starts()
    for number in range(rounds):
        volume.round(seed * 1_000_000 + number, starts)
    return starts
