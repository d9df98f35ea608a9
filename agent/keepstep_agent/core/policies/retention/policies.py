"""The policies of retention: each says which saves of one line it wants to stay, and why. A save stays if any does.

Invariants, which hold for every set of policies:

- A policy looks at nothing but the listing, so time alone deletes nothing, and a second prune wants what the first did.
- What a policy wants of a listing, it still wants of any part of that listing which holds it. So a prune that is
  interrupted, or that sees only the newest saves, deletes nothing that a whole one would keep.
- A note of damage only keeps more: a policy then also names what it would want without the damaged saves.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from keepstep_agent.core.policies.restore_choice import BOTH_CLOCKS, CommittedSave
from keepstep_agent.core.settings.values import RetentionSettings

_DAY_SECONDS: Final = 24 * 3600.0


class KeepPolicy(Protocol):
    """One reason to keep saves."""

    def wanted(self, saves: Sequence[CommittedSave]) -> Mapping[str, str]:
        """Return the ids of the wanted saves and why each stays. `saves` are those of one line, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest saves, down to the one that has `count` newer ones in `justifying`: valid ones that nothing skipped.

    It is the policy that nobody can leave out. It keeps the newest save, the one committed last and the newest valid
    ones, however many damaged ones are newer.
    """

    count: int
    justifying: Collection[str]

    def wanted(self, saves: Sequence[CommittedSave]) -> Mapping[str, str]:
        reasons: dict[str, str] = {}
        newer = 0
        for position, one in enumerate(saves):
            if newer >= self.count:
                break
            is_among = position < self.count
            reasons[one.save] = f"newest {self.count}" if is_among else f"fewer than {self.count} newer are valid"
            newer += one.save in self.justifying
        return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones:
    """For each multiple of a step the checkpoints of the first step at or past it, below the next multiple.

    Step 0 is a milestone; a checkpoint past it is not one for that. The number of a snapshot is no step.
    """

    every_steps: int

    def wanted(self, saves: Sequence[CommittedSave]) -> Mapping[str, str]:
        announced = [one for one in saves if not one.series]
        first: dict[int, int] = {}
        for one in announced:
            multiple = self._multiple(one)
            first[multiple] = min(first.get(multiple, one.step), one.step)
        return {
            one.save: f"milestone {multiple}"
            for one in announced
            if first[multiple := self._multiple(one)] == one.step and (multiple or not one.step)
        }

    def _multiple(self, one: CommittedSave) -> int:
        return one.step - one.step % self.every_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePerInterval:
    """The save that was committed last in each interval, by either clock. The first interval begins in 1970."""

    every_seconds: float

    def wanted(self, saves: Sequence[CommittedSave]) -> Mapping[str, str]:
        reason = f"one per {self.every_seconds:g} s"
        return {
            one.save: reason
            for clock in BOTH_CLOCKS
            for one in _last_of_each(saves, self.every_seconds, clock).values()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Daily:
    """The save that was committed last on each of the last `days` days (UTC) that have one, by either clock.

    Days without a commit do not count: the checkpoints of a run that rests for a month are as many afterwards.
    """

    days: int

    def wanted(self, saves: Sequence[CommittedSave]) -> Mapping[str, str]:
        wanted: dict[str, str] = {}
        for clock in BOTH_CLOCKS:
            of_day = _last_of_each(saves, _DAY_SECONDS, clock)
            wanted |= {of_day[day].save: "daily" for day in sorted(of_day, reverse=True)[: self.days]}
        return wanted


def _last_of_each(
    saves: Sequence[CommittedSave], seconds: float, clock: Callable[[CommittedSave], float]
) -> dict[float, CommittedSave]:
    """Return what was committed last in each interval, by its number. Of equals the newest is taken."""
    last: dict[float, CommittedSave] = {}
    for one in saves:
        number = clock(one) // seconds
        if number not in last or clock(one) > clock(last[number]):
            last[number] = one
    return last


def policies_of(settings: RetentionSettings, justifying: Collection[str]) -> Iterator[KeepPolicy]:
    """Yield the policies that the settings ask for. That of final checkpoints needs their markers: `without_finals`."""
    yield Newest(count=settings.keep_last, justifying=justifying)
    if settings.keep_every_steps:
        yield Milestones(every_steps=settings.keep_every_steps)
    if settings.keep_every_seconds:
        yield OnePerInterval(every_seconds=settings.keep_every_seconds)
    if settings.keep_daily:
        yield Daily(days=settings.keep_daily)


def why_wanted(
    saves: Sequence[CommittedSave], policies: Iterator[KeepPolicy], damaged: Collection[str]
) -> dict[str, list[str]]:
    """Return why each save that a policy wants stays. `damaged` are the saves that a restore noted as such."""
    undamaged = [one for one in saves if one.save not in damaged]
    found: dict[str, list[str]] = {}
    for policy in policies:
        # What is wanted of all comes last, so its reason is the one that is told.
        for save, reason in {**policy.wanted(undamaged), **policy.wanted(saves)}.items():
            found.setdefault(save, []).append(reason)
    return found
