"""The agent from start to end: recovers, serves, runs the engine, and leaves when the core says so."""

import asyncio
import contextlib
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mooring_agent import __version__
from mooring_agent.adapters.clock import SystemClock
from mooring_agent.adapters.doorbell import Doorbell
from mooring_agent.adapters.journal import open_journal
from mooring_agent.adapters.liveness import RankLocks
from mooring_agent.adapters.rate_limit import RateLimiter
from mooring_agent.adapters.volume import identity
from mooring_agent.adapters.volume.reserve import Reserve
from mooring_agent.adapters.volume.staging_area import LocalStagingArea
from mooring_agent.core.commands import Command, Exit, RingDoorbell
from mooring_agent.core.errors import ErrorKind, MooringError, VolumeError
from mooring_agent.core.events import Exited, Started
from mooring_agent.core.settings import ClusterSettings, Settings
from mooring_agent.ports import Clock
from mooring_agent.runtime import heap
from mooring_agent.runtime.announcements import Announcements
from mooring_agent.runtime.dispatcher import Dispatcher
from mooring_agent.runtime.engine import Engine, nobody_listens
from mooring_agent.runtime.first_look import FirstLook
from mooring_agent.runtime.grpc_errors import ErrorsAnswered
from mooring_agent.runtime.grpc_server import AgentService
from mooring_agent.runtime.http_server import serve_http
from mooring_agent.runtime.journaling import recover
from mooring_agent.runtime.lazy_store import LazyStore
from mooring_agent.runtime.notice_watch import notice_watch
from mooring_agent.runtime.presence import Presence
from mooring_agent.runtime.pruner import Pruner
from mooring_agent.runtime.reconciler import Reconciler
from mooring_agent.runtime.rescue import Rescue
from mooring_agent.runtime.sensors import Sensors
from mooring_agent.runtime.telemetry import say
from mooring_agent.runtime.trainer_watch import trainer_watch
from mooring_agent.runtime.watching import Watching
from mooring_api import doorbell
from mooring_api.names import DOORBELL, JOURNAL, STATE_DIRECTORY
from mooring_api.socket_address import socket_address
from mooring_api.v1 import agent_pb2, agent_pb2_grpc

if TYPE_CHECKING:
    from mooring_agent.runtime.cluster_news import ClusterNews

# Hashing, pinning, reconciling; apart from them what must never wait: locks, disk, announcements, the journal.
_WORKERS: Final = 8
_SENSES: Final = 2
_PAUSE_AFTER_FAILURE_SECONDS: Final = 1.0
_SOCKET_MODE: Final = 0o660
_STOP_SERVING_SECONDS: Final = 0.2
_CLOSING_SECONDS: Final = 2.0

log = structlog.get_logger("mooring.agent")


