"""Who trains here: local ranks with a liveness lock, and those that hold an Attach stream open instead."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from mooring_agent.adapters.liveness import RankLocks
from mooring_api.doorbell import Ring
from mooring_api.v1 import agent_pb2

_RINGS_KEPT = 16


class Presence:
    """`ring` reaches attached clients; those with the lock read the doorbell file."""

    def __init__(self, locks: RankLocks) -> None:
        self._locks = locks
        self._streams: list[tuple[int, asyncio.Queue[agent_pb2.DoorbellRequest]]] = []

    @contextmanager
    def attached(self, local_rank: int) -> "Iterator[asyncio.Queue[agent_pb2.DoorbellRequest]]":
        """The rank counts as alive inside; the queue has what to tell it."""
        entry = (local_rank, asyncio.Queue[agent_pb2.DoorbellRequest](_RINGS_KEPT))
        self._streams.append(entry)
        try:
            yield entry[1]
        finally:
            self._streams.remove(entry)

    def alive(self) -> frozenset[int]:
        """Blocks for a few system calls per rank."""
        return self._locks.live_ranks() | {local_rank for local_rank, _ in self._streams}

    def ring(self, ring: Ring) -> None:
        for _, rings in self._streams:
            if rings.full():
                # A client that reads nothing gets the latest.
                rings.get_nowait()
            rings.put_nowait(
                agent_pb2.DoorbellRequest(terminating=ring.terminating, deadline=ring.deadline_unix, ring=ring.ring)
            )
