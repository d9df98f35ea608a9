"""An exhaustive explicit-state model of how the pods of a start agree on what they resume from, with no client to ask.

The world: a job of two pods trains from checkpoint 1. It is started several times under one name: suspended and
resumed, restarted in place, one pod replaced, or one pod evicted while it restores. Each pod looks at the generations
that are written down (`look`), fetches a checkpoint, writes down a new generation if it may not join the newest, and
takes its place in it when it has the checkpoint. When both pods of a start are in place, they train and commit the next
checkpoint. Meanwhile, within bounds, a pod of the start before commits late, because it drains while the new ones
start, or is itself still restoring.

What no state may show, when both pods of a start are in place:
- that they have different checkpoints,
- that they have an older one than the newest when the start began.

Both are too much to ask where a commit comes late and an earlier start was not complete (`Bounds.incomplete`,
`lingering`, `replacements`): this is the known limit of docs/design/0005. The model shows that it takes both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from tests.model.search import Result, search

_NODES: Final = (0, 1)


class Variant(StrEnum):
    """The rules as they are, and what they would be with one idea missing."""

    GOOD = "as designed"
    ONE_PIN = "one pin for all starts of the name"
    PLACE_FIRST = "a pod takes its place before it has the checkpoint"
    NO_PLACES = "a pod joins the newest generation, whoever is in it"
    PLACES_ALONE = "a generation is never over, whatever was committed since"
    ANY_COMMIT = "any commit ends a generation, also one of the run that it resumes from"
    ANYBODY = "each pod writes a generation of its own without a condition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may happen in one history.

    `incomplete`: a start may be killed before both of its pods are in place. `lingering`: and these may go on restoring
    beside the next start.
    """

    starts: int = 2
    late_commits: int = 1
    evictions: int = 1
    replacements: int = 0
    incomplete: bool = False
    lingering: bool = False


class Phase(StrEnum):
    NEW = "new"
    FETCHING = "fetching"
    FETCHED = "fetched"
    IN_PLACE = "in place"
    GONE = "gone"


class Checkpoint(NamedTuple):
    """A committed checkpoint, and the run of the job that made it."""

    step: int
    run: int


class Pod(NamedTuple):
    """`generation`: the one that it joins or wants to begin. `begins`: it is not written down yet."""

    start: int
    node: int
    phase: Phase = Phase.NEW
    generation: int = -1
    begins: bool = False
    takes: Checkpoint = Checkpoint(0, 0)


class State(NamedTuple):
    """`generations[g]` is what generation `g` resumes from. `began_with`: the newest step when a start began."""

    generations: tuple[Checkpoint, ...]
    places: frozenset[tuple[int, int]]
    newest: Checkpoint
    pods: tuple[Pod, ...]
    began_with: tuple[int, ...]
    late: int
    evicted: int
    replaced: int
    trained: bool


