"""Decides what a framework's checkpoint directory must hold before it is complete, by its files' names and formats.

Owns the rules of each layout. Knows nothing of time: `directory_rules` checks that nothing changes any more.
Invariants: a layout that does not show its end is never complete. A layout with numbered ranks is never complete while
the number of ranks is unknown, because the files on this volume may be those of only one pod.

Orbax           `N.orbax-checkpoint-tmp` was renamed to `N`
DCP             `.metadata` is no older than any `.distcp` beside it, and all files that it names are there
Hugging Face    trainer_state.json parses and every rank's RNG state is there
Accelerate      every rank's random states are there: each rank writes them last
DeepSpeed       every rank's ZeRO optimizer state is there: each rank writes it last; `latest` is written too early
single file     the zip directory that ends a torch.save file is whole; a safetensors file is as long as its header says

Also defines the snapshot of a watched directory, which `adapters.volume.directory_scan` takes.
"""

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Proof(StrEnum):
    """Whether a file is complete, as its own format tells."""

    WHOLE = "whole"
    BROKEN = "broken"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSnapshot:
    """One file in a snapshot; `path` is relative to the candidate, with `/`.

    `names`: the files beside it that it lists as its own, as DCP's metadata does.
    """

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int
    proof: Proof
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySnapshot:
    """A candidate: one entry of the watched directory with everything below it.

    A single file has itself as its only file. `folders` are relative too. `seen_at` is in seconds of a monotonic clock.
    """

    name: str
    single_file: bool
    files: tuple[FileSnapshot, ...]
    folders: tuple[str, ...]
    seen_at: float

    @property
    def signature(self) -> str:
        """A hash that changes with any name, size, mtime or inode, and is stable across restarts of the agent."""
        digest = hashlib.blake2b(self.name.encode(errors="surrogateescape"), digest_size=16)
        for file in sorted(self.files, key=lambda file: file.path):
            line = f"\0{file.path}\0{file.size_bytes}\0{file.mtime_ns}\0{file.inode}"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    @property
    def newest_mtime_ns(self) -> int:
        return max((file.mtime_ns for file in self.files), default=0)


_ORBAX_TEMPORARY: Final = ".orbax-checkpoint-tmp"
# Orbax writes these only below a temporary name: where there is none, the rename has happened.
_ORBAX_FILES: Final = frozenset({"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"})
_DCP_METADATA: Final = ".metadata"
_TRAINER_STATE: Final = "trainer_state.json"
_HUGGING_FACE_RANK: Final = re.compile(r"rng_state(?:_(\d+))?\.pth")
_ACCELERATE_RANK: Final = re.compile(r"random_states_(\d+)\.pkl")
_DEEPSPEED_RANK: Final = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_DEEPSPEED_MODEL: Final = re.compile(r"[^/]*_model_states\.pt")
_RANK_FILES: Final = (_HUGGING_FACE_RANK, _ACCELERATE_RANK, _DEEPSPEED_RANK)
UNKNOWN_WORLD: Final = (
    "the number of its ranks is unknown, and these may be one pod's: set world_size to the job's number of ranks, "
    "or announce it"
)


def rank_files(snapshot: DirectorySnapshot) -> frozenset[FileSnapshot]:
    """Return the files of which each rank writes one, near the end of its save; none if the layout has no such files.

    Only files directly in the checkpoint count: in a subfolder they belong to what another framework still writes.
    """
    return frozenset(file for file in snapshot.files if any(pattern.fullmatch(file.path) for pattern in _RANK_FILES))


