"""Reports a pod's checkpoints to Kubernetes: a few Events, and an annotation with the newest committed checkpoint.

News is queued in the engine's turn and sent slowly. If the queue is full, the oldest is dropped. What the service
account may not do is logged once and then left out.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final, ParamSpec

import structlog

from keepstep_agent.core.agent.events import Committed, Event, Failed, StepSeen, WorkFailed
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ClusterError, ErrorKind
from keepstep_agent.core.model import Kind
from keepstep_agent.core.settings.table import spelled
from keepstep_agent.core.settings.values import ClusterSettings
from keepstep_agent.ports import Clock, Cluster, EventType, PodEvent
from keepstep_agent.runtime.work.fetches import FetchProgress
from keepstep_api.names import ANNOTATION_LAST_COMMITTED, annotations_for

_QUEUE_LIMIT: Final = 32
_MOST_UNPROTECTED: Final = 4
"""A program that names a new directory at each save would push out all other news."""
_BETWEEN_ANNOTATIONS_SECONDS: Final = 30.0
_BETWEEN_STORAGE_ERRORS_SECONDS: Final = 300.0
_BETWEEN_RESTORES_SECONDS: Final = 60.0
_GIB: Final = 1024**3

P = ParamSpec("P")

log = structlog.get_logger("keepstep.cluster")


class KubernetesEvents:
    """The outbox's sender to Kubernetes. `hear` is the engine's listener."""

    to = "kubernetes"

    def __init__(
        self,
        *,
        cluster: Cluster,
        clock: Clock,
        between_annotations_seconds: float = _BETWEEN_ANNOTATIONS_SECONDS,
        between_restores_seconds: float = _BETWEEN_RESTORES_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._between_annotations_seconds = between_annotations_seconds
        self._between_restores_seconds = between_restores_seconds
        self._events: deque[PodEvent] = deque(maxlen=_QUEUE_LIMIT)
        self._committed = ""
        self._annotated = ""
        self._annotate_at = 0.0
        self._storage_error_at = float("-inf")
        self._stuck = False
        self._unprotected: set[str] = set()
        self._forbidden: set[str] = set()
        self._news = asyncio.Event()

    def hear(self, state: State, event: Event) -> None:
        match event:
            case Committed() if (found := state.checkpoints.get(event.work.save)) is not None:
                info = found.info
                when = datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                what = {"name": info.name} if info.is_snapshot else {"name": info.name, "step": info.step}
                self._committed = json.dumps({**what, "at": when})
                self._news.set()
                if info.kind is Kind.JUST_IN_TIME:
                    text = f"{info.name} (step {info.step}) was saved just in time and is committed"
                    self._note(EventType.NORMAL, "CheckpointCommitted", text, event.at)
            case Failed():
                name = state.checkpoints[event.save].info.name if event.save in state.checkpoints else event.save
                text = f"{name} cannot become durable: {event.reason}; {event.hint}"
                self._note(EventType.WARNING, "CheckpointLost", text, event.at)
            case WorkFailed() if state.breaker.is_open or event.work.save in state.set_aside:
                if event.at - self._storage_error_at >= _BETWEEN_STORAGE_ERRORS_SECONDS:
                    self._storage_error_at = event.at
                    self._note(EventType.WARNING, "StorageError", f"{event.message}; {event.hint}", event.at)
            case StepSeen() if state.progress.stuck != self._stuck:
                self._stuck = state.progress.stuck
                newest = state.progress.newest
                if self._stuck and newest is not None:
                    text = f"no step for {event.at - newest.at:.0f} s, the last was step {newest.step}"
                    self._note(EventType.WARNING, "TrainerStuck", text, event.at)
            case _:
                pass

    def tell_unprotected(self, directory: str) -> None:
        """Say, once, that the program's checkpoints in this directory are out of the agent's sight."""
        if directory in self._unprotected or len(self._unprotected) >= _MOST_UNPROTECTED:
            return
        self._unprotected.add(directory)
        text = (
            f"what the program saves in {directory} is not stored, unless just in time: no volume of the agent has it"
        )
        hint = annotations_for(directory)
        log.warning("trainer.output_not_stored", directory=directory, hint=hint)
        self._note(EventType.WARNING, "OutputNotStored", f"{text}; {hint}", self._clock.now())

    async def watch_restore(self, progress: Callable[[], FetchProgress | None]) -> None:
        """Report from time to time how far a restore is that takes long, until cancelled."""
        while True:
            await asyncio.sleep(self._between_restores_seconds)
            now = progress()
            if now is not None:
                text = f"step {now.step}: {now.done_bytes / _GIB:.1f} of {now.total_bytes / _GIB:.1f} GiB are here"
                event_type = EventType.WARNING if now.storage_error else EventType.NORMAL
                trouble = f"; {now.storage_error}" if now.storage_error else ""
                self._note(event_type, "RestoreProgress", f"{text}{trouble}", self._clock.now())

    def note_lost(self, lost: Sequence[str]) -> None:
        """Say what is not durable at the agent's end."""
        for line in lost[:_QUEUE_LIMIT]:
            self._note(EventType.WARNING, "CheckpointLost", f"not durable: {line}", self._clock.now())

    async def until_due(self) -> None:
        # Ahead of the first news: at the agent's end there is no time for it.
        await self._cluster.prepare()
        while not self._events:
            due_seconds = None
            if self._committed != self._annotated:
                due_seconds = max(0.0, self._annotate_at - asyncio.get_running_loop().time())
                if not due_seconds:
                    return
            self._news.clear()
            try:
                async with asyncio.timeout(due_seconds):
                    await self._news.wait()
            except TimeoutError:
                return

    async def send(self) -> None:
        """Make one call. Raises ClusterError, and then keeps the news."""
        if self._events:
            event = self._events[0]
            if not await self._allowed("events", self._cluster.tell, event):
                self._events.clear()
            elif self._events and self._events[0] is event:
                self._events.popleft()
        elif (committed := self._committed) != self._annotated:
            await self._allowed("pods", self._cluster.annotate, ANNOTATION_LAST_COMMITTED, committed)
            self._annotated = committed
            self._annotate_at = asyncio.get_running_loop().time() + self._between_annotations_seconds

    async def send_last(self) -> None:
        while self._events or self._committed != self._annotated:
            await self.send()

    def _note(self, event_type: EventType, reason: str, message: str, at: float) -> None:
        self._events.append(PodEvent(event_type=event_type, reason=reason, message=message, at=at))
        self._news.set()

    async def _allowed(
        self, resource: str, call: Callable[P, Awaitable[None]], *arguments: P.args, **more: P.kwargs
    ) -> bool:
        if resource in self._forbidden:
            return False
        try:
            await call(*arguments, **more)
        except ClusterError as error:
            if error.kind is not ErrorKind.ACCESS_DENIED:
                raise
            self._forbidden.add(resource)
            log.warning("kubernetes.forbidden", resource=resource, error=str(error), hint=error.hint, action="left out")
            return False
        return True


@asynccontextmanager
async def cluster_news(
    settings: ClusterSettings, *, clock: Clock, executor: Executor
) -> AsyncIterator[KubernetesEvents | None]:
    """Give the reporter while the context is open; None if the settings ask for none or no cluster is known."""
    if not settings.cluster_events:
        yield None
        return
    if not settings.kubernetes_host or not settings.pod_name:
        log.error(
            "cluster.unknown",
            problem="cluster events are asked for, and the API server or the pod's own name is not known",
            hint="set POD_NAME, POD_NAMESPACE and POD_UID by the downward API, or "
            f"{spelled('cluster.cluster_events')} to false",
        )
        yield None
        return
    # Imported here, because most agents do not report to a cluster.
    from keepstep_agent.adapters.kubernetes import KubernetesCluster

    cluster = KubernetesCluster(settings, executor)
    try:
        yield KubernetesEvents(cluster=cluster, clock=clock)
    finally:
        await cluster.close()
