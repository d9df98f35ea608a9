"""Which committed checkpoint to restore, what to fall back to, and the pin that makes all pods of a start agree.

Invariants: a run whose checkpoints are all damaged stops and never silently starts from nothing; a pinned start takes
the pinned checkpoint or none; a pin has exactly one encoding, so that a pod recognises its own pin when it reads it
back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from keepstep_agent.core.errors import ErrorKind, RequestError, StoreError
from keepstep_agent.core.limits import PATH_BYTES, PIN_BYTES, PIN_MARKERS
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_agent.core.stored.ledger import AgentEnded, AgentLife, AgentStarted, Saved
from keepstep_agent.core.stored.object_layout import check_token, parse_marker_key

_FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What one start of an attempt resumes from.

    `markers` are the keys of the commit markers, one of each output directory, in order; none: nothing.
    """

    attempt: str
    markers: tuple[str, ...] = ()

    @property
    def saves(self) -> tuple[str, ...]:
        """The ids of the saves."""
        return tuple(parsed[1] for marker in self.markers if (parsed := parse_marker_key(marker)))

    def of_outputs(self) -> dict[str, "Pin"]:
        """Return the pin of each output directory alone, by its key."""
        parsed = ((marker, parse_marker_key(marker)) for marker in self.markers)
        return {found[2]: replace(self, markers=(marker,)) for marker, found in parsed if found}


class _PinObject(Struct, forbid_unknown_fields=True, kw_only=True):
    format: Literal[1]
    attempt: str
    markers: Annotated[tuple[Annotated[str, Meta(max_length=PATH_BYTES)], ...], Meta(max_length=PIN_MARKERS)]


def pin_of(attempt: str, committed: Iterable["CommittedSave"]) -> Pin:
    """Return the pin of a start that resumes from these saves."""
    return Pin(attempt=attempt, markers=tuple(sorted(one.key for one in committed)))


def encode_pin(pin: Pin) -> bytes:
    return checked_json.encode(_PinObject(format=_FORMAT_VERSION, attempt=pin.attempt, markers=pin.markers))


