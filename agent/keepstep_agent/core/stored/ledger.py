"""A run's ledger: what its agents note of every attempt, in objects that are never rewritten. docs/design/0019.

An object has the lives of one agent or, after a merge, of several: who it was, and its entries. Invariants: an entry is
identified by its agent and its number; decoding tolerates fields and kinds of entries that it does not know, and
refuses everything else that is not what an agent writes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from keepstep_agent.core.limits import (
    LEDGER_BYTES,
    LEDGER_ENTRIES,
    LEDGER_LIVES,
    LOCAL_RANKS,
    SECONDS,
    TEXT_CHARACTERS,
    Count,
    Moment,
    NameText,
    Rank,
    Step,
)
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_api.names import MOST_DONE, MOST_UNITS

_FORMAT_VERSION: Final = 1

Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS)]
Seconds = Annotated[float, Meta(ge=0, le=52 * SECONDS)]
Units = Annotated[dict[NameText, Annotated[float, Meta(ge=0, le=MOST_DONE)]], Meta(max_length=MOST_UNITS)]


class Resumed(StrEnum):
    """What restore has put in place, as far as it knows. With a lazy restore it does not."""

    SAVE = "save"
    NOTHING = "nothing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Something happened `at` that moment, in unix seconds. `number` counts an agent's entries."""

    number: Count
    at: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(_Entry):
    """An agent has started. `start` is the same for all agents that followed one restore on one volume.

    The restore's times are None if none ran. `step` and `save` are those of what it put in place.
    """

    start: NameText
    restore_began_at: Moment | None = None
    restored_at: Moment | None = None
    resumed: Resumed = Resumed.UNKNOWN
    step: Step = 0
    save: NameText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksChanged(_Entry):
    """So many training processes of the pod are alive from now on."""

    ranks: Annotated[int, Meta(ge=0, le=LOCAL_RANKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(_Entry):
    """All ranks of the pod have announced a save. `step` counts nothing if the kind is `snapshot`.

    `begun_at` is None if the agent was not asked before. `stall_seconds` is what the client measured; None if it did
    not. `units` is what the program counts, such as samples or tokens done until then. `output`: the output directory
    that it belongs to, relative to the volume; empty: the checkpoint directory.
    """

    save: NameText
    step: Step
    save_kind: NameText
    output: Text = ""
    begun_at: Moment | None = None
    stall_seconds: Seconds | None = None
    units: Units = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted(_Entry):
    """A save is committed. The bytes are the pod's; the seconds are those from the announcement to the commit."""

    save: NameText
    size_bytes: Count
    upload_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLost(_Entry):
    """A save was shed or has failed."""

    save: NameText
    outcome: NameText
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSetAside(_Entry):
    """Work was under way at so many deaths of agents in a row, and is tried again last.

    `save` is empty if it belongs to no save. `work` names it for people, and `doing` says what was done.
    """

    work: Text
    doing: Text
    deaths: Count
    save: NameText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed(_Entry):
    """The pod is about to end. `source` says who told it; `grace_seconds` is None if there is no time limit."""

    source: Text
    grace_seconds: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(_Entry):
    """So many training processes are still alive. `step` is the highest of this training that is known; 0: none."""

    ranks: Annotated[int, Meta(ge=0, le=LOCAL_RANKS)]
    step: Step = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnded(_Entry):
    """The agent exits. `not_durable` is how many checkpoints it leaves that are not committed.

    `program_failed`: a signal or an error had ended the program of `keepstep run`. `failed_early`: an error
    of its own did so soon, and without anything new to store but logs, that what it resumed from may be the reason.
    """

    code: Annotated[int, Meta(ge=0, le=255)]
    source: Text = ""
    not_durable: Count = 0
    program_failed: bool = False
    failed_early: bool = False


LedgerEntry = (
    AgentStarted | RanksChanged | Saved | SaveCommitted | SaveLost | WorkSetAside | Noticed | Alive | AgentEnded
)

ENTRY_TAGS: Final[Mapping[type[LedgerEntry], str]] = {
    AgentStarted: "start",
    RanksChanged: "ranks",
    Saved: "save",
    SaveCommitted: "commit",
    SaveLost: "lost",
    WorkSetAside: "set-aside",
    Noticed: "notice",
    Alive: "alive",
    AgentEnded: "end",
}
"""The kind of each entry in an object. It never changes, because a bucket outlives all agents."""
_TYPES: Final = {tag: entry_type for entry_type, tag in ENTRY_TAGS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLife:
    """What one agent has noted, by number. `agent` is its nonce. `place` and `node_rank` tell the job's pods apart."""

    agent: str
    attempt: str
    place: str
    node_rank: int
    entries: tuple[LedgerEntry, ...]


class _Head(Struct):
    kind: NameText
    number: Count


class _Life(Struct):
    agent: NameText
    entries: Annotated[list[Raw], Meta(max_length=LEDGER_ENTRIES)]
    attempt: NameText = ""
    place: NameText = ""
    node_rank: Rank = 0


class _Object(Struct):
    format: Annotated[int, Meta(ge=1)]
    lives: Annotated[list[_Life], Meta(max_length=LEDGER_LIVES)]


def encode_life(life: AgentLife) -> bytes:
    return checked_json.encode({"format": _FORMAT_VERSION, "lives": [_encodable(life)]})


def decode_lives(body: bytes) -> tuple[AgentLife, ...]:
    """Decode an object of the ledger, also one of a newer format as far as it can be read. Raises UndecodableError."""
    value = checked_json.decode(body, _Object, limit_bytes=LEDGER_BYTES)
    return tuple(
        AgentLife(
            agent=life.agent,
            attempt=life.attempt,
            place=life.place,
            node_rank=life.node_rank,
            entries=tuple(entry for raw in life.entries if (entry := _decode_entry(raw))),
        )
        for life in value.lives
    )


def joined_lives(lives: Iterable[AgentLife]) -> tuple[AgentLife, ...]:
    """Join what several objects have of the same agent. An entry that is there twice counts once."""
    heads: dict[str, AgentLife] = {}
    entries: dict[str, dict[int, LedgerEntry]] = {}
    for life in lives:
        heads.setdefault(life.agent, life)
        entries.setdefault(life.agent, {}).update((one.number, one) for one in life.entries)
    return tuple(
        AgentLife(
            agent=head.agent,
            attempt=head.attempt,
            place=head.place,
            node_rank=head.node_rank,
            entries=tuple(entries[head.agent][number] for number in sorted(entries[head.agent])),
        )
        for head in heads.values()
    )


def merged(bodies: Sequence[bytes]) -> bytes | None:
    """Return one object with everything that these hold, but of each agent's `alive` entries only the last.

    What this version does not know is kept as it is. None if one of them cannot be merged: it is damaged, of a newer
    format, or the result would be too large or hold too much to be decoded.
    """
    lives: dict[str, dict[str, Any]] = {}
    try:
        for body in bodies:
            decode_lives(body)
            value = checked_json.decode(body, dict[str, Any], limit_bytes=LEDGER_BYTES)
            if value["format"] != _FORMAT_VERSION:
                return None
            for life in value["lives"]:
                known = lives.setdefault(life["agent"], {**life, "entries": {}})
                known["entries"].update((entry["number"], entry) for entry in life["entries"])
    except UndecodableError:
        return None
    whole = {
        "format": _FORMAT_VERSION,
        "lives": [
            {**life, "entries": _without_old_signs([life["entries"][number] for number in sorted(life["entries"])])}
            for life in lives.values()
        ],
    }
    whole_body = checked_json.encode(whole)
    try:
        decode_lives(whole_body)
    except UndecodableError:
        return None
    return whole_body


def _without_old_signs(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    last = max((entry["number"] for entry in entries if entry["kind"] == ENTRY_TAGS[Alive]), default=None)
    return [entry for entry in entries if entry["kind"] != ENTRY_TAGS[Alive] or entry["number"] == last]


def _encodable(life: AgentLife) -> dict[str, Any]:
    return {
        "agent": life.agent,
        "attempt": life.attempt,
        "place": life.place,
        "node_rank": life.node_rank,
        "entries": [
            {"kind": ENTRY_TAGS[type(entry)]}
            | {one.name: value for one in fields(entry) if (value := getattr(entry, one.name)) not in (None, {})}
            for entry in life.entries
        ],
    }


def _decode_entry(raw: Raw) -> LedgerEntry | None:
    """Return the entry; None for a kind that a newer version has added."""
    try:
        entry_type = _TYPES.get(msgspec.json.decode(raw, type=_Head).kind)
        return None if entry_type is None else msgspec.json.decode(raw, type=entry_type)
    except (ValueError, RecursionError, OverflowError) as error:
        raise UndecodableError(str(error)) from error
