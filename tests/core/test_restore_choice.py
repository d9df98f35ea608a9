"""Which checkpoint is tried next, over all orders, pins and failures."""

from hypothesis import given
from hypothesis import strategies as st

from keepstep_agent.core.policies.restore_choice import (
    CommittedSave,
    GiveUp,
    Pin,
    StartFresh,
    Take,
    choose,
    newest_first,
)
from keepstep_agent.core.stored.object_layout import step_prefix


def committed(step: int, save: str, saved_at: float = 0.0) -> CommittedSave:
    return CommittedSave(key=f"{step_prefix(step)}{save}.json", step=step, save=save, saved_at=saved_at)


def pin(one: CommittedSave) -> Pin:
    return Pin(attempt="a", markers=(one.key,))


saves = st.lists(
    st.builds(committed, st.integers(0, 5), st.text("abc", min_size=1, max_size=3), st.floats(0, 3)),
    unique_by=lambda one: one.save,
    max_size=8,
)


def test_the_step_decides_then_the_time_then_the_id() -> None:
    ordered = [committed(9, "a"), committed(8, "a", 2.0), committed(8, "c", 1.0), committed(8, "b", 1.0)]
    assert list(newest_first(reversed(ordered))) == ordered


@given(saves, st.randoms())
def test_the_order_does_not_depend_on_the_listing(found: list[CommittedSave], shuffled: object) -> None:
    other = list(found)
    shuffled.shuffle(other)  # type: ignore[attr-defined]
    assert newest_first(found) == newest_first(other)


@given(saves, st.data())
def test_every_intact_checkpoint_is_tried_newest_first_before_giving_up(
    found: list[CommittedSave], data: st.DataObject
) -> None:
    failures: dict[str, str] = {}
    tried = []
    for _ in range(len(found)):
        choice = choose(found, pin=None, failures=failures)
        assert isinstance(choice, Take)
        tried.append(choice.committed)
        failures[choice.committed.save] = "is damaged"
    assert tuple(tried) == newest_first(found)
    last = choose(found, pin=None, failures=failures)
    assert isinstance(last, GiveUp if found else StartFresh)


@given(saves.filter(bool), st.data())
def test_a_pinned_attempt_takes_the_pinned_one_or_none(found: list[CommittedSave], data: st.DataObject) -> None:
    pinned = data.draw(st.sampled_from(found))
    others = [one for one in found if one != pinned]
    choice = choose(found, pin=pin(pinned), failures={one.save: "is damaged" for one in others})
    assert isinstance(choice, Take)
    assert choice.committed == pinned
    assert isinstance(choose(found, pin=pin(pinned), failures={pinned.save: "is damaged"}), GiveUp)
    assert isinstance(choose(others, pin=pin(pinned), failures={}), GiveUp)


def test_giving_up_says_what_is_wrong_with_the_newest_and_what_to_do() -> None:
    found = [committed(1, "old"), committed(2, "new")]
    choice = choose(found, pin=None, failures={"old": "x is missing", "new": "y is missing"})
    assert isinstance(choice, GiveUp)
    assert "none of 2" in choice.because
    assert "y is missing" in choice.because
    assert "keepstep verify" in choice.hint
