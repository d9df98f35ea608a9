"""Which certificates the webhook has to make now, given what its Secret holds and what is published.

Owns the rules of rotation, so that at every moment whatever any replica serves is verified by whatever any API server
trusts:

- A CA is published first, and signs only once its publication has been seen for `settle`: API servers learn of a
  change of their configuration one after the other. Its age alone would not do: it may have failed to be published.
- A leaf never outlives its CA, and a CA stays published until its end. So a replica that cannot reach the API server
  may serve an old leaf to its end.
- Where nothing valid is served there is nothing to lose: the best CA there is signs at once.
- A leaf may always be renewed by the CA that it has, whose publication is as good as it was.

Knows no cryptography: a CA is an id and its dates.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final, Self

NEW: Final = "new"
"""In a plan: the CA that it makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """How long certificates are for; each is renewed at two thirds of its life.

    `leaf` is what the Kubernetes world is used to. `authority` is short for a CA because nobody has to hand this one
    out: a rotation that happens every eight months is one that works, and the bundle holds two CAs at most. A third of
    a CA's life is longer than a leaf's, so that no leaf is cut short by its CA's end. `settle`: how long a CA has to be
    seen published before it signs. `backdated`: what clocks may differ by.
    """

    authority: timedelta = timedelta(days=365)
    leaf: timedelta = timedelta(days=90)
    settle: timedelta = timedelta(minutes=10)
    backdated: timedelta = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A CA of the Secret. `signs`: its key is there too."""

    id: str
    begins_at: datetime
    ends_at: datetime
    signs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The certificate that is served; `authority` is empty where no CA of the Secret signed it."""

    authority: str
    begins_at: datetime
    ends_at: datetime
    names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the Secret holds, as far as it can be read."""

    authorities: tuple[Authority, ...] = ()
    leaf: Leaf | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the Secret shall hold: `keep` of its CAs, perhaps a new one, perhaps a leaf signed by `sign_with`."""

    keep: tuple[str, ...]
    make_authority: bool = False
    sign_with: str | None = None

    def changes(self, held: Held) -> bool:
        """Whether the Secret has to be written."""
        return self.make_authority or self.sign_with is not None or len(self.keep) != len(held.authorities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Since when we see each CA in the webhook's configuration, without a break."""

    since: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))

    def seen(self, ids: Collection[str], now: datetime) -> Self:
        """After one more look at the configuration."""
        return type(self)(since=MappingProxyType({one: self.since.get(one, now) for one in ids}))

    def settled(self, now: datetime, settle: timedelta) -> frozenset[str]:
        """Those that every API server knows by now."""
        return frozenset(one for one, since in self.since.items() if now - since >= settle)


def plan(now: datetime, held: Held, publication: Publication, names: frozenset[str], lives: Lives) -> Plan:
    """What is due. Nothing is where the plan does not change what is held."""
    kept = [one for one in _newest_first(held.authorities) if now < one.ends_at]
    signers = [one for one in kept if one.signs and one.begins_at <= now]
    make_authority = not signers or _is_old(signers[0], now)
    leaf = held.leaf
    if leaf is not None and names <= leaf.names and leaf.begins_at <= now < leaf.ends_at and leaf.authority:
        sign_with = _renewal(now, leaf, signers, publication.settled(now, lives.settle), lives)
    else:
        published = [one.id for one in signers if one.id in publication.since]
        sign_with = [*published, NEW if make_authority else signers[0].id][0]
    return Plan(keep=tuple(one.id for one in kept), make_authority=make_authority, sign_with=sign_with)


def leaf_ends_at(now: datetime, authority_ends_at: datetime, lives: Lives) -> datetime:
    """Of one that is made now."""
    return min(now + lives.leaf, authority_ends_at)


def _renewal(now: datetime, leaf: Leaf, signers: list[Authority], settled: frozenset[str], lives: Lives) -> str | None:
    """The newest CA that may sign instead of the leaf's own, or that one, if the leaf is due."""
    able = [one for one in signers if one.id in settled or one.id == leaf.authority]
    if not able:
        return None
    best = able[0]
    due = best.id != leaf.authority or _is_old(leaf, now)
    # Where a new CA cannot be published, the old one's leaves get shorter and shorter: only a longer life is worth it.
    return best.id if due and leaf_ends_at(now, best.ends_at, lives) > leaf.ends_at else None


def _newest_first(authorities: Collection[Authority]) -> list[Authority]:
    return sorted(authorities, key=lambda one: (one.begins_at, one.id), reverse=True)


def _is_old(one: Authority | Leaf, now: datetime) -> bool:
    return now - one.begins_at >= (one.ends_at - one.begins_at) * 2 / 3
