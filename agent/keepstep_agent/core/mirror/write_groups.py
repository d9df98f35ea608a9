"""Groups the writes of a program: files that were written together are one checkpoint, as far as anybody can see.

Writes of which each begins no more than `QUIET_SECONDS` after the one before has ended are a burst. A program that
never rests that long may still rest longer between two saves than within one, so such a burst is divided at its longest
pauses. A group is complete when a pause follows it and it has all kinds of files that the group before it had; after a
shorter pause, only if all that is known of names and order says that it is one save. Times are seconds of a monotonic
clock. See docs/design/0027.
"""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from keepstep_agent.core.mirror.file_states import QUIET_SECONDS

LATE_SECONDS: Final = 10.0
"""A group that has fewer files than the one before it is complete after so long: a program may compute between two
files, and it may save less than before."""
_UNDIVIDED_SECONDS: Final = 6.0
"""A burst that has not lasted so long may be one save, in which a file is rewritten again and again."""
_SHORTEST_PAUSE_SECONDS: Final = 0.5
_REPEATED_WRITES: Final = 3
_NUMBERS_OF_A_TIME: Final = 6
_RANKS_PER_RANK_SEEN: Final = 2
_FIRST_RANKS: Final = 8
"""A number that is not greater may be a rank's or a shard's, as far as those tell that were written before it."""
_NUMBER: Final = re.compile(r"[0-9]+")
_HASH: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{16,}")
# What no path has.
_NUMBER_MARK: Final = "\0"
_NEXT_NUMBER: Final = " "
_HASH_MARK: Final = "\1"
_OF: Final = "-of-"

