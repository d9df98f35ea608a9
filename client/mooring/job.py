"""The job as one of its ranks sees it: what all must agree on around a save, and how they part.

Owns the keys of these agreements in the process group's store. Must not know what a save is. Every method returns: an
agreement that fails is one not to save, never an exception in training. Whatever the answer, it is the same on all
ranks that can ask: a rank that has waited for too long settles that, and the others read it. Each rank asks the store
a few times, however many ranks there are.
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from mooring.errors import StoreLostError
from mooring.rank_store import Ranks, RankStore

_Result = TypeVar("_Result")

_log: Final = logging.getLogger("mooring")
PATIENCE_SECONDS: Final = 300.0
"""For ranks that come to the same question at about the same time; one may have evaluated by itself before."""
WRITE_SECONDS: Final = 1800.0
"""For what one rank may write long after another is done."""
_PART_SECONDS: Final = 2.0
_ANSWERS: Final = {"yes": True, "no": False, "late": None}


class Job(Protocol):
    """The ranks ask the same questions; `key` tells one from another, and none is used twice."""

    ranks: Ranks

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS) -> bool | None:
        """Whether all ranks say so; None when some have not asked in time, or the store is lost."""

    def same(self, key: str, value: str) -> bool:
        """Whether all ranks bring the same value."""

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        """What all ranks bring, by rank, for rank 0 alone; None elsewhere, and when some have not come in time."""

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        """The greatest of those that every rank has: (step, save)."""

    def part(self) -> None:
        """Leave together: the store lives with the first node, and a first exit makes torchrun end the others."""


class LoneProcess:
    """A job of one process, or of one that writes for all."""

    ranks = Ranks()

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS) -> bool | None:
        return ok

    def same(self, key: str, value: str) -> bool:
        return True

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        return [value]

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        return max(candidates, default=None)

    def part(self) -> None:
        return


class RanksJob:
    """A job of several ranks, whose store holds nothing of earlier starts."""

    def __init__(self, store: RankStore) -> None:
        self.ranks = store.ranks
        self._store = store
        self._lost = False

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS) -> bool | None:
        return self._ask(key, lambda: self._agree(key, ok, seconds))

    def same(self, key: str, value: str) -> bool:
        return bool(self._ask(key, lambda: self._agree(key, self._store.settle(f"{key}/value", value) == value)))

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        return self._ask(key, lambda: self._gather(key, value))

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        return self._ask(key, lambda: self._choose_newest(key, candidates))

    def part(self) -> None:
        self._ask("part", self._part)

    def _agree(self, key: str, ok: bool, seconds: float = PATIENCE_SECONDS) -> bool | None:
        answer = f"{key}/answer"
        if not ok:
            return _ANSWERS[self._store.settle(answer, "no")]
        if self._store.count(f"{key}/count") == self.ranks.world_size:
            return _ANSWERS[self._store.settle(answer, "yes")]
        stands = self._store.wait_for(answer, seconds) or self._store.settle(answer, "late")
        if stands == "late":
            _log.warning("not all ranks came to the same point: about=%s seconds=%.0f", key, seconds)
        return _ANSWERS[stands]

    def _gather(self, key: str, value: str) -> Sequence[str] | None:
        self._store.publish(f"{key}/{self.ranks.rank}", value)
        if self.ranks.rank > 0:
            return None
        values = self._store.of_all(key, PATIENCE_SECONDS)
        self._store.forget_all(key)
        return values

    def _choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        self._store.publish(f"{key}/has/{self.ranks.rank}", json.dumps(list(candidates)))
        if self.ranks.rank == 0:
            answers = self._store.of_all(f"{key}/has", PATIENCE_SECONDS) or ["[]"]
            common = set.intersection(*({(step, save) for step, save in json.loads(answer)} for answer in answers))
            self._store.settle(f"{key}/newest", json.dumps(max(common, default=None)))
        self._store.wait([f"{key}/newest"], 2 * PATIENCE_SECONDS)
        chosen = json.loads(self._store.settle(f"{key}/newest", "null"))
        return None if chosen is None else (chosen[0], chosen[1])

    def _part(self) -> bool | None:
        leaving = self._agree("leaving", ok=True)
        if leaving and self._store.count("left") == self.ranks.world_size:
            self._store.publish("empty", "")
        if leaving and self.ranks.rank == 0:
            # The store may end with us, and others have yet to read that everybody leaves.
            self._store.wait(["empty"], _PART_SECONDS)
        return leaving

    def _ask(self, key: str, question: Callable[[], _Result | None]) -> _Result | None:
        if self._lost:
            return None
        try:
            return question()
        except StoreLostError as error:
            self._lost = True
            _log.warning("the ranks can no longer agree: about=%s error=%s", key, error)
            return None
