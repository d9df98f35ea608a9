"""An exhaustive explicit-state model of snapshots that share objects, and of the prunes that remove them.

The world: snapshot A is committed and owns object x; snapshot B is committed, owns y, and its manifest names x too.
A new snapshot N takes B as its base: what has not changed since B is not sent again. It reserves B, looks whether B is
being pruned (then it sends everything), stores its manifest, and commits. Meanwhile two prunes run over any of A and B:
each writes a tombstone for each victim, looks what is reserved and what committed snapshots name, deletes the markers,
and then the objects that nobody else names. A reservation stays as long as N, and counts until N is committed.

The file that y holds has changed since, and N sends it; if it changes once more before it is pinned, N names y instead.

Everybody may crash after any step. N comes back by its journal: what it has decided stands, but it reserves and looks
again, and is given up if its base is gone. A prune that comes back knows nothing. While N is dead, or given up, an
orphan collector may remove what it has stored.

What no state may show:
- a committed snapshot (its marker is there) with an object that is gone.

Requests of one process are in order, and listings show every write before them, as on S3 since 2020.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from tests.model.search import Result, search


class Variant(StrEnum):
    """The protocol as it is, and what it would be with one idea missing."""

    GOOD = "as designed"
    NO_RESERVATION = "the snapshot reserves nothing"
    LOOKS_BEFORE_RESERVING = "the snapshot looks before it reserves"
    MARKER_BEFORE_TOMBSTONE = "the snapshot looks for the base's marker before it looks for tombstones"
    BACK_WITHOUT_LOOKING = "a snapshot that comes back goes on without reserving and looking again"
    NO_TOMBSTONE = "the prune writes no tombstone"
    LOOKS_BEFORE_TOMBSTONE = "the prune looks before it writes its tombstones"
    SHARED_TOMBSTONE = "two prunes share one tombstone"
    OBJECTS_FIRST = "the prune deletes objects before markers"
    OWN_OBJECTS = "the prune deletes all that its victims own"


class SnapshotStep(StrEnum):
    RESERVE = "reserve"
    LOOK_FOR_TOMBSTONES = "look for tombstones"
    LOOK_FOR_MARKER = "look for the base's marker"
    DECIDE = "decide what to send"
    STORE_MANIFEST = "store its manifest"
    COMMIT = "commit"
    DONE = "done"
    GIVEN_UP = "given up"


class Snapshot(NamedTuple):
    """N. `found`: what it has seen of its base since it reserved it. `reuses`: whether its manifest names x.

    `pinned`: whether it sends the new version of what y holds; otherwise its manifest names y too.
    """

    step: SnapshotStep = SnapshotStep.RESERVE
    dead: bool = False
    found: bool = True
    reuses: bool | None = None
    pinned: bool | None = None


class PruneStep(StrEnum):
    IDLE = "idle"
    TOMBSTONES = "write tombstones"
    LOOK = "look"
    MARKERS = "delete markers"
    OBJECTS = "delete objects"
    CLEAR = "remove tombstones"


class Prune(NamedTuple):
    """`doomed`: the objects that nobody else named when it looked."""

    step: PruneStep = PruneStep.IDLE
    victims: frozenset[str] = frozenset()
    doomed: frozenset[str] = frozenset()
    rounds: int = 0


class State(NamedTuple):
    """`markers` are those of A, B and N; `manifest` is N's, by what it names of others."""

    markers: frozenset[str] = frozenset("AB")
    objects: frozenset[str] = frozenset("xy")
    manifest: frozenset[str] | None = None
    reserved: bool = False
    tombstones: frozenset[tuple[int, str]] = frozenset()
    snapshot: Snapshot = Snapshot()
    prunes: tuple[Prune, ...] = (Prune(), Prune())
    crashes: int = 0


_OWNS: Final = {"A": frozenset("x"), "B": frozenset("y")}
_NAMES: Final = {"A": frozenset("x"), "B": frozenset("xy")}
_VICTIMS: Final = (frozenset("A"), frozenset("B"), frozenset("AB"))
_ROUNDS: Final = 1


