"""Walks every state that a model can reach, breadth first, so that a counter-example is a shortest one."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

_State = TypeVar("_State", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`violation` is empty when every reachable state is in order; else `history` leads to it."""

    states: int
    violation: str = ""
    history: tuple[str, ...] = ()


def search(first: _State, look: Callable[[_State], tuple[str, Iterable[tuple[str, _State]]]]) -> Result:
    """Walk until a state is not in order, or to the end.

    `look` returns what is wrong with a state, if anything, and what can happen next: a label and the state after it.
    """
    came_from: dict[_State, tuple[str, _State] | None] = {first: None}
    waiting = deque([first])
    states = 0
    while waiting:
        state = waiting.popleft()
        states += 1
        violation, moves = look(state)
        if violation:
            labels: list[str] = []
            step = came_from[state]
            while step:
                labels.append(step[0])
                step = came_from[step[1]]
            return Result(states=states, violation=violation, history=tuple(reversed(labels)))
        for label, following in moves:
            if following not in came_from:
                came_from[following] = (label, state)
                waiting.append(following)
    return Result(states=states)
