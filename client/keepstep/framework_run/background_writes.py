"""Follows writes that a framework makes in the background: one thread for each, in the order of the writes."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from keepstep.ranks.coordinator import PATIENCE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    future: "Future[Any]"
    thread: threading.Thread


class BackgroundWrites:
    """The writes of one process that are not yet followed to their end."""

    def __init__(self) -> None:
        self._writes: list[_Write] = []

    def follow(self, future: "Future[Any]", work: Callable[[BaseException | None], object]) -> None:
        """Call `work` in a thread once `future` is done, with what it failed with, or None.

        Work for an earlier write that is done by then comes first: the agent takes the last announcement for the
        newest checkpoint. A write that hangs holds up no later one.
        """
        earlier = self._writes = [one for one in self._writes if one.thread.is_alive()]

        def run() -> None:
            failure: BaseException | None
            try:
                failure = future.exception()
            except CancelledError as cancelled:
                failure = cancelled
            for one in earlier:
                if one.future.done():
                    one.thread.join(PATIENCE_SECONDS)
            work(failure)

        thread = threading.Thread(target=run, name="keepstep-announce", daemon=True)
        self._writes = [*earlier, _Write(future=future, thread=thread)]
        thread.start()

    def wait(self) -> None:
        """Wait for all writes and their work, each for a bounded time."""
        for one in self._writes:
            one.thread.join(PATIENCE_SECONDS)
