"""What the model of the choice is made of: what may happen, what is where, and how an agent lists.

An agent lists with the real `RestorableListing`, from a store that has the markers of what is committed.
"""

from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar, cast

from tests.model.replayed_rank import Answer, End, Question, Refused, Save

from keepstep.checkpoints.records import Kind, Record
from keepstep.errors import ErrorKind
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.stored.object_layout import step_prefix
from keepstep_agent.ports import ObjectInfo
from keepstep_agent.runtime.work.ready_store import ReadyStore
from keepstep_agent.runtime.work.restorable import RestorableListing

_Value = TypeVar("_Value")


class Variant(StrEnum):
    """The client as it is, and what it would be with one idea missing."""

    GOOD = "as it is"
    EACH_ITS_NEWEST = "each pod takes the newest that it can have"
    NAMED_BY_ANY = "the newest that any pod names is chosen"
    NOT_TOGETHER = "a pod that has the choice does not ask whether the others have it"
    KEPT_TO_ITSELF = "a pod does not tell that it cannot have the choice"
    NOT_WITHDRAWN = "a pod that leaves while it lists does not tell"
    DEAF = "a pod that is told to end goes on to wait for its agent"
    AFRESH_ALONE = "nothing in common is a fresh start"
    OFFERED_AGAIN = "an agent offers what it has found damaged"
    ONE_NONCE = "the ranks of all starts use the same keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much there is, and how much may happen in one history.

    Steps 2, 4, … are `committed`. `own_step`: the step of a whole checkpoint of a job in one pod that is not uploaded.
    `lingering`: a start that goes wrong may go on beside the next one.
    """

    pods: int = 2
    ranks_per_pod: int = 1
    committed: int = 2
    own_step: int | None = None
    starts: int = 1
    lingering: bool = False
    late_commits: int = 0
    prunes: int = 0
    damages: int = 0
    agent_kills: int = 0
    notices: int = 0
    kills: int = 0


class Agent(NamedTuple):
    """`known`: the saves that it has listed. `failures`: those that it has found damaged. `listings`: of one start."""

    known: frozenset[str] = frozenset()
    failures: frozenset[str] = frozenset()
    listings: int = 0


class Rank(NamedTuple):
    answers: tuple[Answer, ...]
    next: Question | End


class Start(NamedTuple):
    """`began_with`: what was there then. `damaged`: what a pod has found damaged. `told`: the pods told to end."""

    number: int
    ranks: tuple[Rank, ...]
    agents: tuple[Agent, ...]
    began_with: frozenset[Save]
    damaged: frozenset[tuple[int, str]] = frozenset()
    told: frozenset[int] = frozenset()
    is_disturbed: bool = False


class Happened(NamedTuple):
    """How often, by the names of the bounds."""

    starts: int = 1
    late_commits: int = 0
    prunes: int = 0
    damages: int = 0
    agent_kills: int = 0
    notices: int = 0
    kills: int = 0


class State(NamedTuple):
    """`keys`: what is in the ranks' store."""

    committed: frozenset[Save]
    keys: frozenset[tuple[str, str]]
    starts: tuple[Start, ...]
    happened: Happened = Happened()


def listed(committed: frozenset[Save], failures: Iterable[str]) -> tuple[Answer, frozenset[str]]:
    """Return what an agent that has found these damaged answers, and what it knows then."""
    listing = RestorableListing(cast(ReadyStore, _Destination(committed)))
    listing.failures = dict.fromkeys(failures, "damaged")
    try:
        found = _at_once(listing.read())
    except StoreError:
        return Refused(ErrorKind.CHECKPOINT_DAMAGED), frozenset()
    return tuple((one.step, one.save) for one in found), frozenset(listing.known)


class _Destination:
    """A store that lists the markers of what is committed."""

    def __init__(self, committed: frozenset[Save]) -> None:
        self._committed = committed

    async def get(self) -> Any:
        return self

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        for key in sorted(f"{step_prefix(step)}{save}.json" for step, save in self._committed):
            yield ObjectInfo(key=key, size_bytes=1, modified_at=0.0, version="")


def _at_once(listing: Coroutine[Any, Any, Sequence[CommittedSave]]) -> Sequence[CommittedSave]:
    """Return the result of a coroutine that waits for nothing."""
    try:
        listing.send(None)
    except StopIteration as ended:
        return cast(Sequence[CommittedSave], ended.value)
    raise AssertionError("it waits")


def is_over(start: Start) -> bool:
    return all(isinstance(rank.next, End) for rank in start.ranks)


def save_of(step: int) -> Save:
    return step, f"0123abcd-c{step:06d}"


def record_of(step: int) -> Record:
    _, save = save_of(step)
    return Record(
        name=f"checkpoint-{step}", step=step, save=save, kind=Kind.PERIODIC, world_size=1, saved_at=0.0, files=()
    )


def with_start(state: State, index: int, start: Start) -> State:
    return state._replace(starts=put(state.starts, index, start))


def put(values: tuple[_Value, ...], index: int, value: _Value) -> tuple[_Value, ...]:
    return (*values[:index], value, *values[index + 1 :])


def once_more(state: State, what: str) -> State:
    return state._replace(happened=state.happened._replace(**{what: getattr(state.happened, what) + 1}))


def disturbed(state: State) -> State:
    return state._replace(starts=tuple(start._replace(is_disturbed=True) for start in state.starts))
