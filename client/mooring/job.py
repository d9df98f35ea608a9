"""The job as one of its ranks sees it: what all must agree on around a save, and how they part.

Owns the keys of these agreements in the process group's store. Must not know what a save is. Every method returns: an
agreement that fails is one not to save, never an exception in training. Each rank asks the store a few times, however
many ranks there are.
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from mooring.errors import StoreLostError
from mooring.rank_store import Ranks, RankStore

_Result = TypeVar("_Result")

_log: Final = logging.getLogger("mooring")
_AGREE_SECONDS: Final = 600.0
"""A rank may write for long after another is done; one that is gone ends training anyway."""
_PART_SECONDS: Final = 2.0


class Job(Protocol):
    """The ranks ask the same questions; `key` tells one from another, and none is used twice."""

    ranks: Ranks

    def agree(self, key: str, ok: bool = True) -> bool:
        """Whether all ranks say so."""

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        """The greatest of those that every rank has: (step, save)."""

    def part(self) -> None:
        """Leave together: the store lives with the first node, and a first exit makes torchrun end the others."""


class LoneProcess:
    """A job of one process, or of one that writes for all."""

    ranks = Ranks()

    def agree(self, key: str, ok: bool = True) -> bool:
        return ok

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        return max(candidates, default=None)

    def part(self) -> None:
        return


class RanksJob:
    """A job of several ranks. Raises StoreLostError when it is made."""

    def __init__(self, store: RankStore, own_nonce: str) -> None:
        self.ranks = store.ranks
        self._store = store
        self._lost = False
        if self.ranks.rank == 0:
            store.publish("nonce", own_nonce)
        nonce = store.wait_for("nonce", _AGREE_SECONDS)
        if nonce is None:
            raise StoreLostError(f"rank 0 did not answer within {_AGREE_SECONDS:.0f} s")
        self.nonce = nonce
        """Of this start of the job, the same on all ranks."""

    def agree(self, key: str, ok: bool = True) -> bool:
        return self._ask(key, lambda: self._agree(key, ok)) or False

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        return self._ask(key, lambda: self._choose_newest(key, candidates))

    def part(self) -> None:
        self._ask("part", self._part)

    def _agree(self, key: str, ok: bool) -> bool | None:
        if not ok:
            self._store.publish(f"{key}/no", str(self.ranks.rank))
        if self._store.count(f"{key}/count") == self.ranks.world_size:
            self._store.publish(f"{key}/result", "yes" if self._store.read(f"{key}/no") is None else "no")
        result = self._store.wait_for(f"{key}/result", _AGREE_SECONDS)
        return None if result is None else result == "yes"

    def _choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        self._store.publish(f"{key}/has/{self.ranks.rank}", json.dumps(list(candidates)))
        if self.ranks.rank == 0:
            answers = self._store.of_all(f"{key}/has", _AGREE_SECONDS) or ["[]"]
            common = set.intersection(*({(step, save) for step, save in json.loads(answer)} for answer in answers))
            self._store.publish(f"{key}/result", json.dumps(max(common, default=None)))
        chosen = json.loads(self._store.wait_for(f"{key}/result", 2 * _AGREE_SECONDS) or "null")
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
