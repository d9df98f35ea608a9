"""The gate: tells this process at each step whether to save or exit, the same on all ranks of a job.

With one process, the gate costs about a microsecond per step: no lock, and a system call only once a second; one each
step if another thread than the main one trains.

With several ranks, a notice that reaches one rank stops all of them at the same position. The protocol works in rounds
(the keys of round n begin with `<n>/`):
1. A rank that has a notice or a save request publishes `stop` or `save`.
2. The gate thread of every rank sees this and publishes the position that its training thread is at, as
   `promise/<rank>`: the training thread will not pass the next position before the decision.
3. Rank 0 stores `decision`: the greatest promise and the action, or that the round is cancelled.
4. All ranks act at the first position after that promise. All ranks pass the same positions, so it is the same for all.
5. Once all ranks have promised in a later round, none reads this round again, and rank 0 deletes its keys.
Outside a round, a step costs a lock and a comparison: the gate thread does all the waiting. On timeout, or when a rank
is gone that has not promised, a rank cancels the round, then follows whatever decision is stored: no rank ever decides
alone.

Once the ranks cannot agree any more, because one is gone, SIGTERM ends this process, as it would without Keepstep.
"""

import atexit
import json
import logging
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from keepstep.errors import StoreLostError
from keepstep.gate.signal_file import SignalFile
from keepstep.gate.sigterm import Sigterm
from keepstep.leaving import end_now
from keepstep.ranks.rank_store import RankStore, named_ranks
from keepstep_api import names

Position: TypeAlias = tuple[int, int]
"""Completed optimizer steps, and ticks since then (batches of an evaluation). All ranks pass the same positions."""


class Action(str, Enum):
    """What the ranks must do at a position."""

    __str__ = str.__str__

    NOTHING = "nothing"
    SAVE = "save"
    SAVE_AND_EXIT = "stop"
    """Save just in time, then leave."""


class Gate(Protocol):
    """Decides what this process does at each position.

    `at` may be called several times at one position: there the action only escalates, and SAVE_AND_EXIT is permanent.
    """

    def at(self, step: int, tick: int = 0) -> Action:
        """Return what to do after `step` optimizer steps and `tick` ticks: the same on all ranks."""

    @property
    def noticed(self) -> bool:
        """Whether a termination notice has reached this process; the other ranks may not know of it yet."""

    def notice(self) -> None:
        """Report a termination notice from another source."""

    def request_save(self) -> None:
        """Ask for a save, as `keepstep save` does."""

    def close(self) -> None:
        """Stop polling. Idempotent."""


class SingleProcessGate:
    """The gate of one process. Its sources are SIGTERM, the signal file, `notice` and `request_save`."""

    def __init__(self, signal_path: Path, sigterm: Sigterm) -> None:
        self._signal_file = SignalFile(signal_path)
        self._sigterm = sigterm
        self._stop = self._signal_file.terminating_at_start()
        self._save_asked = False
        self._save_at: Position | None = None

    def at(self, step: int, tick: int = 0) -> Action:
        request = self._signal_file.new_request()
        if request is not None:
            self._stop |= request.terminating
            self._save_asked |= not request.terminating
        if self.noticed:
            return Action.SAVE_AND_EXIT
        if self._save_asked:
            self._save_asked = False
            self._save_at = (step, tick)
        return Action.SAVE if (step, tick) == self._save_at else Action.NOTHING

    @property
    def noticed(self) -> bool:
        return self._stop or self._sigterm.received

    def notice(self) -> None:
        self._stop = True

    def request_save(self) -> None:
        self._save_asked = True

    def close(self) -> None:
        self._signal_file.close()


_log: Final = logging.getLogger("keepstep")
_NOT_BEGUN: Final[Position] = (-1, 0)
_RANK_0_WAIT_SECONDS: Final = 10.0
_OTHER_RANKS_WAIT_SECONDS: Final = 30.0
"""Longer than rank 0's wait, because rank 0 decides."""
_SAVE_TRIES: Final = 3
"""Rounds that try a save request. A termination notice is tried until there can be no agreement any more."""
_JOIN_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0
_LAST_SECONDS: Final = 1.5
"""Between SIGTERM and the end of a process that cannot save any more: its other threads find out in a second what is
lost, and say it, and it may end by itself."""
_CLOSED: Final = "closed"
"""Key that says that some rank's training is over, so that no round can complete after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Act at the first position after `after`. `action` is NOTHING when the round is cancelled."""

    action: Action
    after: Position = _NOT_BEGUN

    def encode(self) -> str:
        return json.dumps({"action": self.action, "after": self.after})

    @staticmethod
    def decode(text: str) -> "Decision":
        value = json.loads(text)
        step, tick = value["after"]
        return Decision(action=Action(value["action"]), after=(step, tick))


