"""An exhaustive explicit-state model of commit, prune and orphan collection against an object store.

The world: checkpoint 1 is committed by an earlier attempt. The agents of the running attempt upload checkpoint 2: each
writes the data of its rank, then its manifest. The last agent has two ranks that announce one after the other, the
higher one first: it writes a manifest of one rank, and later one of both. Any agent writes the commit marker, at any
time, if it sees manifests of every rank. A pruner keeps one checkpoint, an orphan collector removes what never
committed. Meanwhile, within bounds: the whole job crashes and starts again from checkpoint 1 with other bytes (training
is not deterministic), an agent alone crashes and repeats its uploads, answers are lost and requests land late, an
object is lost in the store. A reader looks at every state.

What no state may show:
- a commit marker that a reader accepts and whose ranks are of different incarnations,
- a commit marker whose checkpoint is not whole (but for an object that the store itself lost),
- an acknowledged commit that is gone,
- no restorable checkpoint at all.

`explore` walks every reachable state, breadth first, so a counter-example is a shortest one. The model assumes what
Keepstep assumes: read-after-write listings, and that no request lives longer than `orphan_age_seconds`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from tests.model.search import Result, search


class Variant(StrEnum):
    """The protocol as it is, and what it would be with one idea missing."""

    GOOD = "as designed"
    MARKER_FIRST = "marker before data"
    REUSED_KEYS = "no save id in the keys"
    COUNT_ANY_SAVE = "committer counts manifests of the step, whichever save they belong to"
    COUNT_AGENTS = "committer counts agents with a manifest, whichever ranks it has"
    SAME_NAME_GROWS = "a manifest that grows keeps its name"
    PRUNE_MARKER_LAST = "prune removes data before the marker"
    PRUNE_UNVALIDATED = "prune counts markers, not validated checkpoints"
    ORPHANS_AT_ONCE = "orphans are collected without an age margin"
    ORPHANS_OF_THE_DEAD = "orphans are collected as soon as their attempt is gone, requests in flight or not"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may go wrong in one history."""

    agents: int = 2
    crashes: int = 1
    late_requests: int = 1
    lost_objects: int = 0


class Thing(StrEnum):
    DATA = "data"
    MANIFEST = "manifest"
    MARKER = "marker"


class Key(NamedTuple):
    """An object's key. `ranks`: one for data, those of the agent for a manifest, none for a marker."""

    thing: Thing
    step: int
    save: str
    ranks: tuple[int, ...] = ()


class Put(NamedTuple):
    """A request. A body is what each rank wrote, `incarnation/rank`; a marker's is those of all ranks."""

    key: Key
    body: tuple[str, ...]


class Agent(NamedTuple):
    """How far an agent's uploads are, and which start of the job it belongs to."""

    done: int
    incarnation: int


class PruneProgress(StrEnum):
    IDLE = "idle"
    BEGUN = "begun"
    FINISHED = "finished"


class State(NamedTuple):
    objects: frozenset[Put]
    in_flight: frozenset[Put]
    agents: tuple[Agent, ...]
    pruned: PruneProgress
    acknowledged: Key | None
    crashes: int
    late_requests: int
    lost: frozenset[Key]


_OLD: Final = "old"


