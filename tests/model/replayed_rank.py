"""A rank that chooses what to resume from: the client's real code, run against answers that were written down.

A rank does nothing but ask the ranks' store, its agent and whether it was told to end. So all that it knows is the
answers that it has got. It runs from its start with these, and ends with the first question that has no answer yet, or
with what it has chosen. Time passes only when an answer says that a wait is over.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast
from unittest.mock import patch

from keepstep import resuming
from keepstep.checkpoints.records import Record
from keepstep.errors import ErrorKind, RanksError, RestoreError, VolumeError
from keepstep.ranks import coordinator
from keepstep.ranks.rank_store import KeyStore, Ranks, RankStore
from keepstep.session import Session

Save = tuple[int, str]
"""A checkpoint as ranks name it: its step and its save id."""

_FOREVER_SECONDS: Final = 1e6


class Asked(StrEnum):
    PUBLISH = "publishes"
    SET_IF_ABSENT = "sets"
    READ = "reads"
    WAIT_FOR = "waits for"
    COUNT = "counts"
    GATHER = "gathers"
    RANKS_WITHOUT = "looks who lacks"
    FORGET = "forgets"
    TOLD_TO_END = "looks whether it was told to end"
    NEWEST = "asks its agent for the newest"
    FETCH = "has its agent fetch"


class Question(NamedTuple):
    """`key` and `value` as the store's methods have them; of FETCH, `value` is the save. `again`: after NOT_YET."""

    asked: Asked
    key: str = ""
    value: str = ""
    again: bool = False


class Word(StrEnum):
    """Answers without content."""

    NOT_YET = "not yet"
    GIVEN_UP = "nothing, and its patience ends"


class Refused(NamedTuple):
    """The agent's answer that becomes a RestoreError."""

    kind: ErrorKind


Answer = None | bool | int | str | Word | Refused | tuple[str, ...] | tuple[int, ...] | tuple[Save, ...]


class How(StrEnum):
    BEGINS = "begins"
    FAILS = "fails"
    LEAVES = "leaves"
    KILLED = "is killed"


class End(NamedTuple):
    """`save`: what it begins with; None for step 0."""

    how: How
    save: Save | None = None
    why: str = ""


class _Unanswered(BaseException):
    """Carries the question past whatever the client catches."""

    def __init__(self, question: Question) -> None:
        self.question = question


class _Clock:
    """Stands for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


_CLOCK: Final = _Clock()


class _Replay:
    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = iter(answers)
        _CLOCK.now = 0.0

    def ask(self, asked: Asked, key: str = "", value: str = "", *, again: bool = False) -> Any:
        for answer in self._answers:
            if answer is Word.GIVEN_UP:
                _CLOCK.now += _FOREVER_SECONDS
                return None
            return answer
        raise _Unanswered(Question(asked, key, value, again))


class _Store(RankStore):
    def __init__(self, ranks: Ranks, replay: _Replay) -> None:
        super().__init__(cast(KeyStore, None), ranks)
        self._replay = replay

    def publish(self, key: str, value: str) -> None:
        self._replay.ask(Asked.PUBLISH, key, value)

    def set_if_absent(self, key: str, value: str) -> str:
        return str(self._replay.ask(Asked.SET_IF_ABSENT, key, value))

    def read(self, key: str) -> str | None:
        return cast(str | None, self._replay.ask(Asked.READ, key))

    def wait_for(self, key: str, seconds: float, *, needs: object = None) -> str | None:
        return cast(str | None, self._replay.ask(Asked.WAIT_FOR, key))

    def count(self, key: str) -> int:
        return int(self._replay.ask(Asked.COUNT, key))

    def gather(self, key: str, seconds: float, *, until: Callable[[], bool] = lambda: False) -> list[str] | None:
        found = self._replay.ask(Asked.GATHER, key)
        if found is Word.NOT_YET:
            assert until()
            return None
        return None if found is None else list(found)

    def ranks_without(self, key: str, value: str | None = None) -> list[int]:
        return list(self._replay.ask(Asked.RANKS_WITHOUT, key, value or ""))

    def forget(self, *keys: str) -> None:
        for key in keys:
            self._replay.ask(Asked.FORGET, key)


class _Restores:
    def __init__(self, replay: _Replay) -> None:
        self._replay = replay

    def newest(self, on_wait: Callable[[str], object], output_key: str | None) -> Sequence[Save]:
        return list(self._ask(on_wait, Asked.NEWEST))

    def fetch(self, save: str, wanted: object, on_wait: Callable[[str], object]) -> Path:
        self._ask(on_wait, Asked.FETCH, save)
        return Path()

    def _ask(self, on_wait: Callable[[str], object], asked: Asked, save: str = "") -> Any:
        answer = self._replay.ask(asked, value=save)
        while answer is Word.NOT_YET:
            on_wait("not yet")
            answer = self._replay.ask(asked, value=save, again=True)
        if isinstance(answer, Refused):
            raise RestoreError(answer.kind, "refused", hint="")
        return answer


class _Session:
    def __init__(self, ranks: Ranks, own: Sequence[Record], replay: _Replay) -> None:
        self.settings = SimpleNamespace(lazy=True)
        self.agent = SimpleNamespace(restores=lambda: _Restores(replay))
        self.holds_whole_job = ranks.local_world_size == ranks.world_size
        self._context = SimpleNamespace(
            coordinator=coordinator.StoreCoordinator(_Store(ranks, replay)),
            leads_pod=ranks.leads_pod,
            local=SimpleNamespace(whole=lambda by_framework: own),
        )
        self._replay = replay
        self._number = 0

    def context(self) -> Any:
        return self._context

    def next_number(self) -> int:
        self._number += 1
        return self._number

    @property
    def told_to_end(self) -> bool:
        return bool(self._replay.ask(Asked.TOLD_TO_END))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRank:
    """`own`: the whole checkpoints in its volume that are not uploaded."""

    ranks: Ranks
    own: Sequence[Record] = ()

    def after(self, answers: Sequence[Answer]) -> Question | End:
        """Return what the rank asks next, or its end."""
        replay = _Replay(answers)
        session = cast(Session, _Session(self.ranks, self.own, replay))
        try:
            chosen = resuming.Resumption(session, None)._choose_any(resuming._bring_all)
        except _Unanswered as unanswered:
            return unanswered.question
        except SystemExit:
            return End(How.LEAVES)
        except (RanksError, RestoreError, VolumeError) as error:
            return End(How.FAILS, why=f"{error.kind}: {error}")
        return End(How.BEGINS, (chosen.step, chosen.save) if isinstance(chosen, Record) else chosen)


@contextmanager
def replaying() -> Iterator[None]:
    """While open, the client's clocks are those of the runs, and it logs nothing."""
    with patch.object(coordinator, "time", _CLOCK), patch.object(resuming, "time", _CLOCK):
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
