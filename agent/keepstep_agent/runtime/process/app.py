"""Runs the agent from start to end: builds its parts in the order in which they must begin, and runs them."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Final

import structlog

from keepstep_agent import __version__
from keepstep_agent.adapters import priority
from keepstep_agent.adapters.control_group import cpu_limit
from keepstep_agent.adapters.liveness import RankLocks
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.signal_file import SignalFile
from keepstep_agent.adapters.volume.own_entries import AGENT_NOTE
from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.adapters.volume.work_note import WorkNote
from keepstep_agent.core.agent import drain
from keepstep_agent.core.agent.commands import Command, Exit
from keepstep_agent.core.agent.events import DurableEvent, Exited, Started
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.policies.commit_news import receivers_of
from keepstep_agent.core.policies.repeated_deaths import GUESS
from keepstep_agent.core.policies.run_exit import Drained
from keepstep_agent.core.settings.values import Settings
from keepstep_agent.ports import Clock
from keepstep_agent.restore.predecessors import pod_id
from keepstep_agent.restore.run_lease import lease_of_run
from keepstep_agent.restore.start_record import read_start_record
from keepstep_agent.runtime.api.http import serve_http
from keepstep_agent.runtime.api.server import AgentService, serve_grpc
from keepstep_agent.runtime.api.whole_run import WholeRun
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.engine.journaling import recall, recover
from keepstep_agent.runtime.engine.logs import say
from keepstep_agent.runtime.engine.telemetry import StandstillLog
from keepstep_agent.runtime.monitors.draining import DrainingNotice
from keepstep_agent.runtime.monitors.lease import LeaseRenewer
from keepstep_agent.runtime.monitors.mirror import Mirror
from keepstep_agent.runtime.monitors.monitors import Monitors
from keepstep_agent.runtime.monitors.objective import watch_objective
from keepstep_agent.runtime.monitors.other_writers import OtherWriters
from keepstep_agent.runtime.monitors.preemption import preemption_watcher
from keepstep_agent.runtime.monitors.ranks import LiveRanks, save_requester, termination_canceller
from keepstep_agent.runtime.monitors.unannounced import UnannouncedRecovery
from keepstep_agent.runtime.outside.commit_news import CommitEvents
from keepstep_agent.runtime.outside.kubernetes_events import cluster_news
from keepstep_agent.runtime.outside.ledger import LedgerWriter
from keepstep_agent.runtime.outside.outbox import Outbox, Pace, last_words
from keepstep_agent.runtime.outside.workload_boost import PACE as BOOST_PACE
from keepstep_agent.runtime.outside.workload_boost import workload_boost
from keepstep_agent.runtime.process.open_volume import claim_volume, volume_journal
from keepstep_agent.runtime.work.announcements import Announcements
from keepstep_agent.runtime.work.dispatcher import Dispatcher
from keepstep_agent.runtime.work.duplicate_save_guard import DuplicateSaveGuard
from keepstep_agent.runtime.work.fetches import Fetches
from keepstep_agent.runtime.work.pruner import LeftoverRemover, Pruner
from keepstep_agent.runtime.work.ready_store import ReadyStore
from keepstep_agent.runtime.work.reconciler import Reconciler
from keepstep_api.names import OFF

_PAUSE_AFTER_FAILURE_SECONDS: Final = 1.0
_CLOSING_SECONDS_IN_A_HURRY: Final = 2.0
_CLOSING_SECONDS: Final = 10.0

log = structlog.get_logger("keepstep.agent")

Forever = Callable[[], Coroutine[None, None, None]]
"""Work that runs until it is cancelled."""
AtExit = Callable[[Exit], Coroutine[None, None, None]]
"""Work for the last moments of an agent that ends as the core says."""


class SystemClock:
    """The agent's clock: unix seconds that never jump or go back.

    The wall clock is read once, when the agent starts; after that the monotonic clock counts. So if the wall clock is
    corrected while the agent runs (NTP after a boot, a resumed machine), no retry waits for hours, no deadline passes
    early and no rate becomes absurd. The cost is that times in the journal, the status and the manifests keep the wall
    clock's error at the start. Nothing critical depends on them: grace periods and clouds' notices arrive as durations
    in seconds, not as points in time.
    """

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._offset_seconds = wall() - monotonic()

    def now(self) -> float:
        return self._offset_seconds + self._monotonic()


@contextmanager
def signals_to_end() -> Iterator["asyncio.Queue[str]"]:
    """Queue the names of signals that ask the agent to end. A signal that came while it was blocked is the first."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str] = asyncio.Queue()
    wanted = (signal.SIGTERM, signal.SIGINT)
    for number in wanted:
        loop.add_signal_handler(number, queue.put_nowait, number.name)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    try:
        yield queue
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)


