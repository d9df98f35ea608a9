"""When a sidecar that is a regular container leaves by itself: once its trainer is gone for good.

A native sidecar is told so by SIGTERM; nobody tells a regular one, and while it runs the pod does not complete. It
goes when no process of another container has had the volume for as long as kubelet may take to start the trainer
again, which the pod's restartPolicy decides and the settings say. After a final save nobody comes back. Owns this
decision; who is there is for `adapters.neighbours` to see.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.adapters.neighbours import Neighbourhood, Neighbours
from mooring_agent.core.errors import MooringError
from mooring_agent.core.model import Kind
from mooring_agent.core.settings import Settings
from mooring_agent.core.state import State

_LOOK_SECONDS: Final = 1.0
_AFTER_FINAL_SAVE_SECONDS: Final = 5.0
# Kubelet tries again after at most 300 s to pull an image or to start a container; a second try may be the one.
_UNSEEN_SECONDS: Final = 660.0

log = structlog.get_logger("mooring.trainer_watch")


class TrainerWatch:
    """`look` blocks and raises MooringError; `leave` is called once.

    `gone_seconds`: how long after the trainer's last sign of life. `unseen_seconds`: how long to wait for its first.
    """

    def __init__(
        self,
        *,
        state: Callable[[], State],
        look: Callable[[], Neighbours],
        leave: Callable[[], Awaitable[None]],
        executor: Executor,
        gone_seconds: float,
        after_final_seconds: float = _AFTER_FINAL_SAVE_SECONDS,
        unseen_seconds: float = _UNSEEN_SECONDS,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._state = state
        self._look = look
        self._leave = leave
        self._executor = executor
        self._gone_seconds = gone_seconds
        self._after_final_seconds = min(after_final_seconds, gone_seconds)
        self._unseen_seconds = max(unseen_seconds, gone_seconds)
        self._look_seconds = look_seconds
        self._seen = False
        self._left = False

    async def watch(self) -> None:
        """Forever, also when it has asked us to leave: the drain may take a while."""
        loop = asyncio.get_running_loop()
        alone_since = loop.time()
        while True:
            if await self._somebody_is_there():
                alone_since = loop.time()
            alone_seconds = loop.time() - alone_since
            if not self._left and alone_seconds >= self._patience_seconds():
                self._left = True
                log.info("trainer.gone", alone_seconds=round(alone_seconds, 1), seen=self._seen)
                await self._leave()
            await asyncio.sleep(self._look_seconds)

    async def _somebody_is_there(self) -> bool:
        if self._state().alive_ranks:
            # Its lock says it already.
            self._seen = True
            return True
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._executor, self._look)
        except MooringError as error:
            log.warning("neighbours.unknown", error=str(error), hint=error.hint)
            return True
        self._seen = self._seen or found.trainer or bool(self._state().checkpoints)
        # Whoever has not shown itself yet may be the trainer, in a sandbox that tells little of its mounts.
        return found.trainer if self._seen else found.anybody

    def _patience_seconds(self) -> float:
        if not self._seen:
            return self._unseen_seconds
        newest = self._state().newest()
        ended_by_itself = newest is not None and newest.info.kind is Kind.FINAL
        return self._after_final_seconds if ended_by_itself else self._gone_seconds


def trainer_watch(
    settings: Settings, *, state: Callable[[], State], leave: Callable[[], Awaitable[None]], executor: Executor
) -> TrainerWatch | None:
    """None where it is not asked for, and where nobody can be seen: to leave a living trainer would be worse."""
    gone_seconds = settings.termination.exit_after_trainer_seconds
    if not gone_seconds:
        return None
    neighbourhood = Neighbourhood(Path(settings.volume))
    if not neighbourhood.shared:
        log.error(
            "trainer.invisible",
            problem="exit_after_trainer_seconds is set, and this container has a process namespace of its own: "
            "the agent stays until it is told to end, and the pod does not complete before",
            hint="set shareProcessNamespace: true in the pod, or make the agent a native sidecar",
        )
        return None
    return TrainerWatch(state=state, look=neighbourhood.look, leave=leave, executor=executor, gone_seconds=gone_seconds)
