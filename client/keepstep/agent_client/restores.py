"""Checkpoints that the agent can bring to this volume: which ones there are, and all or parts of one.

Owns how long this process waits for them. The agent brings the bytes and verifies them; a call only asks how far it is,
so an agent that is killed and started again costs time and nothing else. Raises only RestoreError.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from keepstep.errors import AgentError, ErrorKind, RestoreError

if TYPE_CHECKING:
    from keepstep.agent_client.channel import Channel
    from keepstep_api.v1 import agent_pb2

_log: Final = logging.getLogger("keepstep")

WAIT_SECONDS: Final = 5.0
"""How long one call waits."""
AGENT_SECONDS: Final = 300.0
"""How long to wait for an agent that does not answer: kubelet starts a killed one again after up to five minutes."""
STORE_SECONDS: Final = 1800.0
"""How long to wait while nothing arrives and the store gives errors."""
TOTAL_SECONDS: Final = 24 * 3600.0
"""How long to wait for a checkpoint in all."""
_SAY_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 1.0
_GIB: Final = 1024**3

FileRange = tuple[str, int, int]
"""A file's path in the checkpoint, an offset and a length in bytes; length 0: to the end of the file."""

RANGES_AT_ONCE: Final = 10_000
"""The API's limit."""


class Restores:
    """What the destination has, through the agent beside this process."""

    def __init__(self, channel: "Channel") -> None:
        self._channel = channel

    def newest(
        self, on_wait: Callable[[str], object], output_key: str | None = None, *, name: str = ""
    ) -> Sequence[tuple[int, str]]:
        """Return the newest committed checkpoints as (step, save); empty if the destination has none.

        `output_key`: of this output directory, as `directory_key` calls it; None: of all. `name`: only those of this
        name, however old. `on_wait` gets a line from time to time while the store does not answer.
        """
        patience = _Patience(on_wait, "the newest checkpoints")
        while True:
            answer = patience.answer(lambda: self._channel.list_restorable(output_key, name, WAIT_SECONDS))
            if answer is not None and answer.ready:
                return [(one.step, one.save) for one in answer.checkpoints]
            patience.wait(0, 0, answer.storage_error if answer is not None else "")

    def fetch(self, save: str, ranges: Sequence[FileRange] | None, on_wait: Callable[[str], object]) -> Path:
        """Have all of a checkpoint brought to its place, or only `ranges`, and return where to read them.

        `on_wait` gets a line from time to time. Raises RestoreError(CHECKPOINT_DAMAGED) if this checkpoint cannot be
        had, and another one perhaps can.
        """
        if ranges is None:
            return Path(self._ask_until_done(save, None, on_wait).path)
        path = Path()
        for first in range(0, len(ranges), RANGES_AT_ONCE):
            path = Path(self._ask_until_done(save, ranges[first : first + RANGES_AT_ONCE], on_wait).path)
        return path

    def files(self, save: str, on_wait: Callable[[str], object]) -> tuple[Path, Sequence[str]]:
        """Return where a checkpoint has its place, and the paths of all its files; none if they are too many to list.

        Fetches nothing. `on_wait` and errors as for `fetch`.
        """
        answer = self._ask_until_done(save, (), on_wait)
        return Path(answer.path), answer.files

    def ask(self, save: str, ranges: Sequence[FileRange]) -> None:
        """Have the agent begin to bring these ranges, in this order, without waiting for them.

        Raises RestoreError if it refuses, such as for want of room. An agent that does not answer is left alone: what
        it has not heard, `fetch` asks for.
        """
        patience = _Patience(lambda line: None, f"save {save}")
        for first in range(0, len(ranges), RANGES_AT_ONCE):
            patience.answer(partial(self._channel.fetch, save, ranges[first : first + RANGES_AT_ONCE], 0))

    def _ask_until_done(
        self, save: str, ranges: Sequence[FileRange] | None, on_wait: Callable[[str], object]
    ) -> "agent_pb2.FetchResponse":
        patience = _Patience(on_wait, f"save {save}")
        while True:
            answer = patience.answer(lambda: self._channel.fetch(save, ranges, WAIT_SECONDS))
            if answer is not None and answer.done:
                response: agent_pb2.FetchResponse = answer
                return response
            if answer is not None:
                patience.wait(answer.done_bytes, answer.total_bytes, answer.storage_error)


class _Patience:
    """How long to go on asking, and what to say meanwhile."""

    def __init__(self, on_wait: Callable[[str], object], about: str) -> None:
        self._on_wait = on_wait
        self._about = about
        self._began_at = self._answered_at = self._moved_at = self._said_at = time.monotonic()
        self._done_bytes = 0

    def answer(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns; None if the agent does not answer now. Raises RestoreError."""
        try:
            answer = call()
        except AgentError as error:
            if error.kind is ErrorKind.CHECKPOINT_DAMAGED:
                raise RestoreError(error.kind, str(error), hint=error.hint) from error
            if error.kind is ErrorKind.AGENT_REFUSED:
                raise RestoreError(
                    ErrorKind.NOT_RESTORED, f"the agent cannot bring {self._about}: {error}", hint="see the agent's log"
                ) from error
            if time.monotonic() - self._answered_at > AGENT_SECONDS:
                raise RestoreError(
                    ErrorKind.NOT_RESTORED,
                    f"the agent that brings {self._about} has not answered for {AGENT_SECONDS:.0f} s: {error}",
                    hint="see the agent's log; without it nobody knows what to resume from",
                ) from error
            trouble = "refuses for now" if error.kind is ErrorKind.AGENT_BUSY else "does not answer"
            self._say(f"the agent {trouble}: {error}")
            time.sleep(_PAUSE_SECONDS)
            return None
        self._answered_at = time.monotonic()
        return answer

    def wait(self, done_bytes: int, total_bytes: int, storage_error: str) -> None:
        """Note how far the agent is. Raises RestoreError if that has been the same for too long."""
        now = time.monotonic()
        if done_bytes != self._done_bytes or not storage_error:
            # Without an error the agent verifies what is here, which may take long.
            self._done_bytes, self._moved_at = done_bytes, now
        trouble = f", {storage_error}" if storage_error else ""
        if now - self._moved_at > STORE_SECONDS or now - self._began_at > TOTAL_SECONDS:
            raise RestoreError(
                ErrorKind.NOT_RESTORED,
                f"{self._about} cannot be had, after {now - self._began_at:.0f} s{trouble}",
                hint="check whether the destination can be reached; `keepstep doctor` examines it",
            )
        self._say(f"{done_bytes / _GIB:.1f} of {total_bytes / _GIB:.1f} GiB{trouble}")

    def _say(self, line: str) -> None:
        self._on_wait(line)
        if time.monotonic() - self._said_at > _SAY_SECONDS:
            self._said_at = time.monotonic()
            _log.info("waiting for %s: %s", self._about, line)
