"""Where a timeline puts what has happened: in order, within its length, and nothing too narrow to see."""

from tests.core.noted_lives import NotedLife, killed_and_resumed

from keepstep_agent.console.timeline import WIDTH, Timeline, timeline_of
from keepstep_agent.core.policies.run_overview import overview_of


def timeline(*lives: NotedLife, running_at: float | None = None) -> Timeline | None:
    _, details = overview_of([], None, [one.life for one in lives])
    return timeline_of(details, running_at=running_at)


def marks(found: Timeline | None, name: str) -> list[tuple[str, float, float]]:
    assert found is not None
    return [(mark.look, mark.x, mark.width) for lane in found.lanes if lane.name == name for mark in lane.marks]


def test_starts_saves_commits_and_notices_are_where_they_happened() -> None:
    found = timeline(*killed_and_resumed())
    assert found is not None
    assert (found.since, found.until) == (1000, 2000)
    starts = marks(found, "Starts")
    assert [one for one in starts if one[0] == "training"] == [("training", 30, 270), ("training", 380, 530)]
    assert [one for one in starts if one[0] == "restore"] == [("restore", 0, 10), ("restore", 340, 25)]
    assert sorted(marks(found, "Saves"), key=lambda one: one[1]) == [
        ("save", 130, 2),
        ("save", 235, 2),
        ("jit", 900, 2),
    ]
    assert sorted(x for _, x, _ in marks(found, "Commits")) == [140, 250, 906]
    assert marks(found, "Notices") == [("notice", 900, 2)]


def test_a_run_that_still_runs_is_drawn_until_now() -> None:
    life = NotedLife("agent-1")
    life.start(1000)
    life.ranks(1000, 1)
    life.save(1400, 1500, 10)
    found = timeline(life, running_at=2000.0)
    assert found is not None
    assert found.until == 2000
    assert ("training", 0, WIDTH) in marks(found, "Starts")


def test_nothing_that_happened_has_no_timeline_and_one_moment_has_one() -> None:
    assert timeline() is None
    life = NotedLife("agent-1")
    life.start(1000)
    for look, x, width in marks(timeline(life), "Starts"):
        assert (x >= 0, x + width <= WIDTH, width > 0) == (True, True, True), look


def test_every_mark_stays_within_the_timeline_whatever_the_clocks_said() -> None:
    life = NotedLife("agent-1")
    life.start(5000, restore=(9000, 4000))
    life.ranks(4000, 1)
    life.save(1.0, 6000, 10)
    life.commit(253_402_300_799.0, 10)
    life.ranks(100, 0)
    found = timeline(life)
    assert found is not None
    for lane in found.lanes:
        for mark in lane.marks:
            assert 0 <= mark.x <= mark.x + mark.width <= WIDTH + 1, (lane.name, mark)