Kinds = Mapping[str, frozenset[str]]
"""What was written together: the numbers in the paths of each kind, those of a path with a space between them.

Paths of one kind differ in numbers and hashes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One file was written, from its first change to its last one, as far as looks have shown it.

    `kind` is the path's, as in `Kinds`.
    """

    path: str
    begun_at: float
    ended_at: float
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        # Of 100,000 files it is asked for again and again.
        object.__setattr__(self, "kind", kind_of(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteGroup:
    """Files that were written together.

    Attributes:
        pause_seconds: A pause of this length is the end of such a group.
        is_regular: Names and order say that it is one save: no file was written twice, it begins with the kind of file
            with which such groups begin, and its parts are like each other.
        is_repeated: It is one file that was written again and again, and nothing else.
    """

    paths: frozenset[str]
    kinds: Kinds
    begun_at: float
    ended_at: float
    pause_seconds: float
    is_regular: bool
    is_repeated: bool


def _kinds(writes: Iterable[Write]) -> Kinds:
    kinds: dict[str, set[str]] = {}
    for write in writes:
        kinds.setdefault(write.kind, set()).add(_numbers_of(write.path))
    return {kind: frozenset(numbers) for kind, numbers in kinds.items()}


def has_all(kinds: Kinds, before: Kinds) -> bool:
    """Whether there are as many files of each kind as before. Of names that are hashes the number is left to chance."""
    return all(
        len(kinds.get(kind, ())) >= (1 if _HASH_MARK in kind else len(numbers)) for kind, numbers in before.items()
    )


def is_of_one_save(kinds: Kinds, before: Kinds) -> bool:
    """Whether the numbers that differ within a group are those that did in the group before: of ranks, not of steps."""
    for kind, numbers in kinds.items():
        columns, columns_before = _columns(numbers), _columns(before.get(kind, frozenset()))
        if any(len(own) > 1 and own != other for own, other in zip(columns, columns_before, strict=False)):
            return False
    return True


def saves_by_name(paths: Iterable[str]) -> Iterator[Kinds]:
    """Yield the kinds of each save, as far as names tell them apart. `paths`: in the order of their writes."""
    for save in _saves([Write(path=path, begun_at=0.0, ended_at=0.0)] for path in paths):
        yield _kinds(save.writes)


def groups(writes: Sequence[Write]) -> list[WriteGroup]:
    """Return the groups of writes, in the order of time."""
    found: list[WriteGroup] = []
    for burst in _divided(sorted(writes, key=lambda write: write.ended_at), QUIET_SECONDS):
        longest_seconds = max(_pauses(burst), default=0.0)
        lasted_seconds = burst[-1].ended_at - min(write.begun_at for write in burst)
        is_divided = longest_seconds >= _SHORTEST_PAUSE_SECONDS and lasted_seconds >= _UNDIVIDED_SECONDS
        saves = list(_saves(_divided(burst, longest_seconds / 2 if is_divided else QUIET_SECONDS)))
        within_seconds = max((pause for save in saves if save.is_sure for pause in _pauses(save.writes)), default=0.0)
        parts = [save.writes for save in saves]
        for number, part in enumerate(parts):
            begun_at = min(write.begun_at for write in part)
            before_seconds = begun_at - found[-1].ended_at if found else math.inf
            paths = frozenset(write.path for write in part)
            is_repeated = len(paths) == 1 and len(part) >= _REPEATED_WRITES
            pause_seconds = (longest_seconds if len(saves) > 1 or is_repeated else before_seconds) / 2
            if not is_repeated:
                pause_seconds = max(pause_seconds, within_seconds)
            found.append(
                WriteGroup(
                    paths=paths,
                    kinds=_kinds(part),
                    begun_at=begun_at,
                    ended_at=max(write.ended_at for write in part),
                    pause_seconds=min(QUIET_SECONDS, pause_seconds),
                    is_regular=saves[number].is_sure
                    and len(paths) == len(part)
                    and _begins_as_the_first(part, parts[: number + 1]),
                    is_repeated=is_repeated,
                )
            )
    return found


class _Numbers:
    """The numbers that paths of one kind have, and those of each of their places."""

    def __init__(self, places: int) -> None:
        self._all: frozenset[str] | set[str] = frozenset()
        self._places: list[set[str]] = [set() for _ in range(places)]
        self._largest = [0] * places

    def add(self, numbers: frozenset[str]) -> None:
        if not self._all:
            # Not copied: of 100,000 files in one part it takes much memory.
            self._all = numbers
        elif isinstance(self._all, set):
            self._all |= numbers
        else:
            self._all = {*self._all, *numbers}
        for place, own in enumerate(_columns(numbers)):
            self._places[place] |= own
            self._largest[place] = max(self._largest[place], *map(int, own))

    def have_come_late(self, numbers: frozenset[str]) -> bool:
        """Whether these numbers are new and have no new number in any place."""
        return numbers.isdisjoint(self._all) and not any(map(set.isdisjoint, _columns(numbers), self._places))

    def are_of_another_step(self, kind: str, numbers: frozenset[str]) -> bool:
        """Whether a number that differs in these is a step's, or belongs to a time.

        It may be a rank's if it is small, and if there is a number before it in the path that does not differ.
        """
        texts = kind.split(_NUMBER_MARK)
        for place, own in enumerate(_columns(numbers)):
            if texts[place + 1] == _OF or not own.isdisjoint(self._places[place]):
                continue
            ranks = _RANKS_PER_RANK_SEEN * (len(own) + len(self._places[place])) + _FIRST_RANKS
            is_large = max(self._largest[place], *map(int, own)) >= ranks
            if place == 0 or is_large or _is_of_a_time(texts, place):
                return True
        return False


@dataclass(slots=True, kw_only=True)
class _Save:
    """Parts of a burst that are one save. `is_sure`: their names show that, not only that nothing speaks against it."""

    writes: list[Write] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    numbers: dict[str, _Numbers] = field(default_factory=dict)
    is_sure: bool = True

    def add_names(self, part: Sequence[Write], kinds: Kinds) -> None:
        self.paths.update(write.path for write in part)
        _add_numbers(self.numbers, kinds)

    def without_names(self) -> Self:
        """Return it without the names, which of many files take more memory than all else of it."""
        self.paths.clear()
        self.numbers.clear()
        return self

    def ends_before(self, part: Sequence[Write]) -> bool:
        """Whether the names of the next part show that it is of another save."""
        paths = {write.path for write in part}
        kinds = _kinds(write for write in part if write.path not in self.paths)
        common = kinds.keys() & self.numbers.keys()
        if any(self.numbers[kind].are_of_another_step(kind, kinds[kind]) for kind in common):
            return True
        # An index may be written after each part of a save.
        return not common and not paths.isdisjoint(self.paths)


def _saves(parts: Iterable[Sequence[Write]]) -> Iterator[_Save]:
    """Join a part to the one before it unless its names show that another save has begun. Yields each as it ends."""
    save = _Save()
    known: dict[str, _Numbers] = {}
    before: Sequence[Write] = ()
    for part in parts:
        if before:
            # Only for a part that follows: of 100,000 files the names in these sets take 30 MiB.
            kinds_before = _kinds(before)
            save.add_names(before, kinds_before)
            _add_numbers(known, kinds_before)
            kinds = _kinds(part)
            # A rank's files came late.
            is_late = all(kind in known and known[kind].have_come_late(numbers) for kind, numbers in kinds.items())
            if not is_late and save.ends_before(part):
                yield save.without_names()
                save = _Save()
            elif not is_late and save.numbers.keys().isdisjoint(kinds):
                save.is_sure = False
        save.writes.extend(part)
        before = part
    if before:
        yield save.without_names()


def _add_numbers(known: dict[str, _Numbers], kinds: Kinds) -> None:
    for kind, numbers in kinds.items():
        known.setdefault(kind, _Numbers(kind.count(_NUMBER_MARK))).add(numbers)


def _is_of_a_time(texts: Sequence[str], place: int) -> bool:
    """Whether the name that a number is part of has as many numbers as a date with a time."""
    before = next((number for number in range(place, 0, -1) if "/" in texts[number]), 0)
    after = next((number for number in range(place + 1, len(texts)) if "/" in texts[number]), len(texts) - 1)
    return after - before >= _NUMBERS_OF_A_TIME


def _columns(numbers: frozenset[str]) -> list[set[str]]:
    columns: list[set[str]] = []
    for of_path in numbers:
        places = of_path.split(_NEXT_NUMBER) if of_path else []
        columns = columns or [set() for _ in places]
        for column, number in zip(columns, places, strict=True):
            column.add(number)
    return columns


def _begins_as_the_first(part: Sequence[Write], parts: Sequence[Sequence[Write]]) -> bool:
    """Whether the last of these parts is a save like those before it, as far as the order of its files tells.

    It begins with the kind of file with which the first part like it began, after a rest; and the part just before it
    has a kind of it, because files that take turns may be one save.
    """
    kinds = {write.kind for write in part}
    for other in parts:
        common = [write for write in other if write.kind in kinds]
        if common:
            takes_turns = len(parts) > 1 and not any(write.kind in kinds for write in parts[-2])
            return not takes_turns and not _first_kinds(common).isdisjoint(_first_kinds(part))
    return True


def _first_kinds(writes: Sequence[Write]) -> set[str]:
    """Return the kinds of the files that were written first: of several if they are links to one."""
    return {write.kind for write in writes if write.ended_at == writes[0].ended_at}


def is_complete(
    group: WriteGroup,
    before: Kinds | None,
    *,
    next_at: float | None,
    at: float,
    is_renamed: bool,
    is_proven: bool,
) -> bool:
    """Return whether no file of a group is still to come.

    Args:
        before: The kinds of the related group; None if there is none.
        next_at: When the next group began.
        at: Now; or when the program was killed.
        is_renamed: Each file of the group appeared under its name complete.
        is_proven: The program was killed, and more than time speaks for each file of the group.
    """
    pause_seconds = (at if next_at is None else next_at) - group.ended_at
    if group.is_repeated and (before is None or has_all(group.kinds, before)):
        return pause_seconds >= group.pause_seconds or is_renamed or is_proven
    if before is None:
        return pause_seconds >= QUIET_SECONDS or is_renamed
    if not has_all(group.kinds, before):
        return pause_seconds >= QUIET_SECONDS and at - group.ended_at >= LATE_SECONDS
    if pause_seconds >= QUIET_SECONDS:
        return True
    if not group.is_regular or not is_of_one_save(group.kinds, before):
        return False
    return next_at is not None or pause_seconds >= group.pause_seconds or is_renamed or is_proven


def related_kinds(group: WriteGroup, earlier: Sequence[Kinds], later: Sequence[WriteGroup]) -> Kinds | None:
    """Return the kinds of the last group before this one that had a kind of it, or else of the first one after it."""
    own = group.kinds.keys()
    candidates = (*reversed(earlier), *(other.kinds for other in later))
    return next((kinds for kinds in candidates if not own.isdisjoint(kinds)), None)


def _numbers_of(path: str) -> str:
    return _NEXT_NUMBER.join(_NUMBER.findall(_HASH.sub(_HASH_MARK, path)))


def kind_of(path: str) -> str:
    """Return what the paths of one kind have in common: all but numbers and hashes."""
    return sys.intern(_NUMBER.sub(_NUMBER_MARK, _HASH.sub(_HASH_MARK, path)))


def _pauses(writes: Sequence[Write]) -> Iterator[float]:
    """Yield the pauses between writes that are in the order of their ends."""
    ended_at = writes[0].ended_at if writes else 0.0
    for write in writes[1:]:
        yield write.begun_at - ended_at
        ended_at = max(ended_at, write.ended_at)


def _divided(writes: Sequence[Write], pause_seconds: float) -> Iterator[list[Write]]:
    part: list[Write] = []
    for write, pause in zip(writes, (0.0, *_pauses(writes)), strict=False):
        if part and pause >= pause_seconds:
            yield part
            part = []
        part.append(write)
    if part:
        yield part