def decode_pin(body: bytes, key: str) -> Pin:
    """Decode a pin. Raises StoreError(CHECKPOINT_CORRUPT) that names `key`."""
    try:
        value = checked_json.decode(body, _PinObject, limit_bytes=PIN_BYTES)
        pin = Pin(attempt=check_token(value.attempt, "attempt"), markers=value.markers)
        if len(pin.of_outputs()) != len(pin.markers) or list(pin.markers) != sorted(pin.markers):
            raise UndecodableError(f"{list(pin.markers)} are not markers of one save for each output directory")
        return pin
    except (UndecodableError, RequestError) as error:
        raise StoreError(
            ErrorKind.CHECKPOINT_CORRUPT,
            f"the resume pin {key} cannot be read: {error}",
            hint="remove that object, or start the run with another attempt",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSave:
    """A save that has a commit marker, as the listing shows it.

    `series` is empty for an announced checkpoint; for a snapshot `step` is its number in the series. `output_key`:
    which output directory it belongs to. `saved_at` is what the marker says, 0 if it was not read. `modified_at` is
    when the marker was written, by the store's clock: if somebody copied the run to another bucket, when that was.

    `weights_only`: only its weights are left, and its marker is of another kind. It is not committed any more.
    """

    key: str
    step: int
    save: str
    series: str = ""
    output_key: str = ""
    saved_at: float = 0.0
    modified_at: float = 0.0
    weights_only: bool = False

    @property
    def committed_at(self) -> float:
        """When it was saved, by its marker if that was read. An agent whose clock is ahead makes it no younger."""
        return min(self.saved_at or self.modified_at, self.modified_at)


BOTH_CLOCKS: Final[tuple[Callable[[CommittedSave], float], ...]] = (
    attrgetter("modified_at"),
    attrgetter("committed_at"),
)
"""The store's clock, which is wrong for copies, and the marker's, which is wrong if the agent's clock was. What deletes
anything has to be right by both.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Try to restore this save next."""

    committed: CommittedSave
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFresh:
    """There is nothing to resume from, and nothing is wrong with that."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """There should be something to resume from, but it cannot be restored."""

    because: str
    hint: str


Choice = Take | StartFresh | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The pods of one start of an attempt: what they resume from, and the places of those that have it on their disk.

    Generations count from 0. `begun_at` is when the pin was written, by the store's clock.
    """

    number: int
    pin: Pin
    begun_at: float
    places: frozenset[str]


def may_join(generation: Generation, place: str, committed: Iterable[CommittedSave]) -> bool:
    """Whether a pod that starts now belongs to this generation, which is the newest; else it begins another one.

    It does not if the job has been started since: then the pod's place is taken, or another run than those that this
    generation resumes from has committed something. A commit of those same runs is no sign: it drains while its
    successors start. `place` is empty if nothing tells the pods of a job apart. tests/model/resume_model.py has every
    kind of restart.
    """
    if place and place in generation.places:
        return False
    resumed = set(map(run_of, generation.pin.saves))
    return not any(one.modified_at > generation.begun_at and run_of(one.save) not in resumed for one in committed)


def run_of(save: str) -> str:
    """Return what the saves of one run of a job have in common: their id up to its counter."""
    return save.rpartition("-")[0]


def failed_in_a_row(lives: Iterable[AgentLife], node_rank: int) -> tuple[int, str, bool]:
    """Return how many of a node's last starts failed early with one and the same save, which, and whether that is all.

    `lives`: the last lives of agents that are known; of the oldest the begin may be missing.
    """
    own = [life for life in lives if life.node_rank == node_rank and life.entries]
    save = ""
    for count, life in enumerate(sorted(own, key=lambda life: life.entries[-1].at, reverse=True)):
        start = next((entry for entry in life.entries if isinstance(entry, AgentStarted)), None)
        end = next((entry for entry in life.entries if isinstance(entry, AgentEnded)), None)
        has_saved = any(isinstance(entry, Saved) for entry in life.entries)
        if end is None or not end.failed_early or has_saved:
            return count, save, True
        if start is None:
            return count, save, False
        if not start.save or save not in ("", start.save):
            return count, save, True
        save = start.save
    return len(own), save, False


def newest_first(committed: Iterable[CommittedSave]) -> tuple[CommittedSave, ...]:
    """Sort by step, then by `saved_at`, newest first; the save id makes the order total."""
    return tuple(sorted(committed, key=lambda one: (one.step, one.saved_at, one.save), reverse=True))


def by_line(committed: Iterable[CommittedSave]) -> dict[tuple[str, str], list[CommittedSave]]:
    """Group saves of which each replaces those before it, by (series, key of the output directory), in their order.

    Announced checkpoints have no series, and snapshots no output directory.
    """
    groups: dict[tuple[str, str], list[CommittedSave]] = {}
    for one in committed:
        groups.setdefault((one.series, one.output_key), []).append(one)
    return groups


def last_line(committed: Iterable[CommittedSave]) -> list[CommittedSave]:
    """Return the saves of the output directory, or of the series, that was committed to last, in their order."""
    return max(by_line(committed).values(), key=last_commit_at, default=[])


def last_commit_at(line: Iterable[CommittedSave]) -> float:
    """Return when a line was committed to last; `catalog.markers.with_last_commits` reads the markers that say it."""
    return max(one.committed_at for one in last_commits(line))


def last_commits(line: Iterable[CommittedSave]) -> tuple[CommittedSave, CommittedSave]:
    """Return the two saves of a line that were possibly committed last: the newest, and the youngest for the store.

    A run that fell back commits below the newest, and in a copied bucket any of them may be the youngest.
    """
    saves = newest_first(line)
    return saves[0], max(saves, key=lambda one: one.modified_at)


def choose(committed: Sequence[CommittedSave], *, pin: Pin | None, failures: Mapping[str, str]) -> Choice:
    """Return what to try next. `failures` maps the id of each save that was tried to what is wrong with it.

    `committed` are of one output directory or series, and so is the one marker of `pin`.
    """
    if pin is not None:
        return _obey(committed, pin, failures)
    if not committed:
        return StartFresh(because="the destination has no committed checkpoint")
    ordered = newest_first(committed)
    for skipped, one in enumerate(ordered):
        if one.save not in failures:
            because = "it is the newest" if not skipped else f"{skipped} newer cannot be restored"
            return Take(committed=one, because=because)
    newest = ordered[0]
    return GiveUp(
        because=f"none of {len(ordered)} committed checkpoints can be restored; the newest: {failures[newest.save]}",
        hint="`keepstep verify --all` shows what is damaged; to start from step 0, use another destination",
    )


def _obey(committed: Sequence[CommittedSave], pin: Pin, failures: Mapping[str, str]) -> Choice:
    (parsed,) = filter(None, map(parse_marker_key, pin.markers))
    step, save, _ = parsed
    which = f"step {step} (save {save}), which this start of {pin.attempt} resumes from,"
    hint = "start all pods of the run again, or give it a new attempt: it takes the newest that can be restored"
    if save in failures:
        return GiveUp(because=f"{which} cannot be restored: {failures[save]}", hint=hint)
    for one in committed:
        if one.save == save:
            return Take(committed=one, because=f"this start of attempt {pin.attempt} is pinned to it")
    return GiveUp(because=f"{which} is no longer at the destination", hint=hint)
