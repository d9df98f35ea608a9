"""The transition table: closed, reachable, and the same as the diagram people read."""

from pathlib import Path

import pytest

from keepstep_agent.core.agent.lifecycle import (
    DURABLE_PHASES,
    ENDED_PHASES,
    FINAL_PHASES,
    TRANSITIONS,
    Trigger,
    advance,
    mermaid,
)
from keepstep_agent.core.model import Phase

_PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"


def test_every_phase_and_every_row_can_be_reached_from_the_announcement() -> None:
    reached = {Phase.ANNOUNCED}
    for _ in Phase:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert reached == set(Phase)
    assert {before for before, _ in TRANSITIONS} <= reached


def test_nothing_leaves_a_final_phase() -> None:
    assert {before for before, _ in TRANSITIONS}.isdisjoint(FINAL_PHASES)


def test_from_every_phase_a_final_one_can_be_reached() -> None:
    ending = set(FINAL_PHASES)
    for _ in Phase:
        ending |= {before for (before, _), after in TRANSITIONS.items() if after in ending}
    assert ending == set(Phase)


def test_what_is_durable_stays_durable() -> None:
    for (before, trigger), after in TRANSITIONS.items():
        assert before not in DURABLE_PHASES or after in DURABLE_PHASES, (before, trigger)


def test_what_has_ended_does_not_begin_again() -> None:
    for (before, trigger), after in TRANSITIONS.items():
        assert before not in ENDED_PHASES or after in ENDED_PHASES, (before, trigger)


def test_every_trigger_moves_something() -> None:
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)


def test_a_move_without_a_row_is_a_bug() -> None:
    with pytest.raises(KeyError):
        advance(Phase.RELEASED, Trigger.TRANSFER_BEGAN)


def test_the_diagram_in_the_docs_is_the_table() -> None:
    page = _PAGE.read_text()
    diagram = page.split("<!-- diagram -->\n```mermaid\n")[1].split("```\n<!-- /diagram -->")[0]
    assert diagram == mermaid(), (
        "paste the output of `python -m keepstep_agent.core.agent.lifecycle` between the markers"
    )
