"""Keeps the note of what this process does, so that the next one knows what was under way if it dies.

One page of a file in the state directory, written in place: a write is whole or absent whenever the process is killed,
and costs some microseconds, because nothing is synced. Only a power cut loses it, and that is no death that counts: the
note has the boot id of its machine. It also has the memory limit, because what killed an agent need not kill one that
has more. Invariant: nothing here raises or delays a start; without the note, deaths are not counted.
"""

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
from msgspec import Meta

from keepstep_agent.adapters.control_group import boot_id, memory_limit_bytes
from keepstep_agent.adapters.volume.own_entries import move_aside_wrong_kinds, rename_aside
from keepstep_agent.adapters.volume.shared_folders import open_state_directory
from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.core.limits import NAME_CHARACTERS, Count, Moment, NameText
from keepstep_agent.core.policies.repeated_deaths import (
    MEMORY_HINT,
    READING,
    Suspect,
    Task,
    after_death,
    after_orderly_end,
)

_PAGE_BYTES: Final = 4_096
_LAPSES_AFTER_SECONDS: Final = 24 * 3600.0
"""After so long without another death, work is begun as if nothing had been."""
_Works = Annotated[str, Meta(max_length=2 * 128)]

log = structlog.get_logger("keepstep.deaths")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What the page says. `may_be_killed_at`: from then on a kill says nothing about the work; unix time."""

    boot: NameText = ""
    memory_limit_bytes: Count | None = None
    may_be_killed_at: Moment | None = None
    under_way: dict[_Works, Task] = field(default_factory=dict)
    suspects: dict[_Works, Suspect] = field(default_factory=dict)


class WorkNote:
    """The note of one process. `suspects`: what was under way when the ones before it died. Blocks for microseconds."""

    def __init__(self, volume: Path, state_directory: Path, name: str, *, now: float) -> None:
        """Read what the process before this one has left, and take its place. Never raises."""
        self._boot = boot_id()
        self._descriptor: int | None = None
        self._is_failing = False
        self._written: tuple[object, ...] | None = None
        self.suspects: Mapping[str, Suspect] = {}
        try:
            with open_state_directory(volume, state_directory) as folder:
                self._descriptor = _opened(folder, name)
                self._take_over(os.pread(self._descriptor, _PAGE_BYTES, 0), now)
        except OSError as error:
            self._say(error)
        self.write({}, self.suspects)

    @property
    def set_aside(self) -> dict[str, Suspect]:
        """What is tried last, because it was under way at several deaths in a row."""
        return {work: one for work, one in self.suspects.items() if one.is_set_aside}

    @property
    def left_out(self) -> Collection[str]:
        """The saves and the journal that are not read at this start, because that killed those before it."""
        return [work for work, one in self.suspects.items() if one.is_unread]

    def reads(self, work: str, title: str = "") -> None:
        """Note that a save or the journal is about to be read. Never raises."""
        known = self.suspects.get(work)
        title = title or (known.last.title if known else work)
        self.write({work: Task(doing=READING, title=title[:NAME_CHARACTERS])}, self.suspects)

    @contextmanager
    def doing(self, work: str, task: Task) -> Iterator[None]:
        """Note work for as long as the context is. It is no suspect any more when that ends, whatever came of it."""
        self.write({work: task}, self.suspects)
        try:
            yield
        finally:
            self.suspects = {other: one for other, one in self.suspects.items() if other != work}
            self.write({}, self.suspects)

    def write(
        self,
        under_way: Mapping[str, Task],
        suspects: Mapping[str, Suspect],
        *,
        may_be_killed_at: float | None = None,
    ) -> None:
        """Note what is under way from now on. Never raises."""
        what = (dict(under_way), dict(suspects), may_be_killed_at)
        if self._descriptor is None or what == self._written:
            return
        self._written = what
        note = _Note(
            boot=self._boot,
            memory_limit_bytes=memory_limit_bytes(),
            may_be_killed_at=may_be_killed_at,
            under_way=dict(under_way),
            suspects=dict(suspects),
        )
        try:
            os.pwrite(self._descriptor, _page(note), 0)
        except OSError as error:
            self._say(error)

    def close(self, suspects: Mapping[str, Suspect]) -> None:
        """Note an orderly end. Never raises."""
        self.write({}, after_orderly_end(suspects))
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take_over(self, page: bytes, now: float) -> None:
        """Find out what the process before this one left, and whether it has died of its own work."""
        try:
            note = msgspec.json.decode(page, type=_Note)
        except (ValueError, RecursionError, OverflowError):
            # There was none, or another version's.
            return
        if note.memory_limit_bytes != memory_limit_bytes():
            return
        suspects = {work: one for work, one in note.suspects.items() if now < one.noted_at + _LAPSES_AFTER_SECONDS}
        is_of_work = note.boot == self._boot and (note.may_be_killed_at is None or now < note.may_be_killed_at)
        if note.under_way and is_of_work:
            self.suspects = after_death(suspects, note.under_way, now)
            _say_death(note.under_way, self.suspects)
        else:
            self.suspects = after_orderly_end(suspects)

    def _say(self, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.warning(
                "work.not_noted", error=str(error), hint="if work kills the agent, the next one does not know which"
            )


def _say_death(under_way: Mapping[str, Task], suspects: Mapping[str, Suspect]) -> None:
    works = [f"{task.title}: {task.doing}" for task in under_way.values()]
    log.warning("work.died", under_way=works, hint=f"{MEMORY_HINT}; `dmesg` or the container's last state says so")
    for work, suspect in suspects.items():
        if suspect.is_set_aside and work in under_way:
            log.error(
                "work.set_aside",
                work=work,
                title=suspect.last.title,
                doing=suspect.last.doing,
                deaths=suspect.deaths,
                action="everything else goes on, and this is tried again last",
                hint=MEMORY_HINT,
            )


def _opened(folder: Folder, name: str) -> int:
    """Open the note, or make it. What is no regular file of its own is moved aside."""
    move_aside_wrong_kinds(folder, {name: stat.S_IFREG})
    if folder.exists(name) and folder.status(name).st_nlink > 1:
        rename_aside(folder, name)
    descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    with suppress(OSError):
        # So that the page has its place on the disk before the disk is full.
        os.posix_fallocate(descriptor, 0, _PAGE_BYTES)
    return descriptor


def _page(note: _Note) -> bytes:
    """Encode the note in one page, without the work that has no room: the least suspect is left out."""
    body = msgspec.json.encode(note)
    if len(body) > _PAGE_BYTES:

        def deaths(work: str) -> int:
            return note.suspects[work].deaths if work in note.suspects else 0

        under_way, suspects = (sorted(works, key=deaths, reverse=True) for works in (note.under_way, note.suspects))
        excess = len(body) - _PAGE_BYTES
        while excess > 0:
            longer, order = (note.under_way, under_way) if len(under_way) > len(suspects) else (note.suspects, suspects)
            work = order.pop()
            # Without the braces, and with the comma before the next one.
            excess -= len(msgspec.json.encode({work: longer.pop(work)})) - 1
        body = msgspec.json.encode(note)
    return body.ljust(_PAGE_BYTES)
