"""A program whose writes happen at given times of a virtual clock, and a mirror that follows it.

It is looked at four times a second, as the agent does, and what is fit is stored at once.
"""

import itertools
import math
from dataclasses import dataclass, field

from keepstep_agent.core.mirror.file_states import Evidence, Proof
from keepstep_agent.core.mirror.output_history import Decision, OutputHistory, ProgramEnd
from keepstep_agent.core.mirror.output_scan import OutputScan
from keepstep_agent.core.model import Fingerprint

LOOK_SECONDS = 0.25
BETWEEN_SECONDS = 10.0
UNIX = 1_800_000_000.0


@dataclass
class File:
    inode: int
    content: str
    written_at: float
    is_open: bool = False
    settled: bool = False

    def seen(self) -> Fingerprint:
        return Fingerprint(
            size_bytes=len(self.content), mtime_ns=round((UNIX + self.written_at) * 1e9), inode=self.inode
        )


def format_of(path: str, content: str) -> Proof:
    """`.pt` ends with an E, as a zip shows its end; `.db` is a database; others show nothing."""
    if path.endswith(".pt"):
        return Proof.WHOLE if content.endswith("E") else Proof.BROKEN
    return Proof.ANY_INSTANT if path.endswith(".db") else Proof.NONE


@dataclass
class Played:
    """`knows_open`: the kernel tells who has a file open. `knows_processes`: and which processes the program has."""

    knows_open: bool = True
    knows_processes: bool = False
    all_live_since: float = 0.0
    now: float = 0.0
    files: dict[str, File] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    stored: dict[str, Fingerprint] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    taken_at: list[float] = field(default_factory=list)
    history: OutputHistory = field(default_factory=lambda: OutputHistory({}))
    decision: Decision = field(default_factory=Decision)
    _inodes: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _looked_at: float = 0.0
    _lengths: dict[str, str] = field(default_factory=dict)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self._looked_at + LOOK_SECONDS <= until:
            self._looked_at += LOOK_SECONDS
            self.now = self._looked_at
            self.look()
        self.now = until

    def look(self, *, lives: bool = True, end: ProgramEnd | None = None) -> None:
        scan = OutputScan(
            files={path: file.seen() for path, file in self.files.items()},
            settled=frozenset(path for path, file in self.files.items() if file.settled),
            links=dict(self.links),
        )
        asked = self.history.to_examine(scan, self.stored)
        evidence = {path: self._evidence(path, grew=grew) for path, grew in asked.items()}
        self.history.note(
            scan,
            evidence,
            at=self.now,
            unix_at=UNIX + self.now,
            lives=lives,
            all_live_since=self.all_live_since if self.knows_processes and lives else math.inf,
        )
        self.decision = self.history.decide(self.stored, self.links, end)
        between_seconds = BETWEEN_SECONDS if self.decision.fit.isdisjoint(self.left_out) else 2.0
        late = not self.taken_at or self.now - self.taken_at[-1] >= between_seconds
        if end is not None or (self.decision.due and late):
            self._store(scan)

    def end(self, *, failed: bool = False, after_seconds: float = 0.1) -> frozenset[str]:
        """The program ends, and a last look is taken. Return what is left out."""
        died_at = self.now
        for file in self.files.values():
            file.is_open = False
        self.now += after_seconds
        self.look(lives=False, end=ProgramEnd(failed_at=died_at) if failed else ProgramEnd())
        return frozenset(self.decision.left_out)

    def _evidence(self, path: str, *, grew: bool) -> Evidence:
        file, before = self.files[path], self._lengths.get(path)
        if grew:
            self._lengths[path] = file.content
        return Evidence(
            proof=format_of(path, file.content),
            reason="torn" if format_of(path, file.content) is Proof.BROKEN else "",
            is_open=file.is_open if self.knows_open else None,
            only_grew=file.content.startswith(before) if grew and before is not None else None,
        )

    def _store(self, scan: OutputScan) -> None:
        fit = [
            path
            for path, seen in scan.files.items()
            if self.stored.get(path) != seen and path not in self.decision.left_out
        ]
        gone = self.stored.keys() - scan.files.keys()
        if self.decision.left_out or not gone:
            gone = set()
        if not fit and not gone:
            return
        self.taken_at.append(self.now)
        self.stored = dict(self.stored)
        self.left_out = frozenset(self.decision.left_out)
        self.history.taken()
        for path in gone:
            del self.stored[path], self.contents[path]
        for path in fit:
            self.stored[path], self.contents[path] = scan.files[path], self.files[path].content

    def open(self, path: str) -> None:
        """Open for writing, as `open(path, "w")` does."""
        inode = self.files[path].inode if path in self.files else next(self._inodes)
        self.files[path] = File(inode=inode, content="", written_at=self.now, is_open=True)

    def append(self, path: str, text: str, *, close: bool = True) -> None:
        if path not in self.files:
            self.open(path)
        file = self.files[path]
        file.content, file.written_at, file.is_open = file.content + text, self.now, not close

    def write(self, path: str, content: str, *, seconds: float = 0.0, pieces: int = 1, keep_open: bool = False) -> None:
        """Write a file in place."""
        self.open(path)
        for number in range(pieces):
            begin, end = len(content) * number // pieces, len(content) * (number + 1) // pieces
            self.append(path, content[begin:end], close=False)
            self.wait(seconds / pieces)
        self.files[path].is_open = keep_open

    def replace(self, path: str, content: str, *, seconds: float = 0.0) -> None:
        """Write another file and rename it."""
        self.write(f"{path}.tmp", content, seconds=seconds)
        self.files[path] = self.files.pop(f"{path}.tmp")
        self.files[path].settled = True

    def delete(self, path: str) -> None:
        del self.files[path]


def saves_stored(played: Played, path: str) -> int:
    return int(played.contents.get(path, "0").rstrip("E").split(",")[0])
