"""How cheap a run is to preempt, as Kueue's boost of its priority: cheap just after a commit, dear before the next.

The boost is never above 0: a run gets no priority that its class does not give it.
"""

from typing import Final

LEVELS: Final = 4
"""Few, because each change is a patch of the Workload that Kueue looks at."""


def priority_boost(depth: int, *, uncommitted_seconds: float, usual_seconds: float) -> int:
    """Return the boost: `-depth` just after a commit, 0 once as much work is uncommitted as usual before a commit.

    `usual_seconds`: how old the newest committed checkpoint usually gets.
    """
    share = min(1.0, max(0.0, uncommitted_seconds) / usual_seconds)
    return -(depth * (LEVELS - int(LEVELS * share)) // LEVELS)
