"""The newest committed checkpoint, and what to fall back to.

Owns the order of committed saves and the next choice; knows nothing of how damage is found. Invariants: a run whose
checkpoints are all damaged stops, it never starts from nothing unasked; a pinned attempt takes the pinned one or none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mooring_agent.core.resume_pin import Pin


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSave:
    """A save that has a commit marker, as far as the listing tells.

    `saved_at` only breaks ties: it is read where several saves share a step, and 0 elsewhere. `modified_at` is when the
    marker was written, by the store's clock.
    """

    key: str
    step: int
    save: str
    saved_at: float = 0.0
    modified_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Try this one next."""

    committed: CommittedSave
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFresh:
    """There is nothing to resume from, and that is in order."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """There should be something to resume from, and it cannot be had."""

    because: str
    hint: str


Choice = Take | StartFresh | GiveUp


def newest_first(committed: Iterable[CommittedSave]) -> tuple[CommittedSave, ...]:
    """By step; among saves of one step the last saved; the save id makes the order total."""
    return tuple(sorted(committed, key=lambda one: (one.step, one.saved_at, one.save), reverse=True))


def choose(committed: Sequence[CommittedSave], *, pin: Pin | None, failures: Mapping[str, str]) -> Choice:
    """What to try next. `failures` says of each save that was tried, by its id, what is wrong with it."""
    if pin is not None:
        return _obey(committed, pin, failures)
    if not committed:
        return StartFresh(because="the destination has no committed checkpoint")
    ordered = newest_first(committed)
    for one in ordered:
        if one.save not in failures:
            passed_over = ordered.index(one)
            because = "it is the newest" if not passed_over else f"{passed_over} newer cannot be restored"
            return Take(committed=one, because=because)
    newest = ordered[0]
    return GiveUp(
        because=f"none of {len(ordered)} committed checkpoints can be restored; the newest: {failures[newest.save]}",
        hint="`mooring verify --all` shows what is damaged; to start from nothing, use another destination",
    )


def _obey(committed: Sequence[CommittedSave], pin: Pin, failures: Mapping[str, str]) -> Choice:
    if pin.fresh_start:
        return StartFresh(because=f"attempt {pin.attempt} was decided to start from nothing")
    which = f"step {pin.step} (save {pin.save}), which attempt {pin.attempt} resumes from,"
    hint = "start the run with a new attempt: it takes the newest checkpoint that can be restored"
    if pin.save in failures:
        return GiveUp(because=f"{which} cannot be restored: {failures[pin.save]}", hint=hint)
    for one in committed:
        if one.save == pin.save:
            return Take(committed=one, because=f"attempt {pin.attempt} is pinned to it")
    return GiveUp(because=f"{which} is no longer at the destination", hint=hint)
