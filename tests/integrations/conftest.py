"""What the tests of the integrations share."""

import pytest
from tests.client.conftest import WAIT_SECONDS, set_deadlines


@pytest.fixture(autouse=True)
def _an_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that answers is never away, however slow the machine."""
    set_deadlines(monkeypatch, WAIT_SECONDS, WAIT_SECONDS)
