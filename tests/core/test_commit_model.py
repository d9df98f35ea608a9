"""The commit protocol, every state of it; and that the model would notice if one of its ideas were missing."""

import pytest
from tests.model.commit_model import Bounds, Variant, explore
from tests.model.search import Result

_FAST = Bounds(crashes=1, late_requests=1, lost_objects=1)


def _report(variant: Variant, bounds: Bounds, result: Result) -> None:
    verdict = "".join(f"\n  {label}" for label in (result.violation, *result.history)) or " no violation"
    print(f"{variant.value}, {bounds}: {result.states} states,{verdict}")


@pytest.mark.parametrize(
    "bounds",
    [
        _FAST,
        Bounds(crashes=2, late_requests=0),
        pytest.param(Bounds(crashes=2, late_requests=1), marks=pytest.mark.nightly),
        pytest.param(Bounds(crashes=1, late_requests=2, lost_objects=1), marks=pytest.mark.nightly),
        Bounds(agents=3, crashes=1, late_requests=0),
    ],
    ids=str,
)
def test_no_crash_late_request_or_loss_within_bounds_breaks_the_commit_protocol(bounds: Bounds) -> None:
    result = explore(Variant.GOOD, bounds)
    _report(Variant.GOOD, bounds, result)
    assert not result.violation, result.history
    assert result.states > 1_000


@pytest.mark.parametrize(
    ("variant", "violation"),
    [
        (Variant.MARKER_FIRST, "not whole"),
        (Variant.REUSED_KEYS, "mixes two incarnations"),
        (Variant.COUNT_ANY_SAVE, "not whole"),
        (Variant.COUNT_AGENTS, "not whole"),
        (Variant.SAME_NAME_GROWS, "not whole"),
        (Variant.PRUNE_MARKER_LAST, "not whole"),
        (Variant.PRUNE_UNVALIDATED, "no checkpoint can be restored"),
        (Variant.ORPHANS_AT_ONCE, "not whole"),
        (Variant.ORPHANS_OF_THE_DEAD, "not whole"),
    ],
    ids=[variant.name.lower() for variant in Variant if variant is not Variant.GOOD],
)
def test_the_model_finds_what_goes_wrong_without_one_of_the_ideas(variant: Variant, violation: str) -> None:
    result = explore(variant, _FAST)
    _report(variant, _FAST, result)
    assert violation in result.violation
    assert result.history
