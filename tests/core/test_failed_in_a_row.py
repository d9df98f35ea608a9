"""Which starts count as failing with what they resumed from: only the last ones, in a row, of this node."""

import pytest
from tests.core.noted_lives import NotedLife

from keepstep_agent.core.policies.restore_choice import failed_in_a_row
from keepstep_agent.core.stored.ledger import AgentEnded, AgentLife, Resumed


def life(number: int, save: str = "old", *, early: bool = True, ended: bool = True, saved: str = "") -> NotedLife:
    noted = NotedLife(f"agent-{number}")
    noted.start(100.0 * number, resumed=Resumed.SAVE, save=save)
    if saved:
        noted.save(None, 100.0 * number + 5, 1, kind="snapshot")
    if ended:
        noted.add(AgentEnded, 100.0 * number + 10, code=0, program_failed=True, failed_early=early)
    return noted


def lives(*noted: NotedLife) -> list[AgentLife]:
    return [one.life for one in noted]


def test_starts_that_failed_early_count_from_the_last_one_back() -> None:
    assert failed_in_a_row(lives(life(2), life(1, early=False), life(4), life(3)), 0) == (3, "old", True)


@pytest.mark.parametrize(
    "between", [life(2, early=False), life(2, ended=False), life(2, "other"), life(2, ""), life(2, saved="new")]
)
def test_any_other_start_ends_the_row(between: NotedLife) -> None:
    assert failed_in_a_row(lives(life(1), between, life(3)), 0) == (1, "old", True)


def test_a_start_without_a_save_is_no_row() -> None:
    assert failed_in_a_row(lives(life(1), life(2), life(3, "")), 0) == (0, "", True)


def test_more_may_be_known_of_older_starts() -> None:
    cut = life(1)
    del cut.entries[0]
    assert failed_in_a_row(lives(life(2), cut), 0) == (1, "old", False)
    assert failed_in_a_row(lives(life(2)), 0) == (1, "old", False)


def test_other_nodes_do_not_count() -> None:
    assert failed_in_a_row(lives(life(1), life(2)), 1) == (0, "", False)
