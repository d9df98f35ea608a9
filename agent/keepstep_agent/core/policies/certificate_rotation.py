"""Which certificates the webhook has to make, given what its Secret holds and what is published.

Owns the rules of rotation. They ensure that every API server trusts the certificate that any replica serves:

- A CA signs only after its publication has been seen for `settle`, because API servers learn of it at different times.
- A leaf never outlives its CA, and a CA stays published until it expires. So a replica that cannot reach the API server
  may serve an old leaf until that expires.
- If no valid leaf is served, the best CA that exists signs at once, because nothing can get worse.
- A leaf may always be renewed by the CA that signed it.

Knows no cryptography: a CA is an id and its dates.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

NEW: Final = "new"
"""In a plan: the CA that the plan makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLifetimes:
    """How long certificates are valid. Each is renewed at two thirds of its life.

    A third of `authority` is longer than `leaf`, so that no leaf is cut short. `settle`: how long a CA has to be seen
    published before it signs. `backdated`: how much clocks may differ.
    """

    authority: timedelta = timedelta(days=365)
    leaf: timedelta = timedelta(days=90)
    settle: timedelta = timedelta(minutes=10)
    backdated: timedelta = timedelta(hours=1)

    def leaf_ends_at(self, now: datetime, authority_ends_at: datetime) -> datetime:
        return min(now + self.leaf, authority_ends_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """The validity of a CA, or of a leaf that this CA signed."""

    authority: str
    begins_at: datetime
    ends_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the Secret shall hold: the CAs in `keep`, perhaps a new one, perhaps a new leaf signed by `sign_with`."""

    keep: tuple[str, ...]
    make_authority: bool = False
    sign_with: str | None = None


def plan(
    now: datetime,
    authorities: Sequence[Validity],
    leaf: Validity | None,
    published_since: Mapping[str, datetime],
    lifetimes: CertificateLifetimes,
) -> Plan:
    """Return what is due. `published_since`: since when each CA has been seen published without a break."""
    kept = sorted((one for one in authorities if now < one.ends_at), key=lambda one: one.begins_at, reverse=True)
    signers = [one for one in kept if one.begins_at <= now]
    make_authority = not signers or _is_old(signers[0], now)
    if leaf is not None and leaf.begins_at <= now < leaf.ends_at:
        settled = {one for one, since in published_since.items() if now - since >= lifetimes.settle}
        sign_with = _renewal(now, leaf, signers, settled, lifetimes)
    else:
        published = [one.authority for one in signers if one.authority in published_since]
        sign_with = [*published, NEW if make_authority else signers[0].authority][0]
    return Plan(keep=tuple(one.authority for one in kept), make_authority=make_authority, sign_with=sign_with)


def _renewal(
    now: datetime, leaf: Validity, signers: list[Validity], settled: Collection[str], lifetimes: CertificateLifetimes
) -> str | None:
    """Return the CA that renews the leaf: a newer one that may sign, or its own if the leaf is due; else None."""
    able = [one for one in signers if one.authority in settled or one.authority == leaf.authority]
    if not able or (able[0].authority == leaf.authority and not _is_old(leaf, now)):
        return None
    # If a new CA cannot be published, the old one's leaves get shorter and shorter: renew only for a longer life.
    return able[0].authority if lifetimes.leaf_ends_at(now, able[0].ends_at) > leaf.ends_at else None


def _is_old(one: Validity, now: datetime) -> bool:
    return now - one.begins_at >= (one.ends_at - one.begins_at) * 2 / 3
