"""Says within a second that others may train here now; while all stay the same it costs the agent's loop nothing.

A look at the locks is a few system calls; a turn of the loop for each of them was half of what an idle agent took of
the CPU. A hint is only a hint: who is there is for the sensors to see.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final

from mooring_agent.adapters.liveness import RankLocks
from mooring_agent.core.errors import MooringError

_LOOK_SECONDS: Final = 1.0


@contextlib.contextmanager
def rank_hints(locks: RankLocks, hint: asyncio.Event) -> Iterator[None]:
    """Sets `hint` when a rank's lock comes, goes or can no longer be seen, and when our parent is another one."""
    loop = asyncio.get_running_loop()
    ended = threading.Event()

    def watch() -> None:
        # Not equal to any look: what changed before the first one is a change, too.
        seen: object = None
        while not ended.wait(_LOOK_SECONDS):
            now = _look(locks)
            if now != seen:
                seen = now
                # The loop may have closed meanwhile.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(hint.set)

    # No executor's: it lives as long as the agent, and must not be waited for where the volume hangs.
    threading.Thread(target=watch, name="mooring-ranks", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _look(locks: RankLocks) -> object:
    try:
        return os.getppid(), locks.live_ranks()
    except MooringError as error:
        return str(error)
