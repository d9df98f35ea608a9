"""Decides whether a file of an output directory is whole, by what was seen of it and by what its format shows.

A program writes a file in one of a few ways, and each leaves traces. `FileState` names them, and `is_whole` is the
table of which state needs which proof (docs/design/0027). Times are seconds of a monotonic clock.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from keepstep_agent.core.model import Fingerprint

QUIET_SECONDS: Final = 2.0
"""A file that was not written to for so long is at rest. A pause as long ends a burst of writes."""
CLOSED_SECONDS: Final = 1.0
"""For so long a file must have been closed: a process that was killed closes its files too, and its launcher may live
for a moment."""
_CLOSED_BY_LIVING_SECONDS: Final = 0.25
"""The same where each process of the program that lived before the write has outlived it."""
_APPENDS: Final = 2
# How long a file must have grown without a rest to count as a log, and how fast at most.
_LOGS: Final = ((20.0, 64 * 1024), (120.0, 1024 * 1024))


class Proof(StrEnum):
    """Whether a file is whole, as its own format tells.

    `ANY_INSTANT`: the format survives a power cut, so its bytes of any one instant are whole: a database.
    """

    WHOLE = "whole"
    ANY_INSTANT = "any-instant"
    NONE = "none"
    BROKEN = "broken"


class FileState(StrEnum):
    """What a file was last seen doing. A file that has vanished has none."""

    NEW = "new"
    GROWING = "growing"
    WRITTEN_IN_PLACE = "written-in-place"
    RENAMED = "renamed"
    CLOSED = "closed"
    QUIET = "quiet"
    LOG = "log"


_PROOFS: Final[dict[FileState, frozenset[Proof]]] = {
    FileState.NEW: frozenset({Proof.WHOLE, Proof.ANY_INSTANT}),
    FileState.GROWING: frozenset({Proof.WHOLE, Proof.ANY_INSTANT}),
    FileState.WRITTEN_IN_PLACE: frozenset({Proof.WHOLE, Proof.ANY_INSTANT}),
    FileState.RENAMED: frozenset({Proof.WHOLE, Proof.ANY_INSTANT, Proof.NONE}),
    FileState.CLOSED: frozenset({Proof.WHOLE, Proof.ANY_INSTANT, Proof.NONE}),
    FileState.QUIET: frozenset({Proof.WHOLE, Proof.ANY_INSTANT, Proof.NONE}),
    FileState.LOG: frozenset({Proof.NONE}),
}


def is_whole(state: FileState, proof: Proof) -> bool:
    return proof in _PROOFS[state]


def is_proven(state: FileState, proof: Proof) -> bool:
    """Whether more than time speaks for a file: its program may have died before it wrote the rest."""
    return is_whole(state, proof) and (state is not FileState.QUIET or proof is not Proof.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an examination of a file has shown.

    `reason`: why it is broken. `is_open`: a process has it open for writing; None where the kernel does not tell.
    `only_grew`: the bytes that it had at the examination before are unchanged, and more have followed; None: there was
    none before.
    """

    proof: Proof
    reason: str = ""
    is_open: bool | None = None
    only_grew: bool | None = None


@dataclass(slots=True)
class TrackedFile:
    """A file that has changed, from look to look.

    Attributes:
        seen: What it looked like last.
        written_at: When its last write was seen.
        change: NEW, GROWING, WRITTEN_IN_PLACE or RENAMED.
        is_log: It is a log by its name, or by what it was seen doing.
        closed: It was seen closed for `CLOSED_SECONDS` while its program lived, and is unchanged since.
        rewritten: Its program has written to this inode again after it was at rest.
    """

    seen: Fingerprint
    written_at: float
    change: FileState
    is_log: bool = False
    proof: Proof = Proof.NONE
    reason: str = ""
    is_open: bool | None = None
    closed: bool = False
    rewritten: bool = False
    # Since when it has been written to without a rest.
    _restless_since: float | None = None
    # How often it was at rest and then had more bytes, and how it grows without a rest.
    _appends: int = 0
    _grows_since: float | None = None
    _grows_from_bytes: int = 0

    def changed(self, seen: Fingerprint, *, at: float, renamed: bool, was_at_rest: bool) -> None:
        """Note another look of the file that has this path."""
        is_same_file = seen.inode == self.seen.inode
        if not is_same_file:
            self.change = FileState.RENAMED if renamed else FileState.NEW
            self._no_log()
        elif seen.size_bytes > self.seen.size_bytes:
            self.change = FileState.GROWING
            self._appends += was_at_rest
        else:
            self.change = FileState.WRITTEN_IN_PLACE
            self._no_log()
        self.rewritten = is_same_file and (self.rewritten or was_at_rest)
        if not is_same_file or was_at_rest:
            self._restless_since = None
        elif self._restless_since is None:
            self._restless_since = at
        if self.change is FileState.GROWING and self._grows_since is None:
            self._grows_since, self._grows_from_bytes = at, self.seen.size_bytes
        self.seen, self.written_at = seen, at
        self.closed, self.is_open = False, None

    def examined(self, evidence: Evidence, *, at: float, lives: bool, all_live_since: float = math.inf) -> None:
        """Note what an examination has shown. `lives`: the program was alive after it.

        `all_live_since`: no process that was one of the program's then, or since, has ended.
        """
        self.proof, self.reason, self.is_open = evidence.proof, evidence.reason, evidence.is_open
        least_seconds = _CLOSED_BY_LIVING_SECONDS if all_live_since < self.written_at else CLOSED_SECONDS
        if evidence.is_open is False and lives and at - self.written_at >= least_seconds:
            self.closed = True
        if evidence.proof is not Proof.NONE or evidence.only_grew is False:
            self._no_log()
        elif evidence.only_grew and self._grows_since is not None:
            seconds, grown_bytes = at - self._grows_since, self.seen.size_bytes - self._grows_from_bytes
            is_slow = any(seconds >= least and grown_bytes <= rate * seconds for least, rate in _LOGS)
            self.is_log = self.is_log or self._appends >= _APPENDS or is_slow

    def state(self, at: float) -> FileState:
        """Return what it was doing at a time, at which nothing later was known of it."""
        if self.is_log:
            return FileState.LOG
        if self.change is FileState.RENAMED and not self.is_open:
            return FileState.RENAMED
        if self.closed:
            return FileState.CLOSED
        if at - self.written_at >= QUIET_SECONDS:
            return FileState.QUIET
        return FileState.NEW if self.change is FileState.RENAMED else self.change

    def is_whole(self, at: float) -> bool:
        return is_whole(self.state(at), self.proof)

    def stands_alone(self, at: float) -> bool:
        """Whether it is whole whatever is written beside it: it is a log or a database."""
        return self.state(at) is FileState.LOG or self.proof is Proof.ANY_INSTANT

    @property
    def restless_seconds(self) -> float:
        """How long it was written to without a rest."""
        return 0.0 if self._restless_since is None else self.written_at - self._restless_since

    @property
    def is_settled(self) -> bool:
        """Whether another examination would show nothing new as long as it is unchanged."""
        return self.closed or (self.proof is Proof.WHOLE and not self.is_open)

    @property
    def shares_its_inode(self) -> bool:
        """Whether its program may write into the inode that a look has shown, so that a link would not hold it."""
        return self.rewritten or bool(self.is_open) or self.proof is Proof.ANY_INSTANT

    def _no_log(self) -> None:
        self.is_log, self._appends, self._grows_since = False, 0, None
