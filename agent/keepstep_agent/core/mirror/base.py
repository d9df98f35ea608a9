"""What the newest snapshot of this volume holds, file by file: the base of the next one.

Kept in the state directory, where restore and the agent write it and nobody else can. Without it the next snapshot
sends everything.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal

import msgspec

from keepstep_agent.core.limits import FILES_PER_RANK, RECORD_BYTES, NameText, PathText
from keepstep_agent.core.model import FileEntry, Fingerprint, Owner, RankManifest, SnapshotId
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.object_layout import SERIES

BASE_FILE: Final = "mirror.json"
"""The base's file in the state directory."""
BASE_FILE_BYTES: Final = RECORD_BYTES


def series_of(node_rank: int) -> str:
    """Return the series of a node's snapshots."""
    return f"{SERIES}{node_rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFile:
    """A file that a snapshot holds: what it looked like here, and its entry, with the owner of its bytes."""

    fingerprint: Fingerprint
    entry: FileEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorBase:
    """The newest snapshot of this volume; `snapshot` is None if there is none yet. `files` are by path.

    `others`: files that restore brought from other nodes' snapshots, as they looked here. They are not part of this
    node's snapshots until they change. `links`: the symbolic links of the snapshot, with their targets. `pending`: the
    saves of later snapshots of this volume, which may be committed.
    """

    snapshot: SnapshotId | None = None
    files: Mapping[str, HeldFile] = field(default_factory=dict)
    others: Mapping[str, Fingerprint] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()


class _Other(msgspec.Struct, forbid_unknown_fields=True):
    path: PathText
    fingerprint: Fingerprint


class _Base(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: Literal[1]
    snapshot: SnapshotId | None
    files: Annotated[tuple[HeldFile, ...], msgspec.Meta(max_length=FILES_PER_RANK)]
    others: Annotated[tuple[_Other, ...], msgspec.Meta(max_length=FILES_PER_RANK)]
    links: Annotated[dict[PathText, PathText], msgspec.Meta(max_length=FILES_PER_RANK)]
    pending: Annotated[frozenset[NameText], msgspec.Meta(max_length=FILES_PER_RANK)]


def encode_base(base: MirrorBase) -> bytes:
    return checked_json.encode(
        _Base(
            format=1,
            snapshot=base.snapshot,
            files=tuple(held for _, held in sorted(base.files.items())),
            others=tuple(_Other(path, fingerprint) for path, fingerprint in sorted(base.others.items())),
            links=dict(sorted(base.links.items())),
            pending=frozenset(base.pending),
        )
    )


def decode_base(content: bytes) -> MirrorBase:
    """Raises UndecodableError."""
    value = checked_json.decode(content, _Base, limit_bytes=BASE_FILE_BYTES)
    return MirrorBase(
        snapshot=value.snapshot,
        files={held.entry.path: held for held in value.files},
        others={one.path: one.fingerprint for one in value.others},
        links=value.links,
        pending=value.pending,
    )


def held_files(manifest: RankManifest, looks: Mapping[str, Fingerprint]) -> Iterable[HeldFile]:
    """Yield what a snapshot holds of the files in `looks`, with an owner for each. Links are left out."""
    info = manifest.info
    for entry in manifest.files:
        if entry.link or entry.path not in looks:
            continue
        owner = entry.owner or Owner(name=info.name, save=info.save, rank=manifest.rank, path=entry.path)
        yield HeldFile(fingerprint=looks[entry.path], entry=replace(entry, owner=owner))
