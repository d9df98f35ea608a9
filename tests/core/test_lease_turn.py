"""Who may write, as replicas see one Lease by their own clocks."""

import pytest

from mooring_agent.core.lease_turn import LeaseRecord, Sighting, Turn, turn

MINE = LeaseRecord(holder="me", renewed="1", lasts_seconds=30)
THEIRS = LeaseRecord(holder="they", renewed="1", lasts_seconds=30)


@pytest.mark.parametrize(
    ("record", "before", "expected"),
    [
        pytest.param(LeaseRecord(), None, Turn.TAKE, id="one that nobody holds is taken"),
        pytest.param(MINE, Sighting(record=MINE, at=0), Turn.RENEW, id="one's own is renewed, however old"),
        pytest.param(THEIRS, None, Turn.WAIT, id="one seen for the first time may be new"),
        pytest.param(THEIRS, Sighting(record=THEIRS, at=71), Turn.WAIT, id="one that has not run out is left"),
        pytest.param(THEIRS, Sighting(record=THEIRS, at=70), Turn.TAKE, id="one that nobody renews is taken"),
        pytest.param(
            LeaseRecord(holder="they", renewed="2", lasts_seconds=30),
            Sighting(record=THEIRS, at=0),
            Turn.WAIT,
            id="one that was renewed meanwhile is left",
        ),
    ],
)
def test_whose_turn_it_is(record: LeaseRecord, before: Sighting | None, expected: Turn) -> None:
    assert turn(record, before, "me", 100.0)[0] is expected


def test_a_holder_that_renews_in_time_keeps_it_whatever_its_clock_says() -> None:
    seen = None
    for look in range(10):
        record = LeaseRecord(holder="they", renewed=f"1970-01-01T00:00:{look:02}", lasts_seconds=30)
        what, seen = turn(record, seen, "me", 1000.0 + look * 29)
        assert what is Turn.WAIT
