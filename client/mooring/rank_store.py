"""How the ranks of a job tell each other things: a few keys in the process group's own store, over own connections.

Never a collective: one of ours between two of the trainer's would deadlock it. Never the trainer's connection either:
a blocking call there holds up all others. Raises StoreLostError when the store does not answer: it lives with the first
node.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mooring.errors import StoreLostError

_FIRST_SLEEP_SECONDS: Final = 0.001
_LONGEST_SLEEP_SECONDS: Final = 0.02


class KeyStore(Protocol):
    """What we use of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among all of the job, and among those of its pod."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


class RankStore:
    """A connection of its own for each user: a thread that waits in one does not hold up another thread."""

    def __init__(self, store: KeyStore, ranks: Ranks) -> None:
        self.ranks = ranks
        self._store = store

    def publish(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise StoreLostError(error) from error

    def read(self, key: str) -> str | None:
        """None if nobody has published it."""
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise StoreLostError(error) from error

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all were published in time. It asks again and again: the store's own wait writes to stderr."""
        give_up_at = time.monotonic() + seconds
        sleep_seconds = _FIRST_SLEEP_SECONDS
        try:
            while not self._store.check(list(keys)):
                if time.monotonic() >= give_up_at:
                    return False
                time.sleep(sleep_seconds)
                sleep_seconds = min(2 * sleep_seconds, _LONGEST_SLEEP_SECONDS)
        except RuntimeError as error:
            raise StoreLostError(error) from error
        return True

    def wait_for(self, key: str, seconds: float) -> str | None:
        """The value, or None when nobody published it in time."""
        return self.read(key) if self.wait([key], seconds) else None

    def count(self, key: str) -> int:
        """One more; how many there are by now."""
        try:
            return self._store.add(key, 1)
        except RuntimeError as error:
            raise StoreLostError(error) from error

    def of_all(self, key: str, seconds: float) -> list[str] | None:
        """What each rank published under `<key>/<rank>`; None when some did not in time. For one rank to read."""
        keys = [f"{key}/{rank}" for rank in range(self.ranks.world_size)]
        try:
            return [value.decode() for value in self._store.multi_get(keys)] if self.wait(keys, seconds) else None
        except RuntimeError as error:
            raise StoreLostError(error) from error


def job_ranks() -> Ranks | None:
    """This process's place in the initialised process group of torch.distributed; None if there is none (yet)."""
    distributed = _distributed()
    if distributed is None:
        return None
    return Ranks(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
    )


def open_rank_store(ranks: Ranks, purpose: str) -> RankStore:
    """A new connection. Restarts of a job have keys of their own: torchelastic keeps its store."""
    distributed = _distributed()
    assert distributed is not None
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = distributed.distributed_c10d._get_default_store().clone()
        return RankStore(distributed.PrefixStore(f"mooring/{restart}/{purpose}", store), ranks)
    except (RuntimeError, ValueError) as error:
        raise StoreLostError(error) from error


def _distributed() -> Any:
    """torch.distributed if the program has imported and initialised it: it is not imported for our sake."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
