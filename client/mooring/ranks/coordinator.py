"""The job as one of its ranks sees it: what all must agree on around a save, and how they part.

Owns the keys of these agreements in the process group's store. Must not know what a save is. Every method returns, but
for the choice of what to resume from: an agreement that fails is one not to save, never an exception in training.
Whatever the answer, it is the same on all ranks that can ask: a rank that has waited for too long settles that, and the
others read it. Each rank asks the store a few times, however many ranks there are; the last to read an answer deletes
its keys, so that the store, which is in the first rank's memory, does not grow.
"""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from mooring.errors import ErrorKind, RanksError, StoreLostError
from mooring.ranks.rank_store import Ranks, RankStore, named_ranks

_Result = TypeVar("_Result")

_log: Final = logging.getLogger("mooring")
PATIENCE_SECONDS: Final = 300.0
"""For ranks that come to the same question at about the same time; one may have evaluated by itself before."""
WRITE_SECONDS: Final = 1800.0
"""For what one rank may write long after another is done."""
_READ_SECONDS: Final = 5.0
"""For ranks that have come to read an answer; only one that dies meanwhile makes another wait for so long."""
_ANSWERS: Final = {"yes": True, "no": False, "late": None}


class RankCoordinator(Protocol):
    """The ranks ask the same questions; `key` tells one from another, and none is used twice."""

    ranks: Ranks

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS) -> bool | None:
        """Whether all ranks say so; None when some have not asked in time, or the store is lost."""

    def arrive(self, key: str) -> None:
        """Agree to what this rank does not wait for: others may."""

    def same(self, key: str, value: str) -> bool:
        """Whether all ranks bring the same value."""

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        """What all ranks bring, by rank, for rank 0 alone; None elsewhere, and when some have not come in time."""

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        """The greatest of those that every rank has: (step, save). Raises RanksError when some do not come."""

    def leave(self) -> None:
        """Before `close`, to leave together: a first exit makes torchrun end the others."""

    def close(self) -> None:
        """Ask no more. The store may end with rank 0, which stays for those that have yet to read an answer."""


class SingleProcess:
    """A job of one process, or of one that writes for all."""

    ranks = Ranks()

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS) -> bool | None:
        return ok

    def arrive(self, key: str) -> None:
        return

    def same(self, key: str, value: str) -> bool:
        return True

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        return [value]

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        return max(candidates, default=None)

    def leave(self) -> None:
        return

    def close(self) -> None:
        return