async def run_agent(settings: Settings, *, fresh: bool = False, parent_pid: int | None = None) -> int:
    """Run until terminated; returns the exit code.

    `fresh`: a new start of the pod, so an old termination notice is void. `parent_pid`: end when that runner is gone.
    Raises MooringError when the agent cannot start at all.
    """
    heap.share_one_heap()
    clock = SystemClock()
    volume = Path(settings.volume)
    state_directory = _make_state_directory(volume)
    identity.claim(volume, settings.store.destination)
    async with contextlib.AsyncExitStack() as stack:
        # First of all: as PID 1 of a container we would not even hear a SIGTERM for which nobody listens.
        signals = stack.enter_context(_signals())
        executor = _threads(stack, "mooring", _WORKERS)
        senses = _threads(stack, "mooring-sense", _SENSES)
        journaling = _threads(stack, "mooring-journal", 1)
        Reserve(state_directory).keep()
        journal, was_damaged = open_journal(state_directory / JOURNAL)
        stack.callback(journal.close)
        if was_damaged:
            log.error("journal.damaged", action="set aside; the staged directories are rescanned")
        staging = LocalStagingArea(volume)
        state = recover(settings, journal, staging)
        news = _cluster_news(stack, settings.cluster, clock, senses)
        engine = Engine(
            state=state,
            journal=journal,
            clock=clock,
            executor=journaling,
            listen=nobody_listens if news is None else news.hear,
        )
        bell = Doorbell(state_directory / DOORBELL)
        if fresh or _is_past(state.termination.deadline, clock.now()):
            # Journaled too: the next start must not find an old notice beside a new one.
            engine.post(Exited(at=clock.now()))
            bell.forget_termination()
        # First in the queue: a notice that arrives as soon as we serve belongs to this life.
        engine.post(Started(at=clock.now(), fresh=fresh))
        limiter = RateLimiter(settings.transfer.bandwidth_bytes_per_second)
        store = LazyStore(settings.store, limiter)
        stack.push_async_callback(store.close)
        presence = Presence(RankLocks(volume))
        announcements = Announcements(engine=engine, clock=clock, executor=senses, volume=volume)
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
            rescue=Rescue(announcements=announcements, engine=engine, settings=settings, executor=senses),
        )
        leaving = asyncio.get_running_loop().create_future()
        dispatcher = Dispatcher(
            store=store,
            staging=staging,
            reconciler=Reconciler(staging=staging, clock=clock, executor=executor, volume=volume),
            pruner=Pruner(state=lambda: state, clock=clock, volume=volume),
            first_look=FirstLook(lambda: state),
            clock=clock,
            executor=executor,
            post=engine.post,
            on_ring=_bell_ringer(bell, presence),
            on_lift_cap=lambda: limiter.set_rate(0),
            on_spared=_as_before(bell, limiter, settings),
            on_exit=leaving.set_result,
        )
        service = AgentService(
            engine=engine, clock=clock, announcements=announcements, presence=presence, sensors=sensors
        )
        await stack.enter_async_context(serve_http(settings.http_address, lambda: state, clock))
        await stack.enter_async_context(_serve_grpc(service, Path(settings.socket)))
        log.info("agent.serving", version=__version__, socket=settings.socket, destination=settings.store.destination)
        forever: list[Callable[[], Coroutine[None, None, None]]] = [
            lambda: sensors.watch_ranks(parent_pid),
            sensors.watch_disk,
            lambda: _obey(signals, sensors),
        ]
        if watching is not None:
            forever.append(watching.run)
        trainers = trainer_watch(settings, state=lambda: state, leave=sensors.stop_without_trainers, executor=senses)
        if trainers is not None:
            forever.append(trainers.watch)
        notices = notice_watch(settings.termination, clock=clock, notify=sensors.notice_termination)
        if notices is not None:
            forever.append(notices.watch)
        if news is not None:
            forever.append(news.tell)
        return await _live(engine, dispatcher, clock, forever, leaving, news)


async def _live(
    engine: Engine,
    dispatcher: Dispatcher,
    clock: Clock,
    forever: Sequence[Callable[[], Coroutine[None, None, None]]],
    leaving: "asyncio.Future[Exit]",
    news: "ClusterNews | None",
) -> int:
    """Everything that runs for as long as the agent does; ends with the exit code of the core's Exit."""
    async with asyncio.TaskGroup() as tasks:

        def dispatch(command: Command) -> None:
            dispatcher.dispatch(tasks, command)

        deciding = tasks.create_task(engine.run(dispatch))
        senses = [tasks.create_task(_kept_going(one)) for one in forever]
        exit_command = await leaving
        _bound_the_closing(exit_command.code)
        # Said before anything is ended or closed: that takes time, and SIGKILL may be near.
        _say_goodbye(exit_command)
        for task in (deciding, *senses):
            task.cancel()
        dispatcher.cancel_all()
        await asyncio.wait({deciding})
        await engine.close(Exited(at=clock.now()))
        if news is not None:
            await news.last_words(exit_command.lost)
    return exit_command.code


def _cluster_news(
    stack: contextlib.AsyncExitStack, settings: ClusterSettings, clock: Clock, executor: Executor
) -> "ClusterNews | None":
    """None where nobody asked for it, or there is no cluster to tell."""
    if not settings.cluster_events:
        return None
    if not settings.kubernetes_host or not settings.pod_name:
        log.error(
            "cluster.unknown",
            problem="cluster_events is set, and the API server or the pod's own name is not known",
            hint="set POD_NAME, POD_NAMESPACE and POD_UID by the downward API, or cluster_events to false",
        )
        return None
    # Imported here: most agents tell nobody.
    from mooring_agent.adapters.cluster import KubernetesCluster
    from mooring_agent.runtime.cluster_news import ClusterNews

    cluster = KubernetesCluster(settings, executor)
    stack.push_async_callback(cluster.close)
    return ClusterNews(cluster=cluster, clock=clock)


