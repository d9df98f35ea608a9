"""The agent from start to end: puts its parts together in the order in which they must begin, and lets them live.

What is opened here is closed in the opposite order, whatever happens. What the parts do is theirs.
"""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog

from mooring_agent import __version__
from mooring_agent.adapters.clock import SystemClock
from mooring_agent.adapters.control_group import cpu_limit
from mooring_agent.adapters.doorbell import Doorbell
from mooring_agent.adapters.liveness import RankLocks
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.volume.staging_area import LocalStagingArea
from mooring_agent.core import drain
from mooring_agent.core.events import Event, Exited, Started
from mooring_agent.core.settings import Settings
from mooring_agent.core.state import State
from mooring_agent.runtime import heap
from mooring_agent.runtime.announcements import Announcements
from mooring_agent.runtime.cluster_news import cluster_news
from mooring_agent.runtime.dispatcher import Dispatcher
from mooring_agent.runtime.engine import Engine, Listener, nobody_listens
from mooring_agent.runtime.first_look import FirstLook
from mooring_agent.runtime.grpc_server import AgentService
from mooring_agent.runtime.grpc_socket import serve_grpc
from mooring_agent.runtime.http_server import serve_http
from mooring_agent.runtime.journaling import recover
from mooring_agent.runtime.lifetime import Forever, live, signals_to_end
from mooring_agent.runtime.notice_watch import notice_watch
from mooring_agent.runtime.other_writers import OtherWriters
from mooring_agent.runtime.presence import Presence
from mooring_agent.runtime.pruner import LitterRemover, Pruner
from mooring_agent.runtime.ready_store import ReadyStore
from mooring_agent.runtime.reconciler import Reconciler
from mooring_agent.runtime.rescue import Rescue
from mooring_agent.runtime.ringing import as_before, bell_ringer
from mooring_agent.runtime.sensors import Sensors
from mooring_agent.runtime.taken_volume import opened_journal, take_volume
from mooring_agent.runtime.watching import Watching

# Hashing, pinning, announcements. Apart from them: what must never wait (locks, disk, the journal), and what takes
# seconds per GB (reading again what was sent).
_WORKERS: Final = 8
_SENSES: Final = 2
_READERS: Final = 2

log = structlog.get_logger("mooring.agent")


async def run_agent(settings: Settings, *, fresh: bool = False, parent_pid: int | None = None) -> int:
    """Run until terminated; returns the exit code.

    `fresh`: a new start of the pod, so an old termination notice is void. `parent_pid`: end when that runner is gone.
    Raises MooringError when the agent cannot start at all.
    """
    heap.share_one_heap()
    clock = SystemClock()
    volume = Path(settings.volume)
    take_volume(settings)
    async with contextlib.AsyncExitStack() as stack:
        # First of all: as PID 1 of a container we would not even hear a SIGTERM for which nobody listens.
        signals = stack.enter_context(signals_to_end())
        executor = _threads(stack, "mooring", _WORKERS)
        senses = _threads(stack, "mooring-sense", _SENSES)
        journaling = _threads(stack, "mooring-journal", 1)
        journal = stack.enter_context(opened_journal(settings))
        staging = LocalStagingArea(volume)
        # Not here: a long journal or a slow volume must not keep a signal unheard.
        state, unjournaled = await asyncio.get_running_loop().run_in_executor(
            journaling, recover, settings, journal, staging
        )
        limiter = RateLimiter(settings.transfer.bandwidth_bytes_per_second)
        store = ReadyStore(settings.store, limiter)
        stack.push_async_callback(store.close)
        others = OtherWriters(store, clock)
        litter = LitterRemover(store, clock, settings.retention)
        news = await stack.enter_async_context(cluster_news(settings.cluster, clock=clock, executor=senses))
        engine = Engine(
            state=state,
            journal=journal,
            clock=clock,
            executor=journaling,
            listen=_listeners(others.hear, litter.hear, nobody_listens if news is None else news.hear),
            unjournaled=unjournaled,
        )
        bell = Doorbell(volume)
        if fresh or _is_past(state.termination.deadline, clock.now()):
            # Journaled too: the next start must not find an old notice beside a new one.
            engine.post(Exited(at=clock.now()))
            bell.forget_termination()
        # First in the queue: a notice that arrives as soon as we serve belongs to this life.
        engine.post(Started(at=clock.now(), fresh=fresh))
        presence = Presence(RankLocks(volume))
        announcements = Announcements(engine=engine, clock=clock, volume=volume, staging=staging, workers=executor)
        watching = (
            Watching(announcements=announcements, engine=engine, settings=settings, executor=executor)
            if settings.watch
            else None
        )
        sensors = Sensors(
            engine=engine,
            clock=clock,
            presence=presence,
            executor=senses,
            settings=settings,
            watching=watching,
            rescue=Rescue(announcements=announcements, engine=engine, settings=settings, executor=senses, store=store),
        )
        leaving = asyncio.get_running_loop().create_future()
        dispatcher = Dispatcher(
            store=store,
            staging=staging,
            reconciler=Reconciler(staging=staging, clock=clock, executor=executor, volume=volume),
            pruner=Pruner(state=lambda: state, clock=clock, state_directory=Path(settings.state_directory)),
            first_look=FirstLook(lambda: state),
            clock=clock,
            executor=executor,
            readers=_threads(stack, "mooring-reader", _READERS),
            may_read_again=lambda kind: drain.may_read_again(state, kind),
            post=engine.post,
            on_ring=bell_ringer(bell, presence),
            on_lift_cap=lambda: limiter.set_rate(0),
            on_spared=as_before(bell, limiter, settings),
            on_exit=leaving.set_result,
        )
        service = AgentService(
            engine=engine, clock=clock, announcements=announcements, presence=presence, sensors=sensors
        )
        await stack.enter_async_context(serve_http(settings.http_address, lambda: state, clock))
        await stack.enter_async_context(serve_grpc(service, Path(settings.socket)))
        log.info("agent.serving", version=__version__, socket=settings.socket, destination=settings.store.destination)
        if limit := cpu_limit():
            log.info("cpu.limited", limit=str(limit), hint="in a pod mooring.dev/cpu raises it")
        forever: list[Forever] = [
            lambda: sensors.watch_ranks(parent_pid),
            sensors.watch_disk,
            sensors.watch_unannounced,
            others.watch,
            litter.watch,
            lambda: _obey(signals, sensors),
        ]
        if watching is not None:
            forever.append(watching.run)
        notices = notice_watch(settings.termination, notify=sensors.notice_termination)
        if notices is not None:
            forever.append(notices.watch)
        if news is not None:
            forever.append(news.tell)
        # Now, not with the first upload: that may be one for which a trainer waits, or a grace period passes.
        store.prepare()
        return await live(engine, dispatcher, clock, forever, leaving, news)


def _listeners(*listeners: Listener) -> Listener:
    def listen(state: State, event: Event) -> None:
        for listener in listeners:
            listener(state, event)

    return listen


async def _obey(signals: "asyncio.Queue[str]", sensors: Sensors) -> None:
    while True:
        await sensors.stop(await signals.get())


def _threads(stack: contextlib.AsyncExitStack, name: str, count: int) -> ThreadPoolExecutor:
    """Threads that hold nobody up at the end: a file that is still being hashed is of no use any more."""
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)
    stack.callback(executor.shutdown, wait=False, cancel_futures=True)
    return executor


def _is_past(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
