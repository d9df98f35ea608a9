"""How snapshots share objects, every state of it; and that the model would notice if one of its ideas were missing."""

import pytest
from tests.model.sharing_model import Variant, explore


def test_no_crash_or_prune_takes_an_object_from_a_committed_snapshot() -> None:
    result = explore(Variant.GOOD, crashes=2)
    assert not result.violation, result.history
    assert result.states > 100_000


@pytest.mark.parametrize(
    "variant", [variant for variant in Variant if variant is not Variant.GOOD], ids=lambda one: one.name
)
def test_the_model_of_sharing_finds_what_goes_wrong_without_one_of_its_ideas(variant: Variant) -> None:
    result = explore(variant, crashes=1)
    assert "is committed, and" in result.violation
    assert result.history
