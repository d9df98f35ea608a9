"""What is due of the webhook's certificates, moment by moment and over years of virtual time."""

import random
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_agent.core.policies.certificate_rotation import NEW, CertificateLifetimes, Plan, Validity, plan

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)
LIVES = CertificateLifetimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the Secret holds."""

    authorities: tuple[Validity, ...] = ()
    leaf: Validity | None = None


def authority(name: str, age: timedelta, *, life: timedelta = LIVES.authority) -> Validity:
    return Validity(authority=name, begins_at=NOW - age, ends_at=NOW - age + life)


def leaf(by: str, age: timedelta) -> Validity:
    return Validity(authority=by, begins_at=NOW - age, ends_at=NOW - age + LIVES.leaf)


def published(**ages: timedelta) -> dict[str, datetime]:
    return {name: NOW - age for name, age in ages.items()}


LONG = timedelta(days=30)


@pytest.mark.parametrize(
    ("held", "since", "keep", "make_authority", "sign_with"),
    [
        pytest.param(Held(), published(), (), True, NEW, id="an empty Secret gets a CA and a leaf of it"),
        pytest.param(
            Held(authorities=(authority("a", 100 * DAY),), leaf=leaf("a", 10 * DAY)),
            published(a=LONG),
            ("a",),
            False,
            None,
            id="young ones are left alone",
        ),
        pytest.param(
            Held(authorities=(authority("a", 100 * DAY),), leaf=leaf("a", 61 * DAY)),
            published(a=LONG),
            ("a",),
            False,
            "a",
            id="a leaf past two thirds of its life is renewed",
        ),
        pytest.param(
            Held(authorities=(authority("a", 100 * DAY),), leaf=leaf("a", 61 * DAY)),
            published(),
            ("a",),
            False,
            "a",
            id="by its own CA even while we do not see what is published",
        ),
        pytest.param(
            Held(authorities=(authority("a", 244 * DAY),), leaf=leaf("a", 10 * DAY)),
            published(a=LONG),
            ("a",),
            True,
            None,
            id="beside a CA past two thirds of its life comes a new one, which signs nothing yet",
        ),
        pytest.param(
            Held(authorities=(authority("b", MINUTE), authority("a", 244 * DAY)), leaf=leaf("a", 61 * DAY)),
            published(a=LONG, b=MINUTE),
            ("b", "a"),
            False,
            "a",
            id="until it is settled the old one renews a leaf that is due",
        ),
        pytest.param(
            Held(authorities=(authority("b", 30 * DAY), authority("a", 270 * DAY)), leaf=leaf("a", 10 * DAY)),
            published(a=LONG),
            ("b", "a"),
            False,
            None,
            id="a CA that nobody publishes signs nothing, however old it is",
        ),
        pytest.param(
            Held(authorities=(authority("b", 11 * MINUTE), authority("a", 244 * DAY)), leaf=leaf("a", 10 * DAY)),
            published(a=LONG, b=10 * MINUTE),
            ("b", "a"),
            False,
            "b",
            id="a settled CA replaces the leaf of the one before, although that is not due",
        ),
        pytest.param(
            Held(authorities=(authority("b", 122 * DAY), authority("a", 365 * DAY)), leaf=leaf("b", 10 * DAY)),
            published(a=LONG, b=LONG),
            ("b",),
            False,
            None,
            id="a CA is dropped when it has expired, and not before",
        ),
        pytest.param(
            Held(authorities=(authority("a", 244 * DAY),), leaf=leaf("a", 90 * DAY)),
            published(a=MINUTE),
            ("a",),
            True,
            "a",
            id="where nothing valid is served, a CA that is published signs at once",
        ),
        pytest.param(
            Held(authorities=(authority("a", 365 * DAY),), leaf=leaf("a", 90 * DAY)),
            published(a=LONG),
            (),
            True,
            NEW,
            id="after a year's sleep all is made anew at once",
        ),
        pytest.param(
            Held(authorities=(authority("a", 10 * DAY),), leaf=leaf("a", -DAY)),
            published(a=LONG),
            ("a",),
            False,
            "a",
            id="a leaf from the future is none",
        ),
        pytest.param(
            Held(authorities=(authority("b", 10 * DAY), authority("a", 360 * DAY)), leaf=leaf("a", 85 * DAY)),
            published(a=LONG),
            ("b", "a"),
            False,
            None,
            id="a leaf that would end no later is not made",
        ),
    ],
)
def test_what_is_due(
    held: Held, since: dict[str, datetime], keep: tuple[str, ...], make_authority: bool, sign_with: str | None
) -> None:
    due = plan(NOW, held.authorities, held.leaf, since, LIVES)
    assert due == Plan(keep=keep, make_authority=make_authority, sign_with=sign_with)


def carried_out(due: Plan, held: Held, now: datetime, new: str) -> Held:
    """As `Kept.after` does it, without cryptography."""
    by_id = {one.authority: one for one in held.authorities}
    authorities = [by_id[one] for one in due.keep]
    if due.make_authority:
        authorities.insert(0, Validity(authority=new, begins_at=now - LIVES.backdated, ends_at=now + LIVES.authority))
    if due.sign_with is None:
        return Held(authorities=tuple(authorities), leaf=held.leaf)
    [signer] = [one for one in authorities if one.authority == (new if due.sign_with == NEW else due.sign_with)]
    assert signer.begins_at <= now < signer.ends_at
    begins_at = max(now - LIVES.backdated, signer.begins_at)
    made = Validity(authority=signer.authority, begins_at=begins_at, ends_at=LIVES.leaf_ends_at(now, signer.ends_at))
    return Held(authorities=tuple(authorities), leaf=made)


_days = st.integers(-5, 400).map(lambda days: days * DAY)


@st.composite
def _held(draw: st.DrawFn) -> Held:
    """A leaf is of a CA that is held: the Secret's reader takes no other for one."""
    authorities = tuple(authority(name, draw(_days)) for name in draw(st.lists(st.sampled_from("abcd"), unique=True)))
    if not authorities or not draw(st.booleans()):
        return Held(authorities=authorities)
    signer = draw(st.sampled_from(authorities))
    made = leaf(signer.authority, draw(_days))
    return Held(authorities=authorities, leaf=replace(made, ends_at=min(made.ends_at, signer.ends_at)))


