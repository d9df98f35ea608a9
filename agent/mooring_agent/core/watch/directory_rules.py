"""When a checkpoint of a program that never calls us is complete, judged from what its directory shows.

Owns the part that time and earlier looks have in it, and what a checkpoint is called; `checkpoint_layouts` has the
rules of each layout. Invariants: a doubt is "not yet", with the reason for people; nothing is complete before it has
been quiet; and what is being written over again is complete only when every rank has written its file again.
"""

import re
from dataclasses import dataclass
from typing import Final

from mooring_agent.core.watch.checkpoint_layouts import DirectorySnapshot, FileSnapshot, missing, rank_files

_NAME_LIMIT: Final = 128

LARGEST_STEP: Final = 2**64 - 1
"""What the wire can carry."""

SINGLE_FILE_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".safetensors")
"""A file of this kind directly in the watched directory is a checkpoint by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one look leaves for the next; the `complete_` ones are of the last content that was complete."""

    signature: str
    unchanged_since: float
    complete_signature: str
    complete_rank_files: frozenset[FileSnapshot]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`reason` says why a candidate is not complete; `step` is None when its name has no number."""

    complete: bool
    quiet: bool
    name: str
    step: int | None
    reason: str
    observation: Observation


def judge(
    snapshot: DirectorySnapshot,
    previous: Observation | None,
    *,
    quiet_seconds: float,
    world_size: int,
) -> Verdict:
    """Whether a candidate is a complete checkpoint now. `world_size` 0: not known."""
    signature = snapshot.signature
    unchanged = previous is not None and previous.signature == signature
    since = previous.unchanged_since if previous is not None and unchanged else snapshot.seen_at
    quiet = unchanged and snapshot.seen_at - since >= quiet_seconds
    of_ranks = rank_files(snapshot)
    before = (previous.complete_signature, previous.complete_rank_files) if previous else ("", frozenset())
    reason = missing(snapshot, world_size)
    if not reason and signature != before[0] and of_ranks & before[1]:
        reason = "it is being written again, and some ranks have not written it again yet"
    if not reason and not quiet:
        reason = f"still changing, or quiet for less than {quiet_seconds:g} s"
    return Verdict(
        complete=not reason,
        quiet=quiet,
        name=checkpoint_name(snapshot.name),
        step=step_of(snapshot.name),
        reason=reason,
        observation=Observation(
            signature=signature,
            unchanged_since=since,
            complete_signature=before[0] if reason else signature,
            complete_rank_files=before[1] if reason else of_ranks,
        ),
    )


def candidate(name: str, *, single_file: bool) -> bool:
    """Whether an entry of the watched directory may be a checkpoint at all, or become one."""
    if name.startswith("."):
        return False
    return not single_file or name.endswith(SINGLE_FILE_SUFFIXES)


def checkpoint_name(entry: str) -> str:
    """The entry's name, made fit for object keys; it keeps the suffix by which programs and the watch know a file."""
    stem = _without_suffix(entry)
    suffix = entry.removeprefix(stem)
    name = re.sub(r"[^A-Za-z0-9._=+-]", "-", stem).lstrip("._=+-") or "checkpoint"
    return name[: _NAME_LIMIT - len(suffix)] + suffix


def step_of(entry: str) -> int | None:
    """The last number in a name: checkpoint-1200, epoch=3-step=1200.ckpt; None if there is none that can be a step."""
    numbers = re.findall(r"[0-9]+", _without_suffix(entry))
    step = int(numbers[-1]) if numbers else None
    return step if step is not None and step <= LARGEST_STEP else None


def _without_suffix(entry: str) -> str:
    suffix = next((suffix for suffix in SINGLE_FILE_SUFFIXES if entry.endswith(suffix)), "")
    return entry.removesuffix(suffix)