async def live(
    engine: Engine,
    dispatcher: Dispatcher,
    clock: Clock,
    forever: Sequence[Forever],
    leaving: "asyncio.Future[Exit]",
    at_exit: Sequence[AtExit],
    exit_code_of: Callable[[Exit], int],
) -> int:
    """Run everything that lives as long as the agent; return the exit code."""
    async with asyncio.TaskGroup() as tasks:

        def dispatch(command: Command) -> None:
            dispatcher.dispatch(tasks, command)

        deciding = tasks.create_task(engine.run(dispatch))
        monitor_threads = [tasks.create_task(_kept_going(one)) for one in forever]
        exit_command = await leaving
        code = exit_code_of(exit_command)
        _bound_the_closing(code, in_a_hurry=engine.state.termination.noticed)
        # Before anything is closed, because closing takes time and SIGKILL may be near.
        _say_goodbye(exit_command)
        for task in (deciding, *monitor_threads):
            task.cancel()
        dispatcher.cancel_all()
        await asyncio.wait({deciding})
        await engine.close(Exited(at=clock.now()))
        # At the same time.
        for work in at_exit:
            tasks.create_task(work(exit_command))
    return code


def _code_for_runner(command: Exit) -> int:
    if command.stopped:
        return Drained.STOPPED_NOT_STORED if command.code else Drained.STOPPED
    return command.code


async def _kept_going(work: Forever) -> None:
    """Run `work` again whenever it fails or returns: a failing monitor must not stop the uploads."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("monitor.failed")
        await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)


def _bound_the_closing(code: int, *, in_a_hurry: bool) -> None:
    """Bound the time to close, even if something hangs: a thread in a dead mount, or the log's reader."""
    seconds = _CLOSING_SECONDS_IN_A_HURRY if in_a_hurry else _CLOSING_SECONDS
    last_resort = threading.Timer(seconds, os._exit, (code,))
    last_resort.daemon = True
    last_resort.start()


def _say_goodbye(command: Exit) -> None:
    """Log the exit, and print one line per checkpoint that is not durable."""
    log.info("agent.exiting", code=command.code, not_durable=len(command.lost))
    for line in command.lost:
        say(f"keepstep: not durable: {line}")


# Workers hash, pin and take announcements. Other threads do what must never wait (locks, disk, the journal) and what
# takes seconds per GB (reading sent files again).
_WORKERS: Final = 8
_MONITOR_THREADS: Final = 2
_READERS: Final = 2