@given(
    _held(), st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20).map(lambda minutes: NOW - minutes * MINUTE))
)
def test_whatever_the_secret_holds_one_plan_is_enough_and_hurts_no_leaf_that_serves(
    held: Held, since: dict[str, datetime]
) -> None:
    due = plan(NOW, held.authorities, held.leaf, since, LIVES)
    after = carried_out(due, held, NOW, "made")
    assert after.leaf is not None
    assert after.leaf.begins_at <= NOW < after.leaf.ends_at
    assert after.leaf.authority in {one.authority for one in after.authorities}
    then = plan(NOW, after.authorities, after.leaf, since, LIVES)
    assert carried_out(then, after, NOW, "made again") == after, "or it would write for ever"
    serves = held.leaf
    if serves is None or not serves.begins_at <= NOW < serves.ends_at:
        return
    assert serves.authority in due.keep
    if due.sign_with not in (None, serves.authority):
        assert NOW - since[str(due.sign_with)] >= LIVES.settle


@pytest.mark.parametrize("seed", range(20))
def test_for_ten_years_what_is_served_is_what_is_trusted(seed: int) -> None:
    """One writer, which may forget what it saw and may for weeks not be able to publish. API servers trust what was
    published up to ten minutes ago."""
    chance = random.Random(seed)
    held, published_now, memory = Held(), frozenset[str](), dict[str, datetime]()
    now = changed_at = broken_until = NOW
    names = (f"ca-{number}" for number in count())
    history: list[tuple[datetime, frozenset[str]]] = []
    authorities: set[str] = set()
    while now < NOW + 3650 * DAY:
        memory = {one: memory.get(one, now) for one in published_now}
        due = plan(now, held.authorities, held.leaf, memory, LIVES)
        before, held = held, carried_out(due, held, now, next(names) if due.make_authority else "")
        if held != before:
            changed_at = now
        serves = held.leaf
        assert serves is not None
        assert serves.begins_at <= now < serves.ends_at
        known_at = now - LIVES.settle
        old = [bundle for at, bundle in history if at <= known_at]
        for trusted in [*old[-1:], *(bundle for at, bundle in history if at > known_at)]:
            assert serves.authority in trusted
        if now >= broken_until:
            published_now = frozenset(one.authority for one in held.authorities)
            history.append((now, published_now))
        authorities |= published_now
        assert len(held.authorities) <= 3
        if chance.random() < 0.03:
            memory = {}
        if chance.random() < 0.02:
            broken_until = now + chance.randint(1, 25) * DAY
        now += chance.choice([MINUTE, 5 * MINUTE, 11 * MINUTE]) if now - changed_at < 40 * MINUTE else 5 * DAY
    assert 12 <= len(authorities) <= 20, "a CA every eight months or so"
