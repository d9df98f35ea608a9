"""An exhaustive explicit-state model of how ranks choose what to resume from, around the client's real code.

The world is a model: what is committed, the pods' agents, the ranks' store, and what may happen to them. The ranks are
not: they run `keepstep.resuming` and `keepstep.ranks.coordinator`, and an agent lists with `RestorableListing`. A rank
does nothing but ask its store and its agent, so all that it knows is the answers that it has got. To take one more step
it runs again from its start, gets the same answers, and the first question without an answer is what it asks next.

The world: a job begins to resume. Within bounds a save of an earlier start is committed late, checkpoints are pruned,
a pod finds one damaged, an agent is killed, a pod is told to end and its agent does not answer from then on, or a pod
is killed. All pods may be started again, and those of the start before may go on beside them. A job in one pod may have
a whole checkpoint that is not uploaded.

What no state may show:
- ranks of one start that begin with different checkpoints, or one that begins while another one has failed,
- a start that begins with what one of its pods found damaged, or with an older checkpoint than the newest that was
  there before it, still is, and was not found damaged; or with step 0 though a pod has named a checkpoint,
- a start that fails though nobody disturbs it and there is a checkpoint that nobody found damaged,
- ranks that wait for one that has left by itself (only for one that was killed they may wait until their patience
  ends), or that choose again though nothing was found damaged.

A known limit is not looked for: pods offer the newest `restorable._NEWEST` checkpoints. If one pod finds as many
damaged, they have none in common, and the start fails.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from tests.model.choice_world import (
    Agent,
    Bounds,
    Rank,
    Start,
    State,
    Variant,
    disturbed,
    is_over,
    listed,
    once_more,
    put,
    record_of,
    save_of,
    with_start,
)
from tests.model.replayed_rank import Answer, Asked, End, How, Question, Refused, ReplayedRank, Save, Word, replaying
from tests.model.search import Result, search

from keepstep import resuming
from keepstep.errors import ErrorKind
from keepstep.ranks.coordinator import StoreCoordinator
from keepstep.ranks.rank_store import Ranks


class Model:
    """All states of one variant within bounds."""

    def __init__(self, variant: Variant, bounds: Bounds) -> None:
        self._variant = variant
        self._bounds = bounds
        self._own = () if bounds.own_step is None else (record_of(bounds.own_step),)
        world_size = bounds.pods * bounds.ranks_per_pod
        pods = [
            range(world_size)[first : first + bounds.ranks_per_pod]
            for first in range(0, world_size, bounds.ranks_per_pod)
        ]
        self._ranks = [
            ReplayedRank(ranks=Ranks(rank=rank, world_size=world_size, pod=tuple(pod)), own=self._own)
            for pod in pods
            for rank in pod
        ]
        self._nexts: dict[tuple[int, tuple[Answer, ...]], Question | End] = {}

    def explore(self) -> Result:
        committed = frozenset(save_of(2 * number) for number in range(1, self._bounds.committed + 1))
        with replaying(), _mutation(self._variant):
            return search(State(committed, frozenset(), (self._start(1, committed),)), self._look)

    def _look(self, state: State) -> tuple[str, list[tuple[str, State]]]:
        steps = [list(self._ranks_move(state, index)) for index in range(len(state.starts))]
        moves = [*(step for of_one in steps for step in of_one), *self._happenings(state)]
        return self._violation(state, steps), moves

    def _start(self, number: int, committed: frozenset[Save]) -> Start:
        return Start(
            number=number,
            ranks=tuple(Rank((), self._next(rank, ())) for rank in range(len(self._ranks))),
            agents=(Agent(),) * self._bounds.pods,
            began_with=committed | {(record.step, record.save) for record in self._own},
        )

    def _next(self, rank: int, answers: tuple[Answer, ...]) -> Question | End:
        key = rank, answers
        if key not in self._nexts:
            self._nexts[key] = self._ranks[rank].after(answers)
        return self._nexts[key]

    def _pod(self, rank: int) -> int:
        return rank // self._bounds.ranks_per_pod

    # What the ranks do.

    def _ranks_move(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        start = state.starts[index]
        for rank, one in enumerate(start.ranks):
            if isinstance(one.next, End):
                continue
            for answer, after in self._answers(state, index, rank, one.next):
                label = (
                    f"rank {rank} of start {start.number} {one.next.asked} {one.next.key or one.next.value}: {answer}"
                )
                yield label, self._settled(self._answered(after, index, rank, answer), index)

    def _answered(self, state: State, index: int, rank: int, answer: Answer) -> State:
        start = state.starts[index]
        answers = (*start.ranks[rank].answers, answer)
        following = self._next(rank, answers)
        # What a rank was answered does not matter any more when it has ended.
        replaced = Rank(() if isinstance(following, End) else answers, following)
        return with_start(state, index, start._replace(ranks=put(start.ranks, rank, replaced)))

    def _settled(self, state: State, index: int) -> State:
        """Let all ranks of a start do at once what makes no difference to any other rank, whenever it happens."""
        for rank in range(len(self._ranks)):
            while True:
                question = state.starts[index].ranks[rank].next
                if isinstance(question, End) or not self._is_quiet(state, state.starts[index], question):
                    break
                ((answer, state),) = self._answers(state, index, rank, question)
                state = self._answered(state, index, rank, answer)
        return state

    def _is_quiet(self, state: State, start: Start, question: Question) -> bool:
        key = question.key
        match question.asked:
            case Asked.FORGET:
                return True
            case Asked.COUNT:
                return key.endswith("/read")
            case Asked.PUBLISH | Asked.READ:
                return key.startswith("at/") or key.endswith("/progress")
            case Asked.WAIT_FOR | Asked.SET_IF_ABSENT:
                # An answer stays until all have read it.
                return self._key(start, key) in dict(state.keys)
            case _:
                return False

    def _key(self, start: Start, key: str) -> str:
        return key if self._variant is Variant.ONE_NONCE else f"{start.number}/{key}"

    def _answers(self, state: State, index: int, rank: int, question: Question) -> Iterator[tuple[Answer, State]]:
        start, pod = state.starts[index], self._pod(rank)
        match question.asked:
            case Asked.TOLD_TO_END:
                yield pod in start.told and self._variant is not Variant.DEAF, state
            case Asked.NEWEST:
                if pod not in start.told:
                    yield self._newest(state, index, pod)
                elif not question.again:
                    yield Word.NOT_YET, state
            case Asked.FETCH if pod in start.told:
                if not question.again:
                    yield Word.NOT_YET, state
                    # The agent ends its fetches when it hears that the pod ends.
                    yield Refused(ErrorKind.CHECKPOINT_DAMAGED), state
            case Asked.FETCH:
                if not question.again and self._is_overruled(state, start):
                    yield Word.NOT_YET, state
                yield from self._fetched(state, index, pod, question.value)
            case _:
                yield from self._stored(state, start, question)

    def _is_overruled(self, state: State, start: Start) -> bool:
        return any(key.startswith(self._key(start, "")) and key.endswith("/here/answer") for key, _ in state.keys)

    def _newest(self, state: State, index: int, pod: int) -> tuple[Answer, State]:
        start = state.starts[index]
        agent = start.agents[pod]
        failures = frozenset[str]() if self._variant is Variant.OFFERED_AGAIN else agent.failures
        answer, known = listed(state.committed, failures)
        agent = agent._replace(known=known, listings=agent.listings + 1)
        return answer, with_start(state, index, start._replace(agents=put(start.agents, pod, agent)))

    def _fetched(self, state: State, index: int, pod: int, save: str) -> Iterator[tuple[Answer, State]]:
        start = state.starts[index]
        agent = start.agents[pod]
        is_there = any(one == save for _, one in state.committed)
        is_damaged = (pod, save) in start.damaged
        if is_there and not is_damaged:
            yield True, state
        if not is_there or is_damaged or state.happened.damages < self._bounds.damages:
            # An agent that does not know a save, and does not find it either, has nothing to remember.
            failures = agent.failures | {save} if is_there or save in agent.known else agent.failures
            found = start._replace(
                agents=put(start.agents, pod, agent._replace(failures=failures)),
                damaged=start.damaged | {(pod, save)},
            )
            after = with_start(state, index, found)
            is_new = is_there and not is_damaged
            yield Refused(ErrorKind.CHECKPOINT_DAMAGED), once_more(after, "damages") if is_new else after

    def _stored(self, state: State, start: Start, question: Question) -> Iterator[tuple[Answer, State]]:
        keys, key = dict(state.keys), self._key(start, question.key)
        answer: Answer = None
        match question.asked:
            case Asked.PUBLISH:
                keys[key] = question.value
            case Asked.SET_IF_ABSENT:
                answer = keys.setdefault(key, question.value)
            case Asked.READ:
                answer = keys.get(key)
            case Asked.COUNT:
                answer = int(keys.get(key, "0")) + 1
                keys[key] = str(answer)
            case Asked.FORGET:
                keys.pop(key, None)
            case Asked.RANKS_WITHOUT:
                found = [keys.get(f"{key}/{rank}") for rank in range(len(self._ranks))]
                answer = tuple(
                    rank for rank, value in enumerate(found) if value is None or question.value not in ("", value)
                )
            case Asked.WAIT_FOR:
                if key not in keys:
                    yield from self._waited(state, start)
                    return
                answer = keys[key]
            case Asked.GATHER:
                named = [keys.get(f"{key}/{rank}") for rank in range(len(self._ranks))]
                if None in named:
                    if f"{key.removesuffix('/has')}/answer" in keys:
                        yield Word.NOT_YET, state
                    yield from self._waited(state, start)
                    return
                answer = tuple(value for value in named if value is not None)
                if self._variant is Variant.NAMED_BY_ANY and key.endswith("/has"):
                    union = [save for value in answer for save in json.loads(value) or []]
                    answer = (json.dumps(union),) * len(answer)
        yield answer, state._replace(keys=frozenset(keys.items()))

    def _waited(self, state: State, start: Start) -> Iterator[tuple[Answer, State]]:
        """A rank's patience ends only if it waits for one that was killed."""
        if any(isinstance(rank.next, End) and rank.next.how is How.KILLED for rank in start.ranks):
            yield Word.GIVEN_UP, state

    # What else happens.

    def _happenings(self, state: State) -> Iterator[tuple[str, State]]:
        happened, bounds, newest = state.happened, self._bounds, max(state.committed, default=(0, ""))
        if happened.late_commits < bounds.late_commits:
            late = save_of(max(newest[0], bounds.own_step or 0) + 1)
            for save in {late, *((record.step, record.save) for record in self._own)} - state.committed:
                after = disturbed(state._replace(committed=state.committed | {save}))
                yield f"step {save[0]} is committed late", once_more(after, "late_commits")
        found_damaged = {save for start in state.starts for _, save in start.damaged}
        oldest = min(state.committed, default=newest)
        if happened.prunes < bounds.prunes and any(
            one > oldest and one[1] not in found_damaged for one in state.committed
        ):
            after = disturbed(state._replace(committed=state.committed - {oldest}))
            yield f"step {oldest[0]} is pruned", once_more(after, "prunes")
        for index, start in enumerate(state.starts):
            yield from self._trouble(state, index, start)
        yield from self._starts_again(state)

    def _trouble(self, state: State, index: int, start: Start) -> Iterator[tuple[str, State]]:
        happened, bounds = state.happened, self._bounds
        for pod in range(bounds.pods):
            of_pod = [rank for rank in range(len(self._ranks)) if self._pod(rank) == pod]
            if all(isinstance(start.ranks[rank].next, End) for rank in of_pod):
                continue
            name = f"pod {pod} of start {start.number}"
            if happened.agent_kills < bounds.agent_kills:
                agents = put(start.agents, pod, Agent(listings=start.agents[pod].listings))
                after = with_start(state, index, start._replace(agents=agents))
                yield f"the agent of {name} is killed", once_more(after, "agent_kills")
            if happened.notices < bounds.notices and pod not in start.told:
                told = start._replace(told=start.told | {pod}, is_disturbed=True)
                yield f"{name} is told to end", once_more(with_start(state, index, told), "notices")
            if happened.kills < bounds.kills:
                killed = start._replace(
                    ranks=tuple(
                        Rank((), End(How.KILLED)) if rank in of_pod and not isinstance(one.next, End) else one
                        for rank, one in enumerate(start.ranks)
                    ),
                    is_disturbed=True,
                )
                yield f"{name} is killed", once_more(with_start(state, index, killed), "kills")

    def _starts_again(self, state: State) -> Iterator[tuple[str, State]]:
        *_, last = state.starts
        has_trouble = bool(last.told) or any(
            isinstance(rank.next, End) and rank.next.how is not How.BEGINS for rank in last.ranks
        )
        if state.happened.starts < self._bounds.starts and (has_trouble or is_over(last)):
            kept = (last,) if self._bounds.lingering and not is_over(last) else ()
            keys = state.keys if kept or self._variant is Variant.ONE_NONCE else frozenset()
            begun = self._start(last.number + 1, state.committed)
            yield "all pods are started again", once_more(state._replace(keys=keys, starts=(*kept, begun)), "starts")

    # What may not be.

    def _violation(self, state: State, steps: list[list[tuple[str, State]]]) -> str:
        for start, moves in zip(state.starts, steps, strict=True):
            if violation := self._violation_of(state, start):
                return f"start {start.number} {violation}"
            if not moves and not is_over(start):
                return f"start {start.number} waits for ever"
        return ""

    def _violation_of(self, state: State, start: Start) -> str:
        ends = [rank.next for rank in start.ranks if isinstance(rank.next, End)]
        begun = {end.save for end in ends if end.how is How.BEGINS}
        failed = [end.how for end in ends if end.how in (How.FAILS, How.LEAVES)]
        if len(begun) > 1:
            return f"begins with {begun}"
        if begun and failed:
            return f"begins on some ranks, and {failed[0]} on others"
        damaged = {save for _, save in start.damaged}
        there = state.committed | {(record.step, record.save) for record in self._own}
        newest = max((one for one in start.began_with & there if one[1] not in damaged), default=None)
        for save in begun:
            if save is None and any(agent.known for agent in start.agents):
                return "begins with step 0, and a pod has named a checkpoint"
            if save is not None and save[1] in damaged:
                return f"begins with step {save[0]}, which is damaged"
            if newest is not None and (save is None or save < newest):
                return f"begins with {save}, older than {newest}"
        if newest is not None and failed and not start.is_disturbed:
            return f"fails though it could have step {newest[0]}"
        # An agent that was killed finds the same once more, and one that hears that its pod ends gives up once.
        most = 1 + len(start.damaged) * (1 + state.happened.agent_kills) + len(start.told)
        if any(agent.listings > most for agent in start.agents):
            return "chooses again though nothing more was found damaged"
        return ""