_CANCELLED: Final = Decision(action=Action.NOTHING)


class RanksGate:
    """The gate of several ranks. The sources of each are SIGTERM, the signal file, `notice` and `request_save`."""

    def __init__(self, signal_path: Path, sigterm: Sigterm, store: RankStore) -> None:
        self._store = store
        self._signal_file = SignalFile(signal_path)
        self._sigterm = sigterm
        sigterm.watch_from_thread()
        self._stop_wanted = self._signal_file.terminating_at_start()
        self._saves_wanted = 0
        self._save_requested = False
        self._oldest_round = 0
        self._give_up_at: float | None = None
        # Guards what the training thread and the gate thread share.
        self._changed = threading.Condition()
        self._position = _NOT_BEGUN
        self._promise: Position | None = None
        self._decision: Decision | None = None
        self._acted: Position | None = None
        self._stopped = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keepstep-gate", daemon=True)
        self._thread.start()
        # A thread inside the store's C++ when the interpreter ends would abort the process.
        atexit.register(self.close)

    def at(self, step: int, tick: int = 0) -> Action:
        # A step may be a NumPy or a torch number.
        position = (int(step), int(tick))
        with self._changed:
            if self._stopped:
                return Action.SAVE_AND_EXIT
            if self._promise is None or position <= self._promise:
                self._position = position
                return Action.SAVE if position == self._acted else Action.NOTHING
            while not self._is_decided() and self._thread.is_alive():
                self._changed.wait(_JOIN_SECONDS)
            self._position = position
            return self._act(position)

    @property
    def noticed(self) -> bool:
        return self._stop_wanted or self._sigterm.received

    def notice(self) -> None:
        self._stop_wanted = True
        self._sigterm.wake()

    def request_save(self) -> None:
        self._save_requested = True
        self._sigterm.wake()

    def close(self) -> None:
        """Stop polling, and take part in no further round: a rank that closes its gate has left the job."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._sigterm.wake()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            self._signal_file.close()
        atexit.unregister(self.close)

    def _is_decided(self) -> bool:
        return self._decision is not None or self._promise is None or self._closing.is_set()

    def _act(self, position: Position) -> Action:
        """Return what the round, if it is decided, asks for at `position`. Past the decided position, end the round."""
        decision = self._decision
        if decision is None or position <= decision.after:
            return Action.NOTHING
        self._promise = self._decision = None
        self._stopped = decision.action is Action.SAVE_AND_EXIT
        if decision.action is Action.SAVE:
            self._acted = position
        self._changed.notify_all()
        return decision.action

    def _run(self) -> None:
        number, obstacle = 0, ""
        try:
            while not self._stopped and not obstacle and self._requested(number):
                obstacle = self._round(number)
                number += 1
            if self._closing.is_set():
                self._store.publish(_CLOSED, "")
        except StoreLostError as error:
            obstacle = f"error={error}"
            if not self._closing.is_set():
                _log.warning("the ranks can no longer agree on a step to save at: error=%s", error)
        except Exception as error:
            obstacle = f"error={error!r}"
            # Nothing else reports this, and without the gate thread no notice has an effect.
            _log.exception("the ranks' agreement on a step failed, there will be no just-in-time save")
        finally:
            with self._changed:
                if self._decision is None:
                    self._promise = None
                self._changed.notify_all()
        if not self._stopped:
            self._end_when_told(obstacle)

    def _end_when_told(self, obstacle: str) -> None:
        """End this process by SIGTERM, also by one that has come, unless the program takes care of it.

        Nothing else may end it: its training may be in a collective that waits for a rank that is gone.
        """
        while not self._closing.is_set():
            is_told = self._sigterm.received and self._sigterm.would_end_process
            if is_told and (why := obstacle or self._obstacle()):
                _log.warning("ending without a just-in-time save: %s", why)
                if not self._closing.wait(_LAST_SECONDS):
                    # Not as a signal does: the first process of a container survives its own.
                    end_now(names.NOT_DURABLE_EXIT_CODE)
                return
            self._sigterm.wait(_LOOK_SECONDS)

    def _round(self, number: int) -> str:
        """Run a round, from the first notice on any rank until the training thread acts on it or the gate closes.

        Returns why there will be no later one; "" if there may be.
        """
        with self._changed:
            self._decision = None
            self._promise = promise = self._position
        self._store.publish(f"{number}/promise/{self._store.ranks.rank}", json.dumps(promise))
        decision = self._decide(number)
        with self._changed:
            if decision.action is Action.NOTHING:
                self._promise = None
            else:
                self._decision = decision
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._promise is None or self._closing.is_set())
        if decision.action is Action.SAVE:
            self._saves_wanted = 0
            self._save_requested = False
        elif decision.action is Action.NOTHING:
            _log.warning("the ranks did not agree on a step to save at: try=%d", number + 1)
            return self._obstacle()
        return ""

    def _obstacle(self) -> str:
        """Return why there will be no agreement any more; "" if there may be."""
        gone = self._store.gone()
        if gone:
            return f"ended={named_ranks(gone)}"
        most_seconds = self._store.watch.most_seconds()
        if self._give_up_at is None and most_seconds is not None:
            self._give_up_at = time.monotonic() + most_seconds
        is_late = self._give_up_at is not None and time.monotonic() >= self._give_up_at
        return "reason=the ranks do not agree" if is_late else ""

    def _requested(self, number: int) -> bool:
        """Wait for a notice or a save request on any rank. Returns False when the gate closes."""
        if number and self._is_over():
            return False
        keys = {Action.SAVE_AND_EXIT: f"{number}/stop", Action.SAVE: f"{number}/save"}
        while not self._closing.is_set():
            action = self._look()
            if action is not Action.NOTHING:
                self._store.publish(keys[action], "")
            if action is not Action.NOTHING or any(self._store.read(key) is not None for key in keys.values()):
                # This round answers every request that this pod has so far, also one in a new file not opened yet.
                self._signal_file.look()
                self._look()
                self._saves_wanted = max(0, self._saves_wanted - 1)
                return True
            self._sigterm.wait(self._store.look_seconds)
        return False

    def _look(self) -> Action:
        """Read this rank's sources and return what they ask for."""
        request = self._signal_file.new_request()
        self._stop_wanted |= self._sigterm.received or (request is not None and request.terminating)
        if request is not None or self._save_requested:
            self._save_requested = False
            self._saves_wanted = _SAVE_TRIES
        if self._stop_wanted:
            return Action.SAVE_AND_EXIT
        return Action.SAVE if self._saves_wanted else Action.NOTHING

    def _decide(self, number: int) -> Decision:
        key = f"{number}/decision"
        seconds = _OTHER_RANKS_WAIT_SECONDS
        decision = _CANCELLED
        if self._store.ranks.rank == 0:
            decision = self._count(number)
            seconds = 0.0
        self._store.wait(
            [key],
            seconds,
            until=self._is_over,
            needs=lambda rank: rank == 0 or self._store.read(f"{number}/promise/{rank}") is None,
        )
        return Decision.decode(self._store.set_if_absent(key, decision.encode()))

    def _count(self, number: int) -> Decision:
        promises = self._store.gather(f"{number}/promise", _RANK_0_WAIT_SECONDS, until=self._is_over)
        if promises is None:
            return _CANCELLED
        self._forget_rounds_before(number)
        step, tick = max(json.loads(promise) for promise in promises)
        action = Action.SAVE if self._store.read(f"{number}/stop") is None else Action.SAVE_AND_EXIT
        return Decision(action=action, after=(step, tick))

    def _forget_rounds_before(self, number: int) -> None:
        for older in range(self._oldest_round, number):
            self._store.forget(f"{older}/stop", f"{older}/save", f"{older}/decision")
            self._store.forget_all(f"{older}/promise")
        self._oldest_round = number

    def _is_over(self) -> bool:
        return self._closing.is_set() or self._store.read(_CLOSED) is not None
