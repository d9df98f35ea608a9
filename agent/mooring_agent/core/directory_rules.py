"""When a checkpoint of a program that never calls us is complete, judged from what its directory shows.

Owns the rules of each layout; knows nothing of how names, sizes and proofs were read. Invariants: an unknown layout is
never complete; a doubt is "not yet", with the reason for people; and nothing is complete before it has been quiet.

Orbax           `N.orbax-checkpoint-tmp` was renamed to `N`
DCP             `.metadata` is no older than any `.distcp` beside it
Hugging Face    trainer_state.json parses and every rank's RNG state is there
single file     the zip directory that ends a torch.save file is whole; a safetensors file is as long as its header says
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_ORBAX_TEMPORARY: Final = ".orbax-checkpoint-tmp"
# Orbax writes them below a temporary name alone: without one, the rename has happened.
_ORBAX_FILES: Final = frozenset({"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"})
_DCP_METADATA: Final = ".metadata"
_TRAINER_STATE: Final = "trainer_state.json"
_RNG_STATE: Final = re.compile(r"rng_state(_\d+)?\.pth")
_NAME_LIMIT: Final = 128

LARGEST_STEP: Final = 2**64 - 1
"""What the wire can carry."""

SINGLE_FILE_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".safetensors")
"""A file of this kind directly in the watched directory is a checkpoint by itself."""


class Proof(StrEnum):
    """What a file's own format says of its end."""

    WHOLE = "whole"
    BROKEN = "broken"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSnapshot:
    """One file as it was seen; `path` is relative to the candidate, with `/`."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int
    proof: Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySnapshot:
    """A candidate: one entry of the watched directory with everything below it.

    A single file has itself as its only file. `folders` are relative too. `seen_at` is seconds of a steady clock.
    """

    name: str
    single_file: bool
    files: tuple[FileSnapshot, ...]
    folders: tuple[str, ...]
    seen_at: float

    @property
    def signature(self) -> str:
        """Changes whenever a name, a size, an mtime or an inode does; the same across restarts of the agent."""
        digest = hashlib.blake2b(self.name.encode(errors="surrogateescape"), digest_size=16)
        for file in sorted(self.files, key=lambda file: file.path):
            line = f"\0{file.path}\0{file.size_bytes}\0{file.mtime_ns}\0{file.inode}"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    @property
    def newest_mtime_ns(self) -> int:
        return max((file.mtime_ns for file in self.files), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one look leaves for the next; the `complete_` ones are of the last content that was complete."""

    signature: str
    unchanged_since: float
    complete_signature: str
    complete_rng_states: frozenset[FileSnapshot]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`reason` says why a candidate is not complete; `step` is None when its name has no number.

    `rng_states` is how many ranks the checkpoint shows, 0 where its layout does not show it: the next one's world size.
    """

    complete: bool
    quiet: bool
    name: str
    step: int | None
    reason: str
    rng_states: int
    observation: Observation


def judge(
    snapshot: DirectorySnapshot,
    previous: Observation | None,
    *,
    quiet_seconds: float,
    world_size: int,
    superseded: bool,
) -> Verdict:
    """Whether a candidate is a complete checkpoint now.

    `world_size` 0: not known. `superseded`: a later save has begun, so every rank has left this one (`has_successor`).
    """
    signature = snapshot.signature
    unchanged = previous is not None and previous.signature == signature
    since = previous.unchanged_since if previous is not None and unchanged else snapshot.seen_at
    quiet = unchanged and snapshot.seen_at - since >= quiet_seconds
    rng_states = frozenset(file for file in snapshot.files if _RNG_STATE.fullmatch(file.path))
    before = (previous.complete_signature, previous.complete_rng_states) if previous else ("", frozenset())
    reason = _missing(snapshot, world_size or (len(rng_states) if superseded else 0))
    if not reason and signature != before[0] and rng_states & before[1]:
        reason = "it is being written again, and some ranks have not written it again yet"
    if not reason and not quiet:
        reason = f"still changing, or quiet for less than {quiet_seconds:g} s"
    return Verdict(
        complete=not reason,
        quiet=quiet,
        name=checkpoint_name(snapshot.name),
        step=step_of(snapshot.name),
        reason=reason,
        rng_states=len(rng_states),
        observation=Observation(
            signature=signature,
            unchanged_since=since,
            complete_signature=before[0] if reason else signature,
            complete_rng_states=before[1] if reason else rng_states,
        ),
    )


def candidate(name: str, *, single_file: bool) -> bool:
    """Whether an entry of the watched directory may be a checkpoint at all, or become one."""
    if name.startswith("."):
        return False
    return not single_file or name.endswith(SINGLE_FILE_SUFFIXES)


def checkpoint_name(entry: str) -> str:
    """A name fit for object keys; without a file's suffix, so that a restore never takes the trainer's file name."""
    name = re.sub(r"[^A-Za-z0-9._=+-]", "-", _without_suffix(entry)).lstrip("._=+-")
    return name[:_NAME_LIMIT] or "checkpoint"


def step_of(entry: str) -> int | None:
    """The last number in a name: checkpoint-1200, epoch=3-step=1200.ckpt; None if there is none that can be a step."""
    numbers = re.findall(r"[0-9]+", _without_suffix(entry))
    step = int(numbers[-1]) if numbers else None
    return step if step is not None and step <= LARGEST_STEP else None


def has_successor(snapshot: DirectorySnapshot, others: Iterable[DirectorySnapshot]) -> bool:
    """Whether a later save of the same series has begun: a higher step, and written to after this one."""
    step, series = step_of(snapshot.name), _series(snapshot.name)
    return step is not None and any(
        _series(other.name) == series
        and (step_of(other.name) or 0) > step
        and other.newest_mtime_ns > snapshot.newest_mtime_ns
        for other in others
    )


def _missing(snapshot: DirectorySnapshot, world_size: int) -> str:
    """What keeps a candidate from being complete, apart from quiet; empty when nothing does."""
    if not snapshot.files:
        return "it has no files"
    broken = next((file.path for file in snapshot.files if file.proof is Proof.BROKEN), "")
    if broken:
        return f"{broken} is cut short"
    if snapshot.single_file:
        whole = snapshot.files[0].proof is Proof.WHOLE
        return "" if whole else "its format does not show whether it is whole: announce it"
    temporary = [name for name in (snapshot.name, *snapshot.folders) if _ORBAX_TEMPORARY in name]
    if temporary or snapshot.name.startswith("tmp-"):
        return "it still has its temporary name"
    paths = {file.path for file in snapshot.files}
    folders = {_folder(path) for path in paths if path.endswith(".distcp")}
    unsealed = next((reason for folder in sorted(folders) if (reason := _missing_in_dcp(snapshot, folder))), "")
    if unsealed:
        return unsealed
    if _TRAINER_STATE in paths or any(_RNG_STATE.fullmatch(path) for path in paths):
        return _missing_in_hugging_face(snapshot, paths, world_size)
    if "" in folders or any(path.rpartition("/")[2] in _ORBAX_FILES for path in paths):
        return ""
    return "its layout is not one that shows when it is complete: announce it"


def _missing_in_dcp(snapshot: DirectorySnapshot, folder: str) -> str:
    """`.metadata` is written last; one that is older than the data is left from what is being overwritten."""
    here = [file for file in snapshot.files if _folder(file.path) == folder]
    metadata = next((file for file in here if file.path == folder + _DCP_METADATA), None)
    if metadata is None:
        return f"{folder}{_DCP_METADATA} is not written yet"
    newer = next(
        (file.path for file in here if file.path.endswith(".distcp") and file.mtime_ns > metadata.mtime_ns), ""
    )
    return f"{newer} is newer than {metadata.path}" if newer else ""


def _missing_in_hugging_face(snapshot: DirectorySnapshot, paths: Collection[str], world_size: int) -> str:
    proof = next((file.proof for file in snapshot.files if file.path == _TRAINER_STATE), None)
    if proof is not Proof.WHOLE:
        return f"{_TRAINER_STATE} is not written yet"
    if world_size <= 1 and "rng_state.pth" in paths:
        return ""
    if world_size == 1:
        return "rng_state.pth is not written yet"
    if world_size == 0:
        return "it is not known how many ranks write it, and no later save has begun: set WORLD_SIZE or announce it"
    wanted = (f"rng_state_{rank}.pth" for rank in range(world_size))
    absent = next((path for path in wanted if path not in paths), "")
    return f"{absent} is not written yet" if absent else ""


def _folder(path: str) -> str:
    head, slash, _ = path.rpartition("/")
    return head + slash


def _series(name: str) -> str:
    return re.sub(r"[0-9]+", "#", _without_suffix(name))


def _without_suffix(entry: str) -> str:
    suffix = next((suffix for suffix in SINGLE_FILE_SUFFIXES if entry.endswith(suffix)), "")
    return entry.removesuffix(suffix)
