"""Messages between the ranks of a job: keys in the process group's store, over a connection of Keepstep's own.

It uses no collectives: one of ours between two of the trainer's would deadlock it. It does not use the trainer's
connection either, where a call that waits holds up all others. Our calls never wait inside the store, so threads can
share a connection. Raises StoreLostError when the store does not answer: it lives with the first node.
"""

import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

from keepstep.errors import ErrorKind, StoreLostError, UsageError
from keepstep.private_members import require
from keepstep.ranks.rank_watch import RankWatch

_Result = TypeVar("_Result")

_FIRST_SLEEP_SECONDS: Final = 0.001
_SHORTEST_LOOK_SECONDS: Final = 0.02
_NAMED_RANKS: Final = 8
_LOOKS_PER_SECOND: Final = 2000
"""How often all waiting ranks together may poll the one store."""


class KeyStore(Protocol):
    """The methods of `torch.distributed.Store` that Keepstep uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among all processes of the job, and among those that share its volume.

    `pod`: the ranks that share its volume, its own included, in order; empty when it is alone.
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
        """Whether this rank does names, records and rotation in the volume for all ranks of its pod."""
        return not self.pod or self.rank == self.pod[0]


class RankStore:
    """Keys below one prefix. A value that `set_if_absent` stored stays; any other may be published again.

    Every wait ends early when a rank that it `needs` is gone, and after a notice, see RankWatch.
    """

    def __init__(self, store: KeyStore, ranks: Ranks, prefix: str = "", watch: RankWatch | None = None) -> None:
        self.ranks = ranks
        self.watch = watch or RankWatch({}, others=ranks.world_size - 1)
        self.look_seconds: Final = max(_SHORTEST_LOOK_SECONDS, ranks.world_size / _LOOKS_PER_SECOND)
        self._store = store
        self._prefix = prefix

    def below(self, prefix: str, ranks: Ranks, watch: RankWatch | None = None) -> "RankStore":
        """Return a store on the same connection, for keys below a further prefix."""
        return RankStore(self._store, ranks, f"{self._prefix}{prefix}/", watch or self.watch)

    def publish(self, key: str, value: str) -> None:
        _answered(lambda: self._store.set(self._key(key), value))

    def set_if_absent(self, key: str, value: str) -> str:
        """Publish `value` unless the key has one. Returns the stored value, which is the same for all ranks."""
        return _answered(lambda: self._store.compare_set(self._key(key), "", value)).decode()

    def read(self, key: str) -> str | None:
        """Return the value; None if no rank has published it."""
        name = self._key(key)
        return _answered(lambda: self._store.get(name).decode() if self._store.check([name]) else None)

    def wait(
        self,
        keys: Sequence[str],
        seconds: float,
        *,
        until: Callable[[], bool] = lambda: False,
        needs: Callable[[int], bool] = lambda rank: False,
    ) -> bool:
        """Wait until all keys are published. Returns False after `seconds`, or once `until` returns true.

        `needs`: asked of a rank that is gone; whether it would still have something to do for this.
        """
        names = [self._key(key) for key in keys]
        return self._look_until(lambda: self._store.check(names), seconds, lambda: until() or bool(self.gone(needs)))

    def gone(self, needs: Callable[[int], bool] = lambda rank: True) -> list[int]:
        """Return the ranks that are gone, of those that `needs` returns true for."""
        return [rank for rank in self.watch.gone() if needs(rank)]

    def wait_until_forgotten(self, key: str, seconds: float) -> bool:
        """Wait until `key` is deleted; return whether that happened in time."""
        names, others = [self._key(key)], self.ranks.world_size - 1
        return self._look_until(lambda: not self._store.check(names), seconds, lambda: len(self.gone()) == others)

    def wait_for(self, key: str, seconds: float, *, needs: Callable[[int], bool] = lambda rank: False) -> str | None:
        """Wait for the value of `key`; None when no rank publishes it in time."""
        return self.read(key) if self.wait([key], seconds, needs=needs) else None

    def count(self, key: str) -> int:
        """Add one to a counter and return its value."""
        return _answered(lambda: self._store.add(self._key(key), 1))

    def gather(self, key: str, seconds: float, *, until: Callable[[], bool] = lambda: False) -> list[str] | None:
        """Wait for what each rank publishes under `<key>/<rank>`; None when one does not in time. For one rank."""
        keys = [f"{key}/{rank}" for rank in range(self.ranks.world_size)]
        if not self.wait(keys, seconds, until=until, needs=lambda rank: self.read(keys[rank]) is None):
            return None
        names = [self._key(key) for key in keys]
        return [value.decode() for value in _answered(lambda: self._store.multi_get(names))]

    def ranks_without(self, key: str, value: str | None = None) -> list[int]:
        """Return the ranks that have published nothing under `<key>/<rank>`, or not `value` if that is given."""
        published = [(rank, self.read(f"{key}/{rank}")) for rank in range(self.ranks.world_size)]
        return [rank for rank, found in published if found is None or (value is not None and found != value)]

    def forget(self, *keys: str) -> None:
        """Delete keys that no rank will read again: the store is in the first rank's memory."""
        for key in keys:
            _answered(partial(self._store.delete_key, self._key(key)))

    def forget_all(self, key: str) -> None:
        """Delete what each rank published under `<key>/<rank>`."""
        self.forget(*(f"{key}/{rank}" for rank in range(self.ranks.world_size)))

    def _look_until(self, holds: Callable[[], bool], seconds: float, until: Callable[[], bool]) -> bool:
        """Poll until `holds` returns true. The store's own wait would write to stderr each time it times out."""
        give_up_at = time.monotonic() + seconds
        sleep_seconds = _FIRST_SLEEP_SECONDS
        most_seconds: float | None = None
        while not _answered(holds):
            if most_seconds is None and (most_seconds := self.watch.most_seconds()) is not None:
                give_up_at = min(give_up_at, time.monotonic() + most_seconds)
            if time.monotonic() >= give_up_at or until():
                return False
            time.sleep(sleep_seconds)
            sleep_seconds = min(2 * sleep_seconds, self.look_seconds)
        return True

    def _key(self, key: str) -> str:
        return f"{self._prefix}{key}"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in words: the first few, and how many more there are."""
    some, more = ", ".join(map(str, ranks[:_NAMED_RANKS])), len(ranks) - _NAMED_RANKS
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}" + (f" and {more} more" if more > 0 else "")


def job_ranks(launched: Ranks) -> Ranks | None:
    """Return this process's place in the process group of torch.distributed; None if none is initialised (yet)."""
    distributed = _distributed()
    if distributed is None:
        return None
    return replace(launched, rank=distributed.get_rank(), world_size=distributed.get_world_size())


