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
    found = failed_in_a_row(lives(life(2), life(1, early=False), life(4), life(3)), 0, ())
    assert found == (3, frozenset({"old"}), True)


def test_a_snapshot_of_a_failed_start_is_one_of_the_row() -> None:
    found = failed_in_a_row(lives(life(1, saved="yes"), life(2, "save-1"), life(3, "save-1")), 0, ())
    assert found == (3, frozenset({"old", "save-1"}), False)


@pytest.mark.parametrize("between", [life(2, early=False), life(2, ended=False)])
def test_a_start_that_ended_otherwise_or_never_ends_the_row(between: NotedLife) -> None:
    assert failed_in_a_row(lives(life(1), between, life(3)), 0, ()) == (1, frozenset({"old"}), True)


def test_starts_with_what_was_passed_over_do_not_count_for_the_next_one() -> None:
    row = lives(life(1, "new"), life(2, "new"), life(3, "new"), life(4, "old"))
    assert failed_in_a_row(row, 0, {"new"}) == (1, frozenset({"old"}), True)


def test_other_nodes_do_not_count() -> None:
    assert failed_in_a_row(lives(life(1), life(2)), 1, ()) == (0, frozenset(), False)
