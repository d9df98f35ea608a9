"""How pods agree on what they resume from, every state of it; and that the model would notice a missing idea."""

import pytest
from tests.model.resume_model import Bounds, Variant, explore


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(),
        Bounds(starts=3, late_commits=2, evictions=2),
        Bounds(starts=3, late_commits=0, replacements=2, incomplete=True),
        Bounds(late_commits=0, replacements=1, lingering=True),
    ],
    ids=str,
)
def test_all_pods_of_a_start_resume_from_one_checkpoint_that_is_not_older_than_the_newest_was(bounds: Bounds) -> None:
    result = explore(Variant.GOOD, bounds)
    assert not result.violation, "\n".join((result.violation, *result.history))
    assert result.states > 300


@pytest.mark.parametrize(
    ("variant", "violation"),
    [
        (Variant.ONE_PIN, "older than what was committed"),
        (Variant.PLACE_FIRST, "the pods of start"),
        (Variant.NO_PLACES, "older than what was committed"),
        (Variant.PLACES_ALONE, "older than what was committed"),
        (Variant.ANY_COMMIT, "the pods of start"),
        (Variant.ANYBODY, "the pods of start"),
    ],
    ids=[variant.name.lower() for variant in Variant if variant is not Variant.GOOD],
)
def test_the_model_finds_what_goes_wrong_without_one_of_the_ideas(variant: Variant, violation: str) -> None:
    late_commits = 0 if variant is Variant.PLACES_ALONE else 1
    result = explore(variant, Bounds(starts=3, replacements=1, late_commits=late_commits))
    assert violation in result.violation
    assert result.history


@pytest.mark.parametrize("bounds", [Bounds(incomplete=True), Bounds(lingering=True), Bounds(replacements=1)], ids=str)
def test_an_earlier_start_that_was_not_complete_and_a_late_commit_are_the_known_limit(bounds: Bounds) -> None:
    result = explore(Variant.GOOD, bounds)
    assert "resume from" in result.violation
    assert any("commits late" in label for label in result.history)