def open_rank_store(ranks: Ranks, prefix: str, watch: RankWatch | None = None) -> RankStore:
    """Open a new connection to the process group's store. Raises UsageError, StoreLostError."""
    distributed = _distributed()
    assert distributed is not None
    try:
        require("torch.distributed.distributed_c10d", distributed.distributed_c10d)
        store = distributed.distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else _connected_again(distributed, store)
    except AttributeError as error:
        raise UsageError(
            ErrorKind.UNSUPPORTED,
            f"the ranks cannot agree on what to save, for which Keepstep needs a connection of its own: {error}",
            hint="install torch 2.8 or newer, or initialise the process group by env:// or tcp://, or let rank 0 save "
            "for all, with Checkpointer(rank0_only=True) there and none elsewhere",
        ) from error
    except (RuntimeError, ValueError) as error:
        raise StoreLostError(error) from error
    return RankStore(store, ranks, f"{prefix}/", watch)


def _connected_again(distributed: Any, store: Any) -> KeyStore:
    """What `store.clone()` does since torch 2.8, for a TCPStore. Raises AttributeError for any other store."""
    # The prefixes below which this job's keys are cannot be read, and an earlier start may have used the same server.
    namespace: str = store.compare_set("keepstep", "", uuid.uuid4().hex).decode()
    server = store
    while hasattr(server, "underlying_store"):
        server = server.underlying_store
    connection = distributed.TCPStore(server.host, server.port, is_master=False, timeout=server.timeout)
    return cast(KeyStore, distributed.PrefixStore(namespace, connection))


def _answered(question: Callable[[], _Result]) -> _Result:
    try:
        return question()
    except RuntimeError as error:
        raise StoreLostError(error) from error


def _distributed() -> Any:
    """Return torch.distributed if the program has imported and initialised it, without importing it here."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed
