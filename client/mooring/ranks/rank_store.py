"""How the ranks of a job tell each other things: a few keys in the process group's own store, over an own connection.

Never a collective: one of ours between two of the trainer's would deadlock it. Never the trainer's connection either:
a call that waits there holds up all others; ours never wait inside the store, so that threads can share one. Raises
StoreLostError when the store does not answer: it lives with the first node.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from mooring.errors import ErrorKind, StoreLostError, UsageError

_Result = TypeVar("_Result")

_FIRST_SLEEP_SECONDS: Final = 0.001
_SHORTEST_LOOK_SECONDS: Final = 0.02
_NAMED_RANKS: Final = 8
_LOOKS_PER_SECOND: Final = 2000
"""How often all ranks together may look into the one store."""


class KeyStore(Protocol):
    """What we use of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among all of the job, and among those that share its volume.

    `pod`: the ranks that do, itself among them, in order; empty when it is alone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    pod: tuple[int, ...] = ()

    @property
    def local_world_size(self) -> int:
        return len(self.pod) or 1

    @property
    def leads_pod(self) -> bool:
        """Names, records and rotation in the volume are this rank's business."""
        return not self.pod or self.rank == self.pod[0]


class RankStore:
    """Keys below one prefix. Values once settled stay; everything else may be published anew."""

    def __init__(self, store: KeyStore, ranks: Ranks, prefix: str = "") -> None:
        self.ranks = ranks
        self.look_seconds: Final = max(_SHORTEST_LOOK_SECONDS, ranks.world_size / _LOOKS_PER_SECOND)
        self._store = store
        self._prefix = prefix

    def below(self, prefix: str, ranks: Ranks) -> "RankStore":
        """The same connection, for keys of their own."""
        return RankStore(self._store, ranks, f"{self._prefix}{prefix}/")

    def publish(self, key: str, value: str) -> None:
        _answered(lambda: self._store.set(self._key(key), value))

    def set_if_absent(self, key: str, value: str) -> str:
        """Publish it unless somebody has; what stands, the same for all."""
        return _answered(lambda: self._store.compare_set(self._key(key), "", value)).decode()

    def read(self, key: str) -> str | None:
        """None if nobody has published it."""
        name = self._key(key)
        return _answered(lambda: self._store.get(name).decode() if self._store.check([name]) else None)

    def wait(self, keys: Sequence[str], seconds: float, *, until: Callable[[], bool] | None = None) -> bool:
        """Whether all were published in time, or before `until` came true."""
        names = [self._key(key) for key in keys]
        return self._look_until(lambda: self._store.check(names), seconds, until)

    def wait_until_forgotten(self, key: str, seconds: float) -> bool:
        """Whether it was, in time."""
        names = [self._key(key)]
        return self._look_until(lambda: not self._store.check(names), seconds)

    def wait_for(self, key: str, seconds: float, *, until: Callable[[], bool] | None = None) -> str | None:
        """The value, or None when nobody published it in time."""
        return self.read(key) if self.wait([key], seconds, until=until) else None

    def count(self, key: str) -> int:
        """One more; how many there are by now."""
        return _answered(lambda: self._store.add(self._key(key), 1))

    def gather(self, key: str, seconds: float, *, until: Callable[[], bool] | None = None) -> list[str] | None:
        """What each rank published under `<key>/<rank>`; None when some did not in time. For one rank to read."""
        keys = [f"{key}/{rank}" for rank in range(self.ranks.world_size)]
        if not self.wait(keys, seconds, until=until):
            return None
        names = [self._key(key) for key in keys]
        return [value.decode() for value in _answered(lambda: self._store.multi_get(names))]

    def ranks_without(self, key: str, value: str | None = None) -> list[int]:
        """Who has published nothing under `<key>/<rank>`, or not this value."""
        published = [(rank, self.read(f"{key}/{rank}")) for rank in range(self.ranks.world_size)]
        return [rank for rank, found in published if found is None or (value is not None and found != value)]

    def forget(self, *keys: str) -> None:
        """For whom nobody will ask any more: the store is in the first rank's memory."""
        for key in keys:
            _answered(partial(self._store.delete_key, self._key(key)))

    def forget_all(self, key: str) -> None:
        """What each rank published under `<key>/<rank>`."""
        self.forget(*(f"{key}/{rank}" for rank in range(self.ranks.world_size)))

    def _look_until(self, holds: Callable[[], bool], seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """It asks again and again: the store's own wait writes to stderr each time it times out."""
        give_up_at = time.monotonic() + seconds
        sleep_seconds = _FIRST_SLEEP_SECONDS
        while not _answered(holds):
            if time.monotonic() >= give_up_at or (until is not None and until()):
                return False
            time.sleep(sleep_seconds)
            sleep_seconds = min(2 * sleep_seconds, self.look_seconds)
        return True

    def _key(self, key: str) -> str:
        return f"{self._prefix}{key}"


def named_ranks(ranks: Sequence[int]) -> str:
    """In words, and not all of a thousand."""
    some, more = ", ".join(map(str, ranks[:_NAMED_RANKS])), len(ranks) - _NAMED_RANKS
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}" + (f" and {more} more" if more > 0 else "")


def job_ranks(launched: Ranks) -> Ranks | None:
    """This process's place in the process group of torch.distributed; None if none is initialised (yet)."""
    distributed = _distributed()
    if distributed is None:
        return None
    return replace(launched, rank=distributed.get_rank(), world_size=distributed.get_world_size())


def open_rank_store(ranks: Ranks, prefix: str) -> RankStore:
    """A new connection. Raises UsageError."""
    distributed = _distributed()
    assert distributed is not None
    try:
        store = distributed.distributed_c10d._get_default_store().clone()
    except AttributeError as error:
        raise UsageError(
            ErrorKind.UNSUPPORTED,
            "the ranks cannot agree on what to save: this torch cannot clone its store",
            hint="install torch 2.8 or newer, or let rank 0 save for all, with Checkpointer(rank0_only=True) there "
            "and none elsewhere",
        ) from error
    except (RuntimeError, ValueError) as error:
        raise StoreLostError(error) from error
    return RankStore(store, ranks, f"{prefix}/")


def _answered(question: Callable[[], _Result]) -> _Result:
    try:
        return question()
    except RuntimeError as error:
        raise StoreLostError(error) from error


def _distributed() -> Any:
    """torch.distributed if the program has imported and initialised it: it is not imported for our sake."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed
