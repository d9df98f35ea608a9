"""Whose turn it is to write, by a Kubernetes Lease.

Owns the rule of client-go: times that somebody else wrote are never compared with our clock; a holder is gone when its
lease has not changed, as we see it, for as long as the lease lasts. A lease keeps replicas from doing the same work
twice; that no work is lost is up to resource versions.
"""

from dataclasses import dataclass
from enum import StrEnum


class Turn(StrEnum):
    """What to do with the lease now."""

    TAKE = "take"
    RENEW = "renew"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """What the lease says. An empty `holder`: it was given back, or never taken."""

    holder: str = ""
    renewed: str = ""
    lasts_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A record and when, by our monotonic clock, we saw it for the first time."""

    record: LeaseRecord
    at: float


def turn(record: LeaseRecord, before: Sighting | None, identity: str, now: float) -> tuple[Turn, Sighting]:
    """What to do, and what to remember for the next look."""
    sighting = before if before is not None and before.record == record else Sighting(record=record, at=now)
    if record.holder == identity:
        return Turn.RENEW, sighting
    if not record.holder or now - sighting.at >= record.lasts_seconds:
        return Turn.TAKE, sighting
    return Turn.WAIT, sighting