class Model:
    """All states of one variant within bounds."""

    def __init__(self, variant: Variant, bounds: Bounds) -> None:
        self._variant = variant
        self._bounds = bounds

    def explore(self) -> Result:
        first = State(
            (), frozenset(), Checkpoint(1, 0), tuple(Pod(0, node) for node in _NODES), (1,), 0, 0, 0, trained=False
        )
        return search(first, lambda state: (self._violation(state), self._moves(state)))

    # What can happen next.

    def _moves(self, state: State) -> Iterator[tuple[str, State]]:
        for index, pod in enumerate(state.pods):
            for label, after in self._restore(state, index, pod):
                yield f"pod {pod.node} of start {pod.start} {label}", after
        yield from self._training(state)
        yield from self._trouble(state)

    def _restore(self, state: State, index: int, pod: Pod) -> Iterator[tuple[str, State]]:
        match pod.phase:
            case Phase.NEW:
                looked = self._look(state, pod)
                after = _with(state, index, looked)
                if self._variant is Variant.PLACE_FIRST and not looked.begins:
                    after = after._replace(places=state.places | {(looked.generation, pod.node)})
                what = "will begin" if looked.begins else "joins"
                yield f"{what} generation {looked.generation} with step {looked.takes.step}", after
            case Phase.FETCHING:
                yield "has the checkpoint", _with(state, index, pod._replace(phase=Phase.FETCHED))
            case Phase.FETCHED if pod.begins:
                yield self._begin(state, index, pod)
            case Phase.FETCHED:
                after = _with(state, index, pod._replace(phase=Phase.IN_PLACE))
                yield "is in place", after._replace(places=state.places | {(pod.generation, pod.node)})
            case _:
                pass

    def _look(self, state: State, pod: Pod) -> Pod:
        newest = len(state.generations) - 1
        if self._may_join(state, newest, pod.node):
            return pod._replace(phase=Phase.FETCHING, generation=newest, begins=False, takes=state.generations[newest])
        return pod._replace(phase=Phase.FETCHING, generation=newest + 1, begins=True, takes=state.newest)

    def _may_join(self, state: State, generation: int, node: int) -> bool:
        if generation < 0 or self._variant is Variant.ANYBODY:
            return False
        if self._variant is Variant.ONE_PIN:
            return True
        resumed = state.generations[generation]
        if self._variant is Variant.ANY_COMMIT:
            is_over = state.newest != resumed
        else:
            is_over = state.newest.run != resumed.run and self._variant is not Variant.PLACES_ALONE
        return not is_over and (self._variant is Variant.NO_PLACES or (generation, node) not in state.places)

    def _begin(self, state: State, index: int, pod: Pod) -> tuple[str, State]:
        if pod.generation < len(state.generations) and self._variant is not Variant.ANYBODY:
            # Another pod was first: look again.
            return "finds that generation begun", _with(state, index, pod._replace(phase=Phase.NEW))
        generations = (*state.generations, pod.takes)
        number = len(generations) - 1
        after = _with(state, index, pod._replace(begins=False, generation=number))
        places = state.places | ({(number, pod.node)} if self._variant is Variant.PLACE_FIRST else set())
        return f"begins generation {number}", after._replace(generations=generations, places=places)

    def _training(self, state: State) -> Iterator[tuple[str, State]]:
        current = self._current(state)
        steps = {pod.takes.step for pod in current}
        if not state.trained and all(pod.phase is Phase.IN_PLACE for pod in current) and len(steps) == 1:
            made = Checkpoint(max(state.newest.step, steps.pop() + 1), state.newest.run + 1)
            yield f"the job trains and commits step {made.step}", state._replace(newest=made, trained=True)

    def _trouble(self, state: State) -> Iterator[tuple[str, State]]:
        start = len(state.began_with) - 1
        complete = all(pod.phase is Phase.IN_PLACE for pod in self._current(state))
        if start + 1 < self._bounds.starts and (complete or self._bounds.incomplete or self._bounds.lingering):
            kept = state.pods if self._bounds.lingering else ()
            kept = tuple(pod for pod in kept if pod.phase not in (Phase.IN_PLACE, Phase.GONE))
            yield (
                "all pods are killed and started again",
                state._replace(
                    pods=(*kept, *(Pod(start + 1, node) for node in _NODES)),
                    began_with=(*state.began_with, state.newest.step),
                    trained=False,
                ),
            )
        if start and state.late < self._bounds.late_commits:
            yield (
                "a pod of an earlier start commits late",
                state._replace(newest=state.newest._replace(step=state.newest.step + 1), late=state.late + 1),
            )
        for index, pod in enumerate(state.pods):
            if pod.start != start:
                continue
            if pod.phase in (Phase.FETCHING, Phase.FETCHED) and state.evicted < self._bounds.evictions:
                yield (
                    f"pod {pod.node} is evicted while it restores",
                    _with(state, index, Pod(start, pod.node))._replace(evicted=state.evicted + 1),
                )
            if pod.phase is Phase.IN_PLACE and state.replaced < self._bounds.replacements:
                yield (
                    f"pod {pod.node} is replaced",
                    _with(state, index, Pod(start, pod.node))._replace(replaced=state.replaced + 1),
                )

    # What may not be.

    def _current(self, state: State) -> list[Pod]:
        return [pod for pod in state.pods if pod.start == len(state.began_with) - 1]

    def _violation(self, state: State) -> str:
        current = self._current(state)
        if not all(pod.phase is Phase.IN_PLACE for pod in current) or state.trained:
            return ""
        steps = {pod.takes.step for pod in current}
        if min(steps) < state.began_with[-1]:
            return f"start {len(state.began_with) - 1} resumes from {sorted(steps)}, older than what was committed"
        if len(steps) > 1:
            return f"the pods of start {len(state.began_with) - 1} resume from {sorted(steps)}"
        return ""


def explore(variant: Variant, bounds: Bounds) -> Result:
    """Every state that `variant` can reach within `bounds`, or the shortest way to a violation."""
    return Model(variant, bounds).explore()


def _with(state: State, index: int, pod: Pod) -> State:
    return state._replace(pods=(*state.pods[:index], pod, *state.pods[index + 1 :]))
