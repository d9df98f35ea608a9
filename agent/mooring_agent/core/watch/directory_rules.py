"""Decides from a directory's snapshots when a checkpoint that nothing announces is complete.

Owns the rules that depend on time and on earlier snapshots, and the checkpoint's name and step; `checkpoint_layouts`
has the rules of each layout. Invariants: in doubt a checkpoint is not complete yet, and the reason is given. Nothing is
complete before it has been quiet. A checkpoint that is overwritten is complete only when every rank has written its
file again.
"""

import re
from dataclasses import dataclass
from typing import Final

from mooring_agent.core.limits import NAME_CHARACTERS, STEP
from mooring_agent.core.watch.checkpoint_layouts import DirectorySnapshot, FileSnapshot, missing, rank_files

SINGLE_FILE_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".safetensors")
"""A file of this kind directly in the watched directory is a checkpoint by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one scan keeps for the next. The `complete_` fields describe the last content that was complete."""

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
    """Judge whether a candidate is a complete checkpoint. `world_size` 0: not known."""
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
    """Whether an entry of the watched directory may be, or become, a checkpoint."""
    if name.startswith("."):
        return False
    return not single_file or name.endswith(SINGLE_FILE_SUFFIXES)


def checkpoint_name(entry: str) -> str:
    """Return the entry's name, made valid for object keys. It keeps the suffix, by which programs recognise a file."""
    stem = _without_suffix(entry)
    suffix = entry.removeprefix(stem)
    name = re.sub(r"[^A-Za-z0-9._=+-]", "-", stem).lstrip("._=+-") or "checkpoint"
    return name[: NAME_CHARACTERS - len(suffix)] + suffix


def step_of(entry: str) -> int | None:
    """Return the last number in a name, as in checkpoint-1200 or epoch=3-step=1200.ckpt; None if it can be no step."""
    numbers = re.findall(r"[0-9]+", _without_suffix(entry))
    step = int(numbers[-1]) if numbers else None
    return step if step is not None and step <= STEP else None


def _without_suffix(entry: str) -> str:
    suffix = next((suffix for suffix in SINGLE_FILE_SUFFIXES if entry.endswith(suffix)), "")
    return entry.removesuffix(suffix)
