"""How ranks choose what to resume from, every state of it; and that the model would notice a missing idea."""

import pytest
from tests.model.choice_model import explore
from tests.model.choice_world import Bounds, Variant

# The largest searches take a minute of a processor that they have to themselves.
pytestmark = pytest.mark.timeout(1200)

_SUSPENDED = Bounds(committed=1, late_commits=1, notices=1, starts=2, lingering=True)
_DISTURBED = Bounds(late_commits=1, damages=1, kills=1, starts=2)


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(late_commits=1, prunes=1),
        Bounds(committed=0, late_commits=2, prunes=1),
        Bounds(committed=1, damages=2, agent_kills=1),
        Bounds(damages=1, notices=1, kills=1),
        Bounds(pods=3, damages=1),
        Bounds(pods=1, ranks_per_pod=2, own_step=1, late_commits=1, damages=2, agent_kills=1),
        Bounds(pods=1, ranks_per_pod=2, own_step=5, late_commits=1, prunes=1, damages=1, notices=1),
        _DISTURBED,
        pytest.param(Bounds(pods=3, committed=1, late_commits=1, notices=1), marks=pytest.mark.nightly),
        pytest.param(Bounds(ranks_per_pod=2, committed=1, damages=1), marks=pytest.mark.nightly),
        pytest.param(_SUSPENDED, marks=pytest.mark.nightly),
        pytest.param(Bounds(late_commits=1, prunes=1, damages=1), marks=pytest.mark.nightly),
        pytest.param(Bounds(prunes=1, damages=1, agent_kills=1, notices=1), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_all_ranks_begin_with_the_newest_that_all_can_have_or_none_begins(bounds: Bounds) -> None:
    result = explore(Variant.GOOD, bounds)
    assert not result.violation, "\n".join((result.violation, *result.history))
    assert result.states > 100


@pytest.mark.parametrize(
    ("variant", "bounds", "violation"),
    [
        (Variant.EACH_ITS_NEWEST, Bounds(late_commits=1), "begins with {"),
        (Variant.NAMED_BY_ANY, Bounds(damages=1), "chooses again"),
        (Variant.NOT_TOGETHER, Bounds(damages=1), "damaged"),
        (Variant.KEPT_TO_ITSELF, Bounds(damages=1), "waits for ever"),
        (Variant.NOT_WITHDRAWN, Bounds(notices=1), "waits for ever"),
        (Variant.DEAF, Bounds(notices=1), "waits for ever"),
        (Variant.AFRESH_ALONE, Bounds(committed=0, late_commits=1), "step 0"),
        (Variant.OFFERED_AGAIN, Bounds(damages=1), "chooses again"),
        (Variant.ONE_NONCE, _DISTURBED, "start 2"),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Variant) else "",
)
def test_the_model_of_the_choice_finds_what_goes_wrong_without_one_of_the_ideas(
    variant: Variant, bounds: Bounds, violation: str
) -> None:
    result = explore(variant, bounds)
    assert violation in result.violation
    assert result.history
