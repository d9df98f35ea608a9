"""The gate of a job with several ranks: a notice that reached one of them stops all at the same position.

The protocol, in rounds (keys of round n begin with `<n>/`):
1. whoever has a notice publishes `request`;
2. every rank's gate thread sees it, and promises: the training thread will not pass the next position undecided;
   it publishes the position that the training thread is at, as `promise/<rank>`;
3. rank 0's publishes `decision`: the greatest promise and what is asked, or that the round is off;
4. all ranks act at the first position after it. All pass the same positions, so that this is the same for all.
A step costs a lock and a compare: all waiting is done by the thread, on a store connection of its own.
"""

import atexit
import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooring.errors import StoreLostError
from mooring.gate.ask import Ask, Position
from mooring.gate.bell import Bell
from mooring.gate.sigterm import Sigterm
from mooring.rank_store import RankStore

_log: Final = logging.getLogger("mooring")
_NOT_BEGUN: Final[Position] = (-1, 0)
_LEADER_WAIT_SECONDS: Final = 10.0
_FOLLOWER_WAIT_SECONDS: Final = 30.0
"""Longer than the leader's: that a round is off is for the leader to say."""
_TRIES: Final = 3
_LOOKS_PER_SECOND: Final = 2000
"""How often all ranks together may look into the one store."""
_SHORTEST_LOOK_SECONDS: Final = 0.02
_JOIN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Act at the first position after `after`. `ask` is NOTHING when the round is off."""

    ask: Ask
    after: Position = _NOT_BEGUN

    def encode(self) -> str:
        return json.dumps({"ask": self.ask, "after": self.after})

    @staticmethod
    def decode(text: str) -> "Decision":
        value = json.loads(text)
        step, tick = value["after"]
        return Decision(Ask(value["ask"]), (step, tick))


class RanksGate:
    """Sources on any rank: SIGTERM, the doorbell, `notice`."""

    def __init__(self, doorbell_path: Path, sigterm: Sigterm, store: RankStore) -> None:
        self._store = store
        self._look_seconds = max(_SHORTEST_LOOK_SECONDS, store.ranks.world_size / _LOOKS_PER_SECOND)
        self._bell = Bell(doorbell_path)
        self._sigterm = sigterm
        sigterm.watch_from_thread()
        self._stop_wanted = self._bell.rung_before_start()
        self._save_wanted = False
        # Shared by the training thread and ours.
        self._changed = threading.Condition()
        self._position = _NOT_BEGUN
        self._promise: Position | None = None
        self._decision: Decision | None = None
        self._acted: Position | None = None
        self._stopped = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooring-gate", daemon=True)
        self._thread.start()
        # A thread inside the store's C++ when the interpreter ends would abort the process.
        atexit.register(self.close)

    def at(self, step: int, tick: int = 0) -> Ask:
        position = (step, tick)
        with self._changed:
            if self._stopped:
                return Ask.STOP
            if self._promise is None or position <= self._promise:
                self._position = position
                return Ask.SAVE if position == self._acted else Ask.NOTHING
            if not self._changed.wait_for(self._is_decided, _FOLLOWER_WAIT_SECONDS + _JOIN_SECONDS):
                self._decision = Decision(Ask.NOTHING)
            self._position = position
            return self._act(position)

    def notice(self) -> None:
        self._stop_wanted = True
        self._sigterm.wake()

    def close(self) -> None:
        """Also stops agreeing: a rank that closes its gate has left the job."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._sigterm.wake()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            self._bell.close()
        atexit.unregister(self.close)

    def _is_decided(self) -> bool:
        return self._decision is not None or self._promise is None or self._closing.is_set()

    def _act(self, position: Position) -> Ask:
        """What a round that may be decided asks at `position`; ends the round when it is past."""
        decision = self._decision
        if decision is None or position <= decision.after:
            return Ask.NOTHING
        self._promise = self._decision = None
        self._stopped = decision.ask is Ask.STOP
        if decision.ask is Ask.SAVE:
            self._acted = position
        self._changed.notify_all()
        return decision.ask

    def _run(self) -> None:
        aborted = 0
        number = 0
        try:
            while not self._closing.is_set() and not self._stopped and aborted < _TRIES:
                decision = self._round(number)
                number += 1
                aborted = aborted + 1 if decision is not None and decision.ask is Ask.NOTHING else 0
        except StoreLostError as error:
            _log.warning("the ranks can no longer agree on a step to save at: error=%s", error)
        finally:
            with self._changed:
                if self._decision is None:
                    self._promise = None
                self._changed.notify_all()
        if aborted >= _TRIES:
            _log.warning("the ranks did not agree on a step to save at: tries=%d", aborted)

    def _round(self, number: int) -> Decision | None:
        """From the first notice on any rank until the training thread has acted on it; None when the gate closes."""
        if not self._requested(f"{number}/request"):
            return None
        with self._changed:
            self._decision = None
            self._promise = promise = self._position
        self._store.publish(f"{number}/promise/{self._store.ranks.rank}", json.dumps(promise))
        decision = self._decide(number)
        with self._changed:
            if decision.ask is Ask.NOTHING:
                self._promise = None
            else:
                self._decision = decision
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._promise is None or self._closing.is_set())
        return decision

    def _requested(self, key: str) -> bool:
        """Wait for a notice on any rank; False when the gate closes."""
        while not self._closing.is_set():
            ask = self._look()
            if ask is not Ask.NOTHING:
                self._store.publish(key, ask)
            if ask is not Ask.NOTHING or self._store.read(key) is not None:
                # A wish to stop is there until it is fulfilled, also when this round comes to save only or to nothing.
                self._save_wanted = False
                return True
            self._sigterm.wait(self._look_seconds)
        return False

    def _look(self) -> Ask:
        """What was asked of this rank."""
        ring = self._bell.new_ring()
        self._stop_wanted |= self._sigterm.received or (ring is not None and ring.terminating)
        self._save_wanted |= ring is not None
        if self._stop_wanted:
            return Ask.STOP
        return Ask.SAVE if self._save_wanted else Ask.NOTHING

    def _decide(self, number: int) -> Decision:
        if self._store.ranks.rank == 0:
            self._store.publish(f"{number}/decision", self._count(number).encode())
        text = self._store.wait_for(f"{number}/decision", _FOLLOWER_WAIT_SECONDS)
        return Decision(Ask.NOTHING) if text is None else Decision.decode(text)

    def _count(self, number: int) -> Decision:
        promises = self._store.of_all(f"{number}/promise", _LEADER_WAIT_SECONDS)
        if promises is None:
            return Decision(Ask.NOTHING)
        step, tick = max(json.loads(promise) for promise in promises)
        return Decision(Ask(self._store.read(f"{number}/request") or Ask.STOP), (step, tick))