async def run_agent(settings: Settings, *, fresh: bool = False, parent_pid: int | None = None) -> int:
    """Run the agent until it is terminated; return its exit code.

    `fresh`: the pod is new, so an old termination notice is void. `parent_pid`: the agent ends when this runner is
    gone. Raises KeepstepError when the agent cannot start at all.
    """
    priority.keep_heap_small()
    clock = SystemClock()
    volume = Path(settings.volume)
    claim_volume(settings, alone=parent_pid is not None)
    async with contextlib.AsyncExitStack() as stack:
        # First: PID 1 of a container does not even receive a SIGTERM for which it has no handler.
        signals = stack.enter_context(signals_to_end())
        executor = _threads(stack, "keepstep", _WORKERS)
        monitor_threads = _threads(stack, "keepstep-monitor", _MONITOR_THREADS)
        journaling = _threads(stack, "keepstep-journal", 1)
        journal = stack.enter_context(volume_journal(settings))
        staging = LocalStagingArea(volume, settings.watch)
        # In a thread: a long journal or a slow volume must not delay the handling of a signal.
        note = WorkNote(volume, Path(settings.state_directory), AGENT_NOTE, now=clock.now())
        try:
            state, unjournaled = await asyncio.get_running_loop().run_in_executor(
                journaling, recover, settings, journal, staging, note
            )
        except KeepstepError:
            note.close(note.suspects)
            raise

        async def recalled(save: str) -> tuple[DurableEvent, ...]:
            return await asyncio.get_running_loop().run_in_executor(
                journaling, recall, settings, journal, staging, save
            )

        limiter = RateLimiter(settings.transfer.bandwidth_bytes_per_second)
        store = ReadyStore(settings.store, limiter)
        stack.push_async_callback(store.close)
        others = OtherWriters(store, clock)
        litter = LeftoverRemover(store, clock, settings.retention)
        draining = None
        if parent_pid is None:
            # In a pod. A run has the lease of its destination instead.
            pod = await asyncio.get_running_loop().run_in_executor(
                executor, pod_id, volume, Path(settings.state_directory)
            )
            draining = DrainingNotice(store=store, clock=clock, settings=settings, pod=pod)
        # An agent that was started again in the midst of training has checkpoints in its journal. A guess that killed
        # two agents is not made again: whoever needs the checkpoint asks.
        guesses = not state.checkpoints and not state.termination.noticed and GUESS not in note.set_aside
        fetches = Fetches(
            store=store,
            settings=settings,
            disk=_threads(stack, "keepstep-fetch", 1),
            guessing=(lambda: engine.doing(GUESS, "fetch a checkpoint before it is asked for")) if guesses else None,
        )
        news = await stack.enter_async_context(cluster_news(settings.cluster, clock=clock, executor=monitor_threads))
        ledger = LedgerWriter(
            store=store,
            clock=clock,
            settings=settings,
            restored=None if settings.restore == OFF else read_start_record(volume, Path(settings.state_directory)),
        )
        engine = Engine(
            state=state,
            journal=journal,
            clock=clock,
            executor=journaling,
            listeners=[
                *(others.hear, litter.hear, fetches.hear, ledger.hear, StandstillLog().on_event),
                *([news.hear] if news else []),
                *([draining.hear] if draining else []),
            ],
            unjournaled=unjournaled,
            note=note,
        )
        signal_file = SignalFile(volume)
        noticed_deadline = state.termination.deadline
        if fresh or (noticed_deadline is not None and noticed_deadline <= clock.now()):
            # Exited is journaled too, so that the next start does not find an old notice beside a new one.
            engine.post(Exited(at=clock.now()))
            signal_file.forget_termination()
        # First in the queue: a notice that arrives as soon as we serve belongs to this life.
        engine.post(Started(at=clock.now(), fresh=fresh, suspects=note.suspects))
        live_ranks = LiveRanks(RankLocks(volume))
        announcements = Announcements(
            engine=engine,
            clock=clock,
            volume=volume,
            checkpoint_directory=Path(settings.checkpoint_directory),
            staging=staging,
            workers=executor,
        )
        mirror = (
            Mirror(engine=engine, settings=settings, clock=clock, executor=monitor_threads, parent_pid=parent_pid)
            if settings.watch
            else None
        )
        monitors = Monitors(
            engine=engine,
            clock=clock,
            live_ranks=live_ranks,
            executor=monitor_threads,
            settings=settings,
            mirror=mirror,
            unannounced=UnannouncedRecovery(
                announcements=announcements, engine=engine, settings=settings, executor=monitor_threads, store=store
            ),
        )
        leaving = asyncio.get_running_loop().create_future()
        dispatcher = Dispatcher(
            store=store,
            staging=staging,
            reconciler=Reconciler(staging=staging, clock=clock, executor=executor, volume=volume),
            pruner=Pruner(state=lambda: state, clock=clock, state_directory=Path(settings.state_directory)),
            duplicate_guard=DuplicateSaveGuard(lambda: state),
            clock=clock,
            executor=executor,
            readers=_threads(stack, "keepstep-reader", _READERS),
            may_read_again=lambda kind: drain.may_read_again(state, kind),
            post=engine.post,
            recall=recalled,
            on_save_request=save_requester(signal_file, live_ranks),
            on_lift_cap=lambda: limiter.set_rate(0),
            on_cancelled=termination_canceller(signal_file, limiter, settings),
            on_exit=leaving.set_result,
        )
        service = AgentService(
            engine=engine,
            clock=clock,
            announcements=announcements,
            fetches=fetches,
            live_ranks=live_ranks,
            monitors=monitors,
            tell_unprotected=None if news is None else news.tell_unprotected,
        )
        await stack.enter_async_context(serve_grpc(service, Path(settings.socket), alone=parent_pid is not None))
        # After the API, so that an agent that says it is ready serves it.
        await stack.enter_async_context(
            serve_http(settings.http_address, lambda: state, clock, ledger.life, WholeRun(store))
        )
        log.info("agent.serving", version=__version__, socket=settings.socket, destination=settings.store.destination)
        if limit := cpu_limit():
            log.info("cpu.limited", limit=str(limit), hint="in a pod, raise keepstep.dev/cpu")

        async def note_end(command: Exit) -> None:
            ledger.note_end(command, program_failed=monitors.program_failed, failed_early=monitors.failed_early)
            await last_words(ledger.to, ledger.send_last, in_a_hurry=state.termination.noticed)

        forever: list[Forever] = [
            lambda: monitors.watch_ranks(parent_pid),
            monitors.watch_disk,
            monitors.watch_unannounced,
            lambda: watch_objective(engine),
            others.watch,
            litter.watch,
            fetches.run,
            # It paces itself, and a notice does not wait for a pause.
            Outbox(ledger, Pace(shortest_pause_seconds=0.0)).run,
            lambda: _obey(signals, monitors),
        ]
        if mirror is not None:
            forever.append(mirror.run)
        watcher = preemption_watcher(settings.termination, notify=monitors.notice_termination)
        if watcher is not None:
            forever.append(watcher.watch)
        boost = await stack.enter_async_context(
            workload_boost(settings, state=lambda: state, clock=clock, executor=monitor_threads)
        )
        at_exit: list[AtExit] = [note_end]
        if boost is not None:
            forever.append(Outbox(boost, BOOST_PACE).run)
            at_exit.append(lambda _: last_words(boost.to, boost.send_last, in_a_hurry=state.termination.noticed))
        # The other nodes of a run leave it to the first one.
        is_first_of_run = parent_pid is not None and not settings.node_rank
        lease = LeaseRenewer(store, lease_of_run(settings)) if is_first_of_run else None
        if lease is not None:
            forever.append(lease.renew)
            at_exit.append(lambda _: lease.last_words())
        if draining is not None:
            forever.append(draining.keep)
            at_exit.append(lambda _: draining.last_words())
        receivers = receivers_of(settings.events)
        forever += [Outbox(CommitEvents(engine, clock, receiver), Pace()).run for receiver in receivers]
        if news is not None:

            async def tell_lost(command: Exit) -> None:
                news.note_lost(command.lost)
                await last_words(news.to, news.send_last, in_a_hurry=state.termination.noticed)

            forever += [Outbox(news, Pace(between_seconds=1.0)).run, lambda: news.watch_restore(fetches.progress)]
            at_exit.append(tell_lost)
        # Not only with the first upload: a trainer may wait for it, or the grace period may be running.
        store.prepare()
        # In a pod nobody but people reads the code.
        exit_code_of = attrgetter("code") if parent_pid is None else _code_for_runner
        return await live(engine, dispatcher, clock, forever, leaving, at_exit, exit_code_of)


async def _obey(signals: "asyncio.Queue[str]", monitors: Monitors) -> None:
    while True:
        await monitors.stop(await signals.get())


def _threads(stack: contextlib.AsyncExitStack, name: str, count: int) -> ThreadPoolExecutor:
    """Make threads that the exit does not wait for: the hash of a file is of no use then."""
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)
    stack.callback(executor.shutdown, wait=False, cancel_futures=True)
    return executor