class Model:
    def __init__(self, variant: Variant, crashes: int) -> None:
        self._variant = variant
        self._crashes = crashes
        self._order = list(SnapshotStep)
        if variant is Variant.LOOKS_BEFORE_RESERVING:
            self._order.remove(SnapshotStep.RESERVE)
            self._order.insert(self._order.index(SnapshotStep.DECIDE), SnapshotStep.RESERVE)
        elif variant is Variant.MARKER_BEFORE_TOMBSTONE:
            self._order.remove(SnapshotStep.LOOK_FOR_MARKER)
            self._order.insert(1, SnapshotStep.LOOK_FOR_MARKER)

    def explore(self) -> Result:
        start = State(snapshot=Snapshot(step=self._order[0]))
        return search(start, lambda state: (_violation(state), self._steps(state)))

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._snapshot_steps(state)
        for number, prune in enumerate(state.prunes):
            for label, following in self._prune_steps(state, number, prune):
                yield f"prune {number} {label}", following
            if prune.step is not PruneStep.IDLE and state.crashes < self._crashes:
                crashed = _with(state, number, Prune(rounds=prune.rounds))
                yield f"prune {number} crashes", crashed._replace(crashes=state.crashes + 1)

    def _snapshot_steps(self, state: State) -> Iterator[tuple[str, State]]:
        snapshot = state.snapshot
        if snapshot.dead or snapshot.step is SnapshotStep.GIVEN_UP:
            gone = state._replace(reserved=False, manifest=None)
            if gone != state and "N" not in state.markers:
                yield "the orphan collector removes N", gone
        if snapshot.dead:
            yield "N comes back", state._replace(snapshot=self._came_back(snapshot))
            return
        if snapshot.step in (SnapshotStep.DONE, SnapshotStep.GIVEN_UP):
            return
        if state.crashes < self._crashes:
            dead = snapshot._replace(dead=True)
            yield "N crashes", state._replace(snapshot=dead, crashes=state.crashes + 1)
        match snapshot.step:
            case SnapshotStep.RESERVE:
                reserved = self._variant is not Variant.NO_RESERVATION
                yield "N reserves B", self._next(state._replace(reserved=reserved), snapshot)
            case SnapshotStep.LOOK_FOR_TOMBSTONES:
                there = all(victim != "B" for _, victim in state.tombstones)
                yield "N looks for tombstones", self._next(state, snapshot._replace(found=snapshot.found and there))
            case SnapshotStep.LOOK_FOR_MARKER:
                there = "B" in state.markers
                yield "N looks for B's marker", self._next(state, snapshot._replace(found=snapshot.found and there))
            case SnapshotStep.DECIDE:
                if snapshot.reuses and not snapshot.found:
                    given_up = snapshot._replace(step=SnapshotStep.GIVEN_UP)
                    yield "N is given up", state._replace(snapshot=given_up)
                else:
                    decided = snapshot.found if snapshot.reuses is None else snapshot.reuses
                    for pinned in (True, False) if snapshot.pinned is None else (snapshot.pinned,):
                        label = "N decides, and pins the new version" if pinned else "N decides, and pins nothing"
                        yield label, self._next(state, snapshot._replace(reuses=decided, pinned=pinned))
            case SnapshotStep.STORE_MANIFEST:
                named = frozenset("x" if snapshot.pinned else "xy") if snapshot.reuses else frozenset()
                yield "N stores its manifest", self._next(state._replace(manifest=named), snapshot)
            case SnapshotStep.COMMIT:
                yield "N commits", self._next(state._replace(markers=state.markers | {"N"}), snapshot)

    def _came_back(self, snapshot: Snapshot) -> Snapshot:
        if self._variant is Variant.BACK_WITHOUT_LOOKING and snapshot.reuses is not None:
            return snapshot._replace(step=SnapshotStep.STORE_MANIFEST, dead=False)
        return Snapshot(step=self._order[0], reuses=snapshot.reuses, pinned=snapshot.pinned)

    def _next(self, state: State, snapshot: Snapshot) -> State:
        following = self._order[self._order.index(snapshot.step) + 1]
        return state._replace(snapshot=snapshot._replace(step=following))

    def _prune_steps(self, state: State, number: int, prune: Prune) -> Iterator[tuple[str, State]]:
        match prune.step:
            case PruneStep.IDLE:
                if prune.rounds < _ROUNDS:
                    first = PruneStep.LOOK if self._variant is Variant.LOOKS_BEFORE_TOMBSTONE else PruneStep.TOMBSTONES
                    for victims in _VICTIMS:
                        begun = Prune(step=first, victims=victims, rounds=prune.rounds + 1)
                        yield f"begins with {''.join(sorted(victims))}", _with(state, number, begun)
            case PruneStep.TOMBSTONES:
                told = state.tombstones | {(self._tombstone(number), victim) for victim in prune.victims}
                if self._variant is Variant.NO_TOMBSTONE:
                    told = state.tombstones
                late = self._variant is Variant.LOOKS_BEFORE_TOMBSTONE
                following = prune._replace(step=PruneStep.MARKERS if late else PruneStep.LOOK)
                yield "writes tombstones", _with(state._replace(tombstones=told), number, following)
            case PruneStep.LOOK:
                yield "looks", _with(state, number, self._looked(state, prune))
            case PruneStep.MARKERS | PruneStep.OBJECTS:
                markers_now = (prune.step is PruneStep.MARKERS) != (self._variant is Variant.OBJECTS_FIRST)
                changed = (
                    state._replace(markers=state.markers - prune.victims)
                    if markers_now
                    else state._replace(objects=state.objects - prune.doomed)
                )
                step = PruneStep.OBJECTS if prune.step is PruneStep.MARKERS else PruneStep.CLEAR
                label = "deletes markers" if markers_now else "deletes objects"
                yield label, _with(changed, number, prune._replace(step=step))
            case PruneStep.CLEAR:
                own = {(self._tombstone(number), victim) for victim in _OWNS}
                cleared = state._replace(tombstones=state.tombstones - own)
                yield "removes its tombstones", _with(cleared, number, Prune(rounds=prune.rounds))

    def _tombstone(self, number: int) -> int:
        return 0 if self._variant is Variant.SHARED_TOMBSTONE else number

    def _looked(self, state: State, prune: Prune) -> Prune:
        """Drop the victims that are reserved; what the others own is doomed unless somebody else names it."""
        reserved = state.reserved and "N" not in state.markers
        victims = prune.victims - {"B"} if reserved else prune.victims
        named: set[str] = set()
        for snapshot in state.markers - victims:
            named |= state.manifest or set() if snapshot == "N" else _NAMES[snapshot]
        if self._variant is Variant.OWN_OBJECTS:
            named = set()
        owned = {item for victim in victims for item in _OWNS[victim]}
        late = self._variant is Variant.LOOKS_BEFORE_TOMBSTONE
        step = PruneStep.TOMBSTONES if late else PruneStep.MARKERS
        return prune._replace(step=step, victims=victims, doomed=frozenset(owned - named))


def explore(variant: Variant, *, crashes: int) -> Result:
    """Every state that `variant` can reach with so many crashes in all, or the shortest way to a violation."""
    return Model(variant, crashes).explore()


def _with(state: State, number: int, prune: Prune) -> State:
    return state._replace(prunes=(*state.prunes[:number], prune, *state.prunes[number + 1 :]))


def _violation(state: State) -> str:
    for snapshot in sorted(state.markers):
        named = state.manifest or frozenset() if snapshot == "N" else _NAMES[snapshot]
        gone = named - state.objects
        if gone:
            return f"{snapshot} is committed, and {min(gone)} is gone"
    return ""