async def _kept_going(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Begin again whatever happens: a sense that fails must not take the uploads down with it."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("sense.failed")
        await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)


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


def _make_state_directory(volume: Path) -> Path:
    """A full volume is no reason to stay away: somebody has to make room on it."""
    state_directory = volume / STATE_DIRECTORY
    try:
        state_directory.mkdir(parents=True, exist_ok=True)
        probe = state_directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if error.errno == errno.ENOSPC and state_directory.is_dir():
            return state_directory
        raise VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            f"cannot write to the volume {volume}: {error.strerror}",
            hint="mount the volume read-write for the user that the agent runs as, and leave it some room",
        ) from error
    return state_directory


def _bell_ringer(bell: Doorbell, presence: Presence) -> Callable[[RingDoorbell], None]:
    def ring(command: RingDoorbell) -> None:
        try:
            number = bell.ring(deadline_unix=command.deadline, terminating=command.terminating)
        except MooringError as error:
            log.error("doorbell.unwritable", error=str(error), hint=error.hint)
            number = 0
        log.info("doorbell.rung", terminating=command.terminating, deadline=command.deadline, ring=number)
        presence.ring(doorbell.Ring(ring=number, deadline_unix=command.deadline, terminating=command.terminating))

    return ring


def _as_before(bell: Doorbell, limiter: RateLimiter, settings: Settings) -> Callable[[], None]:
    """What a termination notice has changed, when the pod is spared."""

    def go_on() -> None:
        limiter.set_rate(settings.transfer.bandwidth_bytes_per_second)
        try:
            bell.forget_termination()
        except MooringError as error:
            log.error("doorbell.unwritable", error=str(error), hint=error.hint)

    return go_on


@contextlib.asynccontextmanager
async def _serve_grpc(service: AgentService, socket: Path) -> AsyncIterator[None]:
    """The API with standard health and reflection, on a unix socket that the trainer's group may use."""
    server = grpc.aio.server(interceptors=[ErrorsAnswered()], options=[("grpc.so_reuseport", 0)])
    agent_pb2_grpc.add_AgentServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    name = agent_pb2.DESCRIPTOR.services_by_name["Agent"].full_name
    reflection.enable_server_reflection([name, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        _make_way(socket)
        server.add_insecure_port(socket_address(socket))
        await server.start()
        _share(socket)
    except (OSError, RuntimeError) as error:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot serve on the socket {socket}: {error}",
            hint="another agent may be running on this volume; or give --socket in a directory that is writable",
        ) from error
    for service_name in ("", name):
        await health_service.set(service_name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield
    finally:
        await server.stop(_STOP_SERVING_SECONDS)
        _make_way(socket)


def _share(socket: Path) -> None:
    """For the trainer's group too, whatever the umask."""
    socket.chmod(_SOCKET_MODE)


def _make_way(socket: Path) -> None:
    """Remove a socket that an earlier agent left behind."""
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)


@contextlib.contextmanager
def _signals() -> Iterator["asyncio.Queue[str]"]:
    """Signals that ask us to end, by name, from now on; nobody has to be ready for them yet."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str] = asyncio.Queue()
    wanted = (signal.SIGTERM, signal.SIGINT)
    for number in wanted:
        loop.add_signal_handler(number, queue.put_nowait, number.name)
    try:
        yield queue
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)


def _bound_the_closing(code: int) -> None:
    """The process ends although something hangs: a thread in a dead mount, say, or whoever reads our log."""
    last_resort = threading.Timer(_CLOSING_SECONDS, os._exit, (code,))
    last_resort.daemon = True
    last_resort.start()


def _say_goodbye(command: Exit) -> None:
    """One line per checkpoint that is not durable."""
    log.info("agent.exiting", code=command.code, not_durable=len(command.lost))
    for line in command.lost:
        say(f"mooring: not durable: {line}")