def missing(snapshot: DirectorySnapshot, world_size: int) -> str:
    """Return why a candidate is not complete, apart from recent changes; empty if it is. `world_size` 0: not known."""
    if not snapshot.files:
        return "it has no files"
    broken = next((file.path for file in snapshot.files if file.proof is Proof.BROKEN), "")
    if broken:
        return f"{broken} is cut short"
    if snapshot.single_file:
        whole = snapshot.files[0].proof is Proof.WHOLE
        return "" if whole else "its format does not show whether it is complete: announce it"
    temporary = [name for name in (snapshot.name, *snapshot.folders) if _ORBAX_TEMPORARY in name]
    if temporary or snapshot.name.startswith("tmp-"):
        return "it still has its temporary name"
    paths = {file.path for file in snapshot.files}
    folders = {_folder(path) for path in paths if path.endswith(".distcp")}
    unsealed = next((reason for folder in sorted(folders) if (reason := _missing_in_dcp(snapshot, folder))), "")
    if unsealed:
        return unsealed
    if _TRAINER_STATE in paths or _any_is(_HUGGING_FACE_RANK, paths):
        return _missing_in_hugging_face(snapshot, paths, world_size)
    if _any_is(_ACCELERATE_RANK, paths):
        return _missing_rank(paths, _ACCELERATE_RANK, "random_states_{}.pkl", world_size)
    if _any_is(_DEEPSPEED_RANK, paths) or _any_is(_DEEPSPEED_MODEL, paths):
        return _missing_in_deepspeed(paths, world_size)
    if "" in folders or any(path.rpartition("/")[2] in _ORBAX_FILES for path in paths):
        return ""
    return "its layout does not show when it is complete: announce it"


def _missing_in_dcp(snapshot: DirectorySnapshot, folder: str) -> str:
    """Check a DCP folder. `.metadata` is written last; if it is older than the data, a save is being overwritten."""
    here = [file for file in snapshot.files if _folder(file.path) == folder]
    metadata = next((file for file in here if file.path == folder + _DCP_METADATA), None)
    if metadata is None:
        return f"{folder}{_DCP_METADATA} is not written yet"
    newer = next(
        (file.path for file in here if file.path.endswith(".distcp") and file.mtime_ns > metadata.mtime_ns), ""
    )
    if newer:
        return f"{newer} is newer than {metadata.path}"
    # Files of other pods' ranks are on other volumes, so such a checkpoint is incomplete here.
    absent = min({folder + name for name in metadata.names} - {file.path for file in here}, default="")
    return f"{absent}, which {metadata.path} names, is missing" if absent else ""


def _missing_in_hugging_face(snapshot: DirectorySnapshot, paths: Collection[str], world_size: int) -> str:
    proof = next((file.proof for file in snapshot.files if file.path == _TRAINER_STATE), None)
    if proof is Proof.NONE:
        return f"{_TRAINER_STATE} is too large to read: announce it"
    if proof is not Proof.WHOLE:
        return f"{_TRAINER_STATE} is not written yet"
    # A single process writes rng_state.pth; several processes number theirs.
    if "rng_state.pth" in paths and "rng_state_0.pth" not in paths:
        return ""
    if world_size == 1 or (world_size == 0 and not _any_is(_HUGGING_FACE_RANK, paths)):
        return "rng_state.pth is not written yet"
    return _missing_rank(paths, _HUGGING_FACE_RANK, "rng_state_{}.pth", world_size)


def _missing_in_deepspeed(paths: Collection[str], world_size: int) -> str:
    """Check the optimizer states of all ranks. Each file name holds a data parallel and a model parallel rank."""
    places = {(int(found[1]), int(found[2])) for path in paths if (found := _DEEPSPEED_RANK.fullmatch(path))}
    if not places:
        return "no ZeRO optimizer state is written yet; without ZeRO its layout shows no end: announce it"
    if world_size == 0:
        return UNKNOWN_WORLD
    shown = (1 + max(data for data, _ in places)) * (1 + max(model for _, model in places))
    if shown > world_size:
        return _too_many(shown, world_size)
    if len(places) < world_size:
        return f"{len(places)} of {world_size} ranks have written their optimizer states"
    return ""


def _missing_rank(paths: Collection[str], pattern: re.Pattern[str], name: str, world_size: int) -> str:
    if world_size == 0:
        return UNKNOWN_WORLD
    shown = max((1 + int(found[1]) for path in paths if (found := pattern.fullmatch(path)) and found[1]), default=0)
    if shown > world_size:
        return _too_many(shown, world_size)
    wanted = (name.format(rank) for rank in range(world_size))
    absent = next((path for path in wanted if path not in paths), "")
    return f"{absent} is not written yet" if absent else ""


def _too_many(shown: int, world_size: int) -> str:
    return f"{shown} ranks wrote it, world_size is {world_size}: set it to the job's number of ranks, or announce it"


def _any_is(pattern: re.Pattern[str], paths: Collection[str]) -> bool:
    return any(pattern.fullmatch(path) for path in paths)


def _folder(path: str) -> str:
    head, slash, _ = path.rpartition("/")
    return head + slash
