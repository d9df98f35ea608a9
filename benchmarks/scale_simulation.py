"""A thousand agents on one clock that nobody waits for: the real core and the real committer, a store in memory.

The event loop's clock jumps to the next moment at which something is due, so that a minute of a thousand agents takes
as long as its events. Every request takes 20 ms. Staging, sending and checking are answered as a world does in which
everything works (`tests/core/play.py`). CPU is not simulated.
"""

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tests.core.play import Play
from tests.fakes.memory_store import MemoryStore

from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.commands import Command, Commit, PutFile, WriteManifest
from keepstep_agent.core.agent.events import Event, TerminationNoticed
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.core.stored.object_layout import COMMITS_PREFIX
from keepstep_agent.ports import ObjectInfo
from keepstep_agent.runtime.work.committer import Committer, write_manifest

AGENTS: Final = (8, 64, 1_000)
RANKS_PER_AGENT: Final = 8
LATENCY_SECONDS: Final = 0.02
_COMMIT: Final = "commit"
_KILLED: Final = "committer killed"
_END: Final = "end of all pods, one ten seconds later"
_GOALS_SECONDS: Final[Mapping[str, float]] = MappingProxyType({_COMMIT: 2.0, _KILLED: 3.0, _END: 2.0})
"""From the last manifest to the marker. At the end of a pod two seconds are reserved for it."""
_PAGE: Final = 1_000
_SPREAD_SECONDS: Final = 2.0
"""The agents seal within so many seconds."""
_GRACE_SECONDS: Final = 30.0
_LONGEST_SECONDS: Final = 3_600.0
_SAVE: Final = "save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One commit. Seconds count from the moment at which the last manifest was stored; `requests` are per agent."""

    what: str
    agents: int
    marker_seconds: float
    all_know_seconds: float
    requests: float


class _JumpingSelector(selectors.SelectSelector):
    """Waits for nothing: the clock jumps over the time that the loop would wait."""

    now = 1_000_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is due any more"
        self.now += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock is its selector's, in unix seconds."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Clock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


