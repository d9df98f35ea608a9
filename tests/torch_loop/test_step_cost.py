"""What a training step pays when nothing is asked."""

import pytest

pytest.importorskip("torch")

from benchmarks import step_cost

BOUND = 400
"""In calls of a function that does nothing, each some 0.02 µs: a machine that others load may not decide.

The benchmark has the figure, which is below 2 µs.
"""


def test_a_step_without_a_save_costs_microseconds() -> None:
    before = step_cost._least(lambda step: step, 10)
    costs = step_cost.measure(batches=10)
    nothing = max(before, step_cost._least(lambda step: step, 10))
    assert len(costs) == 4
    assert {name: seconds for name, seconds in costs.items() if seconds > BOUND * nothing} == {}