def explore(variant: Variant, bounds: Bounds) -> Result:
    """Every state that `variant` can reach within `bounds`, or the shortest way to a violation."""
    return Model(variant, bounds).explore()


def _mutation(variant: Variant) -> AbstractContextManager[object]:
    """While open, the client lacks an idea."""
    agree = StoreCoordinator.agree

    def each_alone(ranks: StoreCoordinator, key: str, candidates: Sequence[Save] | None, *, progress: str = "") -> Any:
        return max(candidates or (), default=None)

    def alone(ranks: StoreCoordinator, key: str, ok: bool = True, **options: Any) -> bool | None:
        return ok if key.endswith("/here") else agree(ranks, key, ok, **options)

    def without_a_no(ranks: StoreCoordinator, key: str, ok: bool = True, **options: Any) -> bool | None:
        return ok and agree(ranks, key, ok, **options)

    match variant:
        case Variant.EACH_ITS_NEWEST:
            return patch.object(StoreCoordinator, "choose_newest", each_alone)
        case Variant.NOT_TOGETHER:
            return patch.object(StoreCoordinator, "agree", alone)
        case Variant.KEPT_TO_ITSELF:
            return patch.object(StoreCoordinator, "agree", without_a_no)
        case Variant.NOT_WITHDRAWN:
            return patch.object(StoreCoordinator, "withdraw", lambda ranks, key: None)
        case Variant.AFRESH_ALONE:
            return patch.object(resuming, "_require_all_afresh", lambda session, number, *, has_none: None)
        case _:
            return nullcontext()