class StoreCoordinator:
    """A job of several ranks, whose store holds nothing of earlier starts."""

    def __init__(self, store: RankStore) -> None:
        self.ranks = store.ranks
        self._store = store
        self._lost = False
        self._unread: str | None = None

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS) -> bool | None:
        return self._ask(key, lambda: self._agree(key, ok, seconds))

    def arrive(self, key: str) -> None:
        self._ask(key, lambda: self._arrive(key))

    def same(self, key: str, value: str) -> bool:
        return bool(self._ask(key, lambda: self._same(key, value)))

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        return self._ask(key, lambda: self._gather(key, value))

    def choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        outcome = self._ask(key, lambda: self._choose_newest(key, candidates))
        if outcome is None:
            raise RanksError(
                ErrorKind.RANKS_LATE,
                "the ranks cannot agree on what to resume from: their store does not answer",
                hint="see whether rank 0, with which it lives, has ended",
            )
        if outcome["late"]:
            raise RanksError(
                ErrorKind.RANKS_LATE,
                f"{named_ranks(outcome['late'])} did not come within {outcome['seconds']:.0f} s to choose a checkpoint",
                hint="see in the logs of those ranks what they do before they resume; all ranks must resume together",
            )
        chosen = outcome["newest"]
        return None if chosen is None else (chosen[0], chosen[1])

    def leave(self) -> None:
        self.agree("leaving")

    def close(self) -> None:
        unread = self._unread
        if self.ranks.rank == 0 and unread is not None:
            self._ask("close", lambda: self._store.wait_until_forgotten(unread, _READ_SECONDS))

    def _agree(self, key: str, ok: bool, seconds: float = PATIENCE_SECONDS) -> bool | None:
        answer = f"{key}/answer"
        if not ok:
            stands = self._store.set_if_absent(answer, "no")
        elif self._counts_last(key):
            stands = self._store.set_if_absent(answer, "yes")
        else:
            stands = self._store.wait_for(answer, seconds) or self._store.set_if_absent(answer, self._late(key))
        word, _, late = stands.partition(" ")
        if word == "late":
            _log.warning("not all ranks came in time: about=%s seconds=%.0f waited_for=%s", key, seconds, late)
        self._forget_when_read(key)
        if word == "late":
            self._unread = None
        return _ANSWERS[word]

    def _late(self, key: str) -> str:
        return f"late {named_ranks(self._store.ranks_without('at', key))}"

    def _arrive(self, key: str) -> bool:
        if self._counts_last(key):
            self._store.set_if_absent(f"{key}/answer", "yes")
        self._forget_when_read(key)
        # Those who wait for it may come much later.
        self._unread = None
        return True

    def _counts_last(self, key: str) -> bool:
        """Say that this rank is here; whether it is the last."""
        # One key for all agreements: it says of a rank that is late where it was last.
        self._store.publish(f"at/{self.ranks.rank}", key)
        return self._store.count(f"{key}/count") == self.ranks.world_size

    def _forget_when_read(self, key: str, *more: str) -> None:
        """This rank asks no more about `key`; the last one to say so deletes it."""
        # It has its answer, whether the store still is there or not.
        with suppress(StoreLostError):
            self._unread = f"{key}/read"
            if self._store.count(self._unread) == self.ranks.world_size:
                self._store.forget(f"{key}/count", f"{key}/answer", *more, self._unread)
                self._unread = None

    def _same(self, key: str, value: str) -> bool | None:
        agreed = self._agree(f"{key}/agreed", self._store.set_if_absent(f"{key}/value", value) == value)
        self._forget_when_read(key, f"{key}/value")
        return agreed

    def _gather(self, key: str, value: str) -> Sequence[str] | None:
        self._store.publish(f"{key}/{self.ranks.rank}", value)
        if self.ranks.rank > 0:
            return None
        values = self._store.gather(key, PATIENCE_SECONDS)
        self._store.forget_all(key)
        return values

    def _choose_newest(self, key: str, candidates: Sequence[tuple[int, str]]) -> dict[str, Any]:
        self._store.publish(f"{key}/has/{self.ranks.rank}", json.dumps(list(candidates)))
        outcome: dict[str, Any] = {"newest": None, "late": [0], "seconds": 2 * PATIENCE_SECONDS}
        if self.ranks.rank == 0:
            answers, late = self._store.gather(f"{key}/has", PATIENCE_SECONDS), list[int]()
            if answers is None:
                late = self._store.ranks_without(f"{key}/has")
                # The last may have come just now.
                answers = None if late else self._store.gather(f"{key}/has", 0.0)
            common = [{(step, save) for step, save in json.loads(answer)} for answer in answers or ["[]"]]
            newest = max(set.intersection(*common), default=None)
            outcome = {"newest": newest, "late": late, "seconds": PATIENCE_SECONDS}
        else:
            self._store.wait([f"{key}/answer"], 2 * PATIENCE_SECONDS)
        stands: dict[str, Any] = json.loads(self._store.set_if_absent(f"{key}/answer", json.dumps(outcome)))
        self._forget_when_read(key, *(f"{key}/has/{rank}" for rank in range(self.ranks.world_size)))
        return stands

    def _ask(self, key: str, question: Callable[[], _Result | None]) -> _Result | None:
        if self._lost:
            return None
        try:
            return question()
        except StoreLostError as error:
            self._lost = True
            _log.warning("the ranks can no longer agree: about=%s error=%s", key, error)
            return None
