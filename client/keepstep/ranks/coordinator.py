"""Agreements between the ranks of a job: around a save, on what to resume from, and when to leave.

Owns the keys of these agreements in the process group's store. Must not know what a save is. Only the choice of what to
resume from raises: any other agreement that fails means "do not save", never an exception in training. The answer is
the same on all ranks that reach the store: a rank that times out, or sees that one is gone that has not come, stores
that as the answer, and the others read it. Each rank asks the store a few times, however many ranks there are. The last
rank to read an answer deletes its keys, so that the store, which is in the first rank's memory, does not grow.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from keepstep.errors import ErrorKind, RanksError, StoreLostError
from keepstep.ranks.rank_store import Ranks, RankStore, named_ranks

_Result = TypeVar("_Result")

_log: Final = logging.getLogger("keepstep")
PATIENCE_SECONDS: Final = 300.0
"""Wait for ranks that come to an agreement at about the same time; one may have run an evaluation alone before."""
WRITE_SECONDS: Final = 1800.0
"""Wait for ranks that may still be writing long after others are done."""
_LOOK_SECONDS: Final = 30.0
"""How often a rank that waits looks at the progress of those it waits for."""
_READ_SECONDS: Final = 5.0
"""Wait for ranks that have come and are about to read an answer. Only one that dies meanwhile makes it that long."""
_ANSWERS: Final = {"yes": True, "no": False, "late": None, "gone": None}


class RankCoordinator(Protocol):
    """Agreements between all ranks, which call the same methods. `key` identifies one agreement; use none twice."""

    ranks: Ranks

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS, progress: str = "") -> bool | None:
        """Return whether `ok` is true on all ranks; None when some do not come in time, are gone, or the store is lost.

        With `progress`, the time begins anew whenever a rank has published something under that key.
        """

    def publish(self, progress: str, line: str) -> None:
        """Tell the ranks that wait with this `progress` how far this one is."""

    def is_answered(self, key: str) -> bool:
        """Whether the agreement has an answer already, which is then "no": this rank has not come yet."""

    def arrive(self, key: str) -> None:
        """Agree without waiting for the answer. Other ranks may wait for it."""

    def same(self, key: str, value: str) -> bool:
        """Return whether all ranks pass the same value."""

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        """Return the values of all ranks, by rank, on rank 0; None on other ranks, and when some come too late."""

    def choose_newest(
        self, key: str, candidates: Sequence[tuple[int, str]] | None, *, progress: str = ""
    ) -> tuple[int, str] | None:
        """Return the greatest (step, save) that every rank has, or None. Raises RanksError when some do not come.

        `candidates` None: what the first rank of this rank's pod has. `progress` as for `agree`.
        """

    def withdraw(self, key: str) -> None:
        """End `choose_newest` for all ranks, because this one leaves before it has named what it has."""

    def leave(self) -> None:
        """Wait for all ranks before `close`, to leave together: when the first rank exits, torchrun ends the others."""

    def close(self) -> None:
        """End the agreements. The store may end with rank 0, so rank 0 waits for ranks that have an answer to read."""


class SingleProcess:
    """The coordinator of a job with one process, or of one process that writes for all."""

    ranks = Ranks()

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS, progress: str = "") -> bool | None:
        return ok

    def publish(self, progress: str, line: str) -> None:
        return

    def is_answered(self, key: str) -> bool:
        return False

    def arrive(self, key: str) -> None:
        return

    def same(self, key: str, value: str) -> bool:
        return True

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        return [value]

    def choose_newest(
        self, key: str, candidates: Sequence[tuple[int, str]] | None, *, progress: str = ""
    ) -> tuple[int, str] | None:
        return max(candidates or (), default=None)

    def withdraw(self, key: str) -> None:
        return

    def leave(self) -> None:
        return

    def close(self) -> None:
        return


class StoreCoordinator:
    """The coordinator of a job with several ranks. `store` must hold nothing of earlier starts."""

    def __init__(self, store: RankStore) -> None:
        self.ranks = store.ranks
        self._store = store
        self._lost = False
        self._unread: str | None = None

    def agree(self, key: str, ok: bool = True, *, seconds: float = PATIENCE_SECONDS, progress: str = "") -> bool | None:
        return self._ask(key, lambda: self._agree(key, ok, seconds, progress))

    def publish(self, progress: str, line: str) -> None:
        self._ask(progress, lambda: self._store.publish(progress, f"rank {self.ranks.rank}: {line}"))

    def is_answered(self, key: str) -> bool:
        return self._ask(key, lambda: self._store.read(f"{key}/answer")) is not None

    def arrive(self, key: str) -> None:
        self._ask(key, lambda: self._arrive(key))

    def same(self, key: str, value: str) -> bool:
        return bool(self._ask(key, lambda: self._same(key, value)))

    def gather(self, key: str, value: str) -> Sequence[str] | None:
        return self._ask(key, lambda: self._gather(key, value))

    def choose_newest(
        self, key: str, candidates: Sequence[tuple[int, str]] | None, *, progress: str = ""
    ) -> tuple[int, str] | None:
        outcome = self._ask(key, lambda: self._choose_newest(key, candidates, progress))
        if outcome is None:
            raise RanksError(
                ErrorKind.RANKS_LATE,
                "the ranks cannot agree on what to resume from: their store does not answer",
                hint="check whether rank 0, which holds it, has ended",
            )
        if outcome["late"]:
            seconds = outcome["seconds"]
            what = "left and did not name" if seconds is None else f"did not come within {seconds:.0f} s to name"
            raise RanksError(
                ErrorKind.RANKS_LATE,
                f"{named_ranks(outcome['late'])} {what} the checkpoints to choose from",
                hint="the logs of those ranks show what they do before they resume; all ranks must resume together",
            )
        chosen = outcome["newest"]
        return None if chosen is None else (chosen[0], chosen[1])

    def withdraw(self, key: str) -> None:
        outcome = json.dumps({"newest": None, "late": [self.ranks.rank], "seconds": None})
        self._ask(key, lambda: self._store.set_if_absent(f"{key}/answer", outcome))

    def leave(self) -> None:
        self.agree("leaving")

    def close(self) -> None:
        unread = self._unread
        if self.ranks.rank == 0 and unread is not None:
            self._ask("close", lambda: self._store.wait_until_forgotten(unread, _READ_SECONDS))

    def _agree(self, key: str, ok: bool, seconds: float = PATIENCE_SECONDS, progress: str = "") -> bool | None:
        answer = f"{key}/answer"
        stands = self._come(key) if ok else self._store.set_if_absent(answer, "no")
        if stands is None:
            began_at = time.monotonic()
            stands = self._while_it_moves(
                lambda seconds: self._store.wait_for(answer, seconds, needs=lambda rank: not self._has_come(rank, key)),
                seconds,
                progress,
            ) or self._store.set_if_absent(answer, self._missing(key, min(seconds, time.monotonic() - began_at)))
        word, _, missing = stands.partition(" ")
        if missing:
            what = "a rank is gone and not waited for" if word == "gone" else "not all ranks came in time"
            _log.warning("%s: about=%s %s", what, key, missing)
        self._forget_when_read(key, *([progress] if progress else []))
        if missing:
            self._unread = None
        return _ANSWERS[word]

    def _while_it_moves(self, look: Callable[[float], _Result | None], seconds: float, progress: str) -> _Result | None:
        """Return what `look` finds within its seconds; with `progress`, look on for as long as that changes.

        Not after a look that ends before its time.
        """
        if not progress:
            return look(seconds)
        seen, give_up_at = None, time.monotonic() + seconds
        while (began_at := time.monotonic()) < give_up_at:
            look_seconds = min(seconds, _LOOK_SECONDS)
            found = look(look_seconds)
            if found is not None or time.monotonic() < began_at + look_seconds:
                return found
            line = self._store.read(progress)
            if line != seen:
                seen, give_up_at = line, time.monotonic() + seconds
                _log.info("waiting for other ranks: %s", line)
        return None

    def _missing(self, key: str, seconds: float) -> str:
        gone = self._store.gone(lambda rank: not self._has_come(rank, key))
        if gone:
            return f"gone ended={named_ranks(gone)}"
        return f"late seconds={seconds:.0f} waited_for={named_ranks(self._store.ranks_without('at', key))}"

    def _has_come(self, rank: int, key: str) -> bool:
        """Whether a rank that is gone came to this agreement last, and so has done all that it had to do for it."""
        return self._store.read(f"at/{rank}") == key

    def _arrive(self, key: str) -> bool:
        self._come(key)
        self._forget_when_read(key)
        # The ranks that wait for it may come much later, and `close` does not wait for them.
        self._unread = None
        return True

    def _come(self, key: str) -> str | None:
        """Count this rank as one that is here; return the answer if it is the last."""
        is_last = self._store.count(f"{key}/count") == self.ranks.world_size
        answer = self._store.set_if_absent(f"{key}/answer", "yes") if is_last else None
        # One key per rank for all agreements: it shows at which agreement a late rank was last. After the rest, so that
        # it is true of a rank that ends in between.
        self._store.publish(f"at/{self.ranks.rank}", key)
        return answer

    def _forget_when_read(self, key: str, *more: str) -> None:
        """Count this rank as done with `key`; the last rank deletes it."""
        # This rank has its answer, so it does not matter if the store is lost here.
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

    def _choose_newest(self, key: str, candidates: Sequence[tuple[int, str]] | None, progress: str) -> dict[str, Any]:
        own = None if candidates is None else list(candidates)
        self._store.publish(f"{key}/has/{self.ranks.rank}", json.dumps(own))
        began_at, most_seconds = time.monotonic(), PATIENCE_SECONDS
        newest: tuple[int, str] | None = None
        if self.ranks.rank == 0:
            answers = self._while_it_moves(
                lambda seconds: self._store.gather(f"{key}/has", seconds, until=lambda: self.is_answered(key)),
                most_seconds,
                progress,
            )
            late = [] if answers is not None else self._store.ranks_without(f"{key}/has")
            if answers is None and not late:
                # The last rank may have come just now.
                answers = self._store.gather(f"{key}/has", 0.0)
            named = [found for answer in answers or ["[]"] if (found := json.loads(answer)) is not None]
            common = [{(step, save) for step, save in found} for found in named]
            newest = max(set.intersection(*common), default=None)
            gone = self._store.gone(lambda rank: rank in late)
        else:
            # When all have named theirs, only rank 0 has something left to do.
            def is_needed(rank: int) -> bool:
                return rank == 0 or self._store.read(f"{key}/has/{rank}") is None

            most_seconds, late = 2 * PATIENCE_SECONDS, [0]
            self._while_it_moves(
                lambda seconds: self._store.wait_for(f"{key}/answer", seconds, needs=is_needed), most_seconds, progress
            )
            gone = self._store.gone(is_needed)
        waited_seconds = min(most_seconds, time.monotonic() - began_at)
        outcome = {"newest": newest, "late": gone or late, "seconds": None if gone else waited_seconds}
        stands: dict[str, Any] = json.loads(self._store.set_if_absent(f"{key}/answer", json.dumps(outcome)))
        has = [f"{key}/has/{rank}" for rank in range(self.ranks.world_size)]
        self._forget_when_read(key, *has, *([progress] if progress else []))
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