class Model:
    """All states of one variant within bounds."""

    def __init__(self, variant: Variant, bounds: Bounds) -> None:
        self._variant = variant
        self._bounds = bounds
        self._ranks = range(bounds.agents + 1)
        alone = [self._steps((agent,)) for agent in self._ranks[:-2]]
        self._steps_of = [*alone, self._steps(self._ranks[-1:], self._ranks[-2:])]

    def _steps(self, *manifests: Sequence[int]) -> list[tuple[Thing, tuple[int, ...]]]:
        """What an agent writes, in order, that has these ranks, one more in each of its manifests."""
        steps: list[tuple[Thing, tuple[int, ...]]] = []
        for ranks in manifests:
            steps += [(Thing.DATA, (ranks[0],)), (Thing.MANIFEST, tuple(ranks))]
        marker = (Thing.MARKER, ())
        return [marker, *steps] if self._variant is Variant.MARKER_FIRST else [*steps, marker]

    def explore(self) -> Result:
        first = self._first()
        return search(first, lambda state: (self._violation(state), self._moves(state)))

    def _first(self) -> State:
        objects = {Put(Key(Thing.MARKER, 1, _OLD), tuple(f"{_OLD}/{rank}" for rank in self._ranks))}
        for steps in self._steps_of:
            for thing, ranks in steps:
                if thing is not Thing.MARKER:
                    objects.add(Put(Key(thing, 1, _OLD, ranks), tuple(f"{_OLD}/{rank}" for rank in ranks)))
        return State(
            objects=frozenset(objects),
            in_flight=frozenset(),
            agents=tuple(Agent(0, 0) for _ in self._steps_of),
            pruned=PruneProgress.IDLE,
            acknowledged=None,
            crashes=0,
            late_requests=0,
            lost=frozenset(),
        )

    # What can happen next.

    def _moves(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._late_requests_land(state)
        yield from self._agents_work(state)
        yield from self._job_crashes(state)
        yield from self._store_loses(state)
        yield from self._pruner_works(state)
        yield from self._collector_works(state)

    def _late_requests_land(self, state: State) -> Iterator[tuple[str, State]]:
        for request in state.in_flight:
            yield (
                f"late {_name(request.key)} lands",
                state._replace(objects=_put(state.objects, request), in_flight=state.in_flight - {request}),
            )

    def _agents_work(self, state: State) -> Iterator[tuple[str, State]]:
        for agent, one in enumerate(state.agents):
            request = self._next_request(state, agent)
            if request is None:
                continue
            after = state._replace(
                objects=_put(state.objects, request),
                agents=_with(state.agents, agent, one._replace(done=one.done + 1)),
                acknowledged=request.key if request.key.thing is Thing.MARKER else state.acknowledged,
            )
            yield f"agent {agent} puts {_name(request.key)}", after
            if state.late_requests < self._bounds.late_requests:
                yield (
                    f"agent {agent} puts {_name(request.key)}, the answer is lost, a copy stays in flight",
                    after._replace(in_flight=state.in_flight | {request}, late_requests=state.late_requests + 1),
                )

    def _job_crashes(self, state: State) -> Iterator[tuple[str, State]]:
        if state.crashes == self._bounds.crashes:
            return
        restarted = state._replace(
            agents=tuple(Agent(0, one.incarnation + 1) for one in state.agents),
            pruned=PruneProgress.IDLE if state.pruned is PruneProgress.BEGUN else state.pruned,
            crashes=state.crashes + 1,
        )
        yield "the job crashes", restarted
        for agent, one in enumerate(state.agents):
            request = self._next_request(state, agent)
            if request is not None and state.late_requests < self._bounds.late_requests:
                yield (
                    f"the job crashes while {_name(request.key)} of agent {agent} is in flight",
                    restarted._replace(in_flight=state.in_flight | {request}, late_requests=state.late_requests + 1),
                )
            if one.done:
                yield (
                    f"agent {agent} crashes and uploads its staged bytes again",
                    state._replace(agents=_with(state.agents, agent, one._replace(done=0)), crashes=state.crashes + 1),
                )

    def _store_loses(self, state: State) -> Iterator[tuple[str, State]]:
        # Only while checkpoint 1 is whole: with one checkpoint kept, nobody can mend the loss of that one.
        if len(state.lost) == self._bounds.lost_objects or Key(Thing.MARKER, 1, _OLD) not in dict(state.objects):
            return
        for one in state.objects:
            if one.key.thing is Thing.DATA and one.key.step == 2:
                yield (
                    f"the store loses {_name(one.key)}",
                    state._replace(objects=_without(state.objects, one.key), lost=state.lost | {one.key}),
                )

    def _pruner_works(self, state: State) -> Iterator[tuple[str, State]]:
        order = sorted((one.key for one in state.objects if one.key.step == 1), key=lambda key: key.thing.value)
        markers = [key for key in order if key.thing is Thing.MARKER]
        rest = [key for key in order if key.thing is not Thing.MARKER]
        first, last = (rest, markers) if self._variant is Variant.PRUNE_MARKER_LAST else (markers, rest)
        newer = [key for key in _markers(state.objects) if key.step == 2]
        if self._variant is not Variant.PRUNE_UNVALIDATED:
            newer = [key for key in newer if self._accepted(state.objects, key)]
        if state.pruned is PruneProgress.IDLE and newer and order:
            yield (
                f"prune deletes {', '.join(_name(key) for key in first) or 'what is left'}",
                state._replace(objects=_without(state.objects, *first), pruned=PruneProgress.BEGUN),
            )
        elif state.pruned is PruneProgress.BEGUN:
            yield (
                f"prune deletes {', '.join(_name(key) for key in last) or 'nothing more'}",
                state._replace(objects=_without(state.objects, *last), pruned=PruneProgress.FINISHED),
            )

    def _collector_works(self, state: State) -> Iterator[tuple[str, State]]:
        committed = {(key.step, key.save) for key in _markers(state.objects)}
        alive = {self._save(one.incarnation) for one in state.agents}
        busy = {request.key.save for request in state.in_flight}
        for save in {one.key.save for one in state.objects if (one.key.step, one.key.save) not in committed}:
            if self._variant is not Variant.ORPHANS_AT_ONCE:
                if save in alive:
                    continue
                # The age margin: by then nothing of a dead attempt is in flight any more.
                if save in busy and self._variant is not Variant.ORPHANS_OF_THE_DEAD:
                    continue
            keys = [one.key for one in state.objects if one.key.save == save]
            yield f"the orphans of {save} are collected", state._replace(objects=_without(state.objects, *keys))

    def _next_request(self, state: State, agent: int) -> Put | None:
        one, steps = state.agents[agent], self._steps_of[agent]
        if one.done == len(steps):
            return None
        (thing, ranks), save = steps[one.done], self._save(one.incarnation)
        if thing is Thing.MARKER:
            return self._marker_request(state, one, save)
        name = ranks[-1:] if self._variant is Variant.SAME_NAME_GROWS else ranks
        return Put(Key(thing, 2, save, name), tuple(_body(one.incarnation, rank) for rank in ranks))

    def _marker_request(self, state: State, agent: Agent, save: str) -> Put | None:
        key = Key(Thing.MARKER, 2, save)
        if self._variant is Variant.MARKER_FIRST:
            return Put(key, tuple(_body(agent.incarnation, rank) for rank in self._ranks))
        named = self._named(state.objects, 2, None if self._variant is Variant.COUNT_ANY_SAVE else save)
        wanted = len(self._steps_of) if self._variant is Variant.COUNT_AGENTS else len(self._ranks)
        return Put(key, named) if len(named) >= wanted else None

    def _named(self, objects: frozenset[Put], step: int, save: str | None) -> tuple[str, ...]:
        """What the manifests say of each rank, the largest first, and none with a rank that another one has."""
        found: dict[int, str] = {}
        manifests = [
            one
            for one in objects
            if (one.key.thing, one.key.step) == (Thing.MANIFEST, step) and save in (None, one.key.save)
        ]
        for one in sorted(manifests, key=lambda one: (-len(one.body), one)):
            bodies = {int(body.partition("/")[2]): body for body in one.body}
            if not bodies.keys() & found.keys():
                found |= bodies
        return tuple(body for _, body in sorted(found.items()))

    def _save(self, incarnation: int) -> str:
        return "same" if self._variant is Variant.REUSED_KEYS else f"attempt{incarnation}"

    # What a reader makes of it.

    def _accepted(self, objects: frozenset[Put], marker: Key) -> bool:
        """The reader's rule: every rank's data is there and is what the marker says, and so are the manifests."""
        bodies = dict(objects)
        if (
            self._variant is not Variant.MARKER_FIRST
            and self._named(objects, marker.step, marker.save) != bodies[marker]
        ):
            return False
        data = [bodies.get(Key(Thing.DATA, marker.step, marker.save, (rank,))) for rank in self._ranks]
        return data == [(body,) for body in bodies[marker]]

    def _violation(self, state: State) -> str:
        restorable = 0
        bodies = dict(state.objects)
        for marker in _markers(state.objects):
            lost = any(key.save == marker.save for key in state.lost)
            if self._accepted(state.objects, marker):
                if len({body.partition("/")[0] for body in bodies[marker]}) != 1:
                    return f"{_name(marker)} is accepted, and mixes two incarnations"
                restorable += 1
            elif not lost:
                return f"{_name(marker)} is visible, and its checkpoint is not whole"
        if state.acknowledged and state.acknowledged not in bodies:
            return f"{_name(state.acknowledged)} was acknowledged, and is gone"
        return "" if restorable else "no checkpoint can be restored"


def explore(variant: Variant, bounds: Bounds) -> Result:
    """Every state that `variant` can reach within `bounds`, or the shortest way to a violation."""
    return Model(variant, bounds).explore()


def _body(incarnation: int, rank: int) -> str:
    return f"incarnation{incarnation}/{rank}"


def _markers(objects: frozenset[Put]) -> list[Key]:
    return [one.key for one in objects if one.key.thing is Thing.MARKER]


def _put(objects: frozenset[Put], request: Put) -> frozenset[Put]:
    return frozenset(one for one in objects if one.key != request.key) | {request}


def _without(objects: frozenset[Put], *keys: Key) -> frozenset[Put]:
    return frozenset(one for one in objects if one.key not in keys)


def _with(agents: tuple[Agent, ...], index: int, agent: Agent) -> tuple[Agent, ...]:
    return (*agents[:index], agent, *agents[index + 1 :])


def _name(key: Key) -> str:
    of = f" of {', '.join(map(str, key.ranks))}" if key.ranks else ""
    return f"{key.thing.value} {key.step}.{key.save}{of}"