class _FarStore(MemoryStore):
    """Every request takes time, and is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.stored_at: dict[str, float] = {}

    async def _request(self) -> None:
        self.requests += 1
        await asyncio.sleep(LATENCY_SECONDS)

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        await self._request()
        await super().put(key, body, if_absent=if_absent)
        self.stored_at.setdefault(key, asyncio.get_running_loop().time())

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        await self._request()
        return await super().get(key, limit_bytes=limit_bytes, fresh=fresh)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        found = [one async for one in super().list(prefix)]
        for position, one in enumerate(found or [None]):
            if position % _PAGE == 0:
                await self._request()
            if one is not None:
                yield one


class _Agent(Play):
    """Its commands take as long as their requests."""

    def __init__(self, number: int, agents: int, store: _FarStore) -> None:
        super().__init__(max_concurrency=8)
        self._number = number
        self._world_size = agents * RANKS_PER_AGENT
        self._store = store
        self._committer = Committer(_Clock())
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self.dead = False

    def save(self, kind: Kind) -> None:
        """All its ranks announce their directory, into which each has written a small file."""
        first = self._number * RANKS_PER_AGENT
        for rank in range(first, first + RANKS_PER_AGENT):
            self._at_once()
            self.announce_only(
                _SAVE,
                (4_000,) * RANKS_PER_AGENT,
                kind=kind,
                rank=rank,
                world_size=self._world_size,
                local_world_size=RANKS_PER_AGENT,
            )
            self._go_on()

    def end(self) -> None:
        """The pod is told to end."""
        self._at_once()
        self.feed(TerminationNoticed(at=self.now, deadline=self.now + _GRACE_SECONDS, source="test"))
        self._go_on()

    @property
    def has_sealed(self) -> bool:
        return _SAVE in self.state.checkpoints and self.phase(_SAVE) is not Phase.UPLOADING

    @property
    def knows(self) -> bool:
        return _SAVE in self.state.checkpoints and self.state.checkpoints[_SAVE].durable

    def _at_once(self) -> None:
        self.now = asyncio.get_running_loop().time()

    def _go_on(self) -> None:
        """Begin what the core has asked for, and come back when it wants to be woken."""
        begun = {task.get_name() for task in self._tasks}
        for work, command in self.in_flight.items():
            if str(work) not in begun:
                task = asyncio.create_task(self._perform(command), name=str(work))
                self._tasks.add(task)
        if self._wake:
            self._wake.cancel()
        wake_at = planner.next_wake(self.state)
        if wake_at is not None and not self.dead:
            self._wake = asyncio.get_running_loop().call_at(wake_at, self._woken)

    def _woken(self) -> None:
        if not self.dead:
            self._at_once()
            self.tick()
            self._go_on()

    async def _perform(self, command: Command) -> None:
        work: Any = getattr(command, "work")  # noqa: B009 - every command in flight has one
        event: Event | None = None
        match command:
            case Commit():
                event = await self._committer.commit(self._store, command)
            case WriteManifest():
                event = await write_manifest(self._store, _Clock(), command)
            case PutFile():
                await self._store.put(command.key, bytes(command.region.size_bytes))
            case _:
                await asyncio.sleep(LATENCY_SECONDS)
        self._tasks = {task for task in self._tasks if task.get_name() != str(work)}
        if self.dead:
            return
        self._at_once()
        if event is None:
            self.answer(work)
        else:
            del self.in_flight[work]
            self.feed(event)
        self._go_on()


def measure(sizes: Sequence[int] = AGENTS) -> list[Result]:
    """Simulate a commit, one whose first agents die before it, and one at the end of all pods."""
    return [result for agents in sizes for result in _measure(agents)]


def _measure(agents: int) -> list[Result]:
    return [
        _run(_COMMIT, agents),
        _run(_KILLED, agents, dead=1),
        _run("committer and three deputies killed", agents, dead=4),
        _run(_END, agents, kind=Kind.JUST_IN_TIME, late_seconds=10.0),
    ]


def _run(what: str, agents: int, **how: Any) -> Result:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(_commit(what, agents, **how))


async def _commit(
    what: str, agents: int, *, dead: int = 0, kind: Kind = Kind.PERIODIC, late_seconds: float = 0.0
) -> Result:
    generator, store = random.Random(agents), _FarStore()
    job = [_Agent(number, agents, store) for number in range(agents)]
    loop = asyncio.get_running_loop()
    *first, last = job
    for agent in first:
        if kind is Kind.JUST_IN_TIME:
            agent.end()
        loop.call_later(generator.uniform(0.0, _SPREAD_SECONDS), agent.save, kind)
    if kind is Kind.JUST_IN_TIME:
        last.end()
    await _until(lambda: all(agent.has_sealed for agent in first))
    for agent in job[:dead]:
        agent.dead = True
    loop.call_later(late_seconds, last.save, kind)
    await _until(lambda: all(agent.knows for agent in job[dead:]))
    sealed_at = max(at for key, at in store.stored_at.items() if "/.keepstep/manifest-" in key)
    marker_at = next(at for key, at in store.stored_at.items() if key.startswith(COMMITS_PREFIX))
    files = agents * RANKS_PER_AGENT
    return Result(
        what=what,
        agents=agents,
        marker_seconds=marker_at - sealed_at,
        all_know_seconds=loop.time() - sealed_at,
        requests=(store.requests - files) / agents,
    )


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_LONGEST_SECONDS):
        while not holds():  # noqa: ASYNC110 - nobody waits in earnest, and the agents are tests' players without events
            await asyncio.sleep(LATENCY_SECONDS)


def goals(results: Sequence[Result]) -> list[tuple[str, str, bool]]:
    """Return each goal, what was simulated, and whether it is met."""
    rows = []
    most = max(one.agents for one in results)
    for one in (one for one in results if one.agents == most and one.what in _GOALS_SECONDS):
        goal = _GOALS_SECONDS[one.what]
        took = f"{one.marker_seconds:.2f} s"
        rows.append((f"{one.agents:,} agents, {one.what}: marker ≤ {goal:g} s", took, one.marker_seconds <= goal))
    return rows


def section(results: Sequence[Result]) -> list[str]:
    return [
        "## Simulated",
        "",
        f"The real core and the real committer of each agent, with {RANKS_PER_AGENT} ranks, on a clock that jumps; a",
        f"store in memory whose every request takes {LATENCY_SECONDS * 1000:.0f} ms. The agents seal within "
        f"{_SPREAD_SECONDS:g} s. CPU is not simulated.",
        "",
        "| what | agents | marker | all know | requests |",
        "|---|---|---|---|---|",
        *(
            f"| {one.what} | {one.agents:,} | {one.marker_seconds:.2f} s | {one.all_know_seconds:.2f} s "
            f"| {one.requests:.1f} |"
            for one in results
        ),
    ]
