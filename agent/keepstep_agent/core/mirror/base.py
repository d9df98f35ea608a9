"""What the newest snapshot of this volume holds, file by file: the base of the next one.

Kept in the state directory, where restore and the agent write it and nobody else can. Without it the next snapshot
sends everything.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

import msgspec

from keepstep_agent.core.file_lists import FileEntries
from keepstep_agent.core.limits import FILES_PER_RANK, RECORD_BYTES, NameText, PathText
from keepstep_agent.core.model import FileEntry, Fingerprint, Owner, RankManifest, SnapshotId
from keepstep_agent.core.stored import checked_json
from keepstep_agent.core.stored.checked_json import UndecodableError
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


class HeldFiles(Mapping[str, HeldFile]):
    """The files that a snapshot holds, by path. Their entries are kept in columns."""

    def __init__(self, files: Iterable[HeldFile] = ()) -> None:
        self._positions: dict[str, int] = {}
        self._fingerprints: list[Fingerprint] = []
        self._entries = FileEntries(map(self._add, files))

    def _add(self, file: HeldFile) -> FileEntry:
        self._positions[file.entry.path] = len(self._fingerprints)
        self._fingerprints.append(file.fingerprint)
        return file.entry

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __contains__(self, path: object) -> bool:
        return path in self._positions

    def __getitem__(self, path: str) -> HeldFile:
        position = self._positions[path]
        return HeldFile(fingerprint=self._fingerprints[position], entry=self._entries[position])

    def looks(self) -> dict[str, Fingerprint]:
        """Return what each file looked like here."""
        return dict(zip(self._positions, self._fingerprints, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorBase:
    """The newest snapshot of this volume; `snapshot` is None if there is none yet. `files` are by path.

    `others`: files that restore brought from other nodes' snapshots, as they looked here. They are not part of this
    node's snapshots until they change. `links`: the symbolic links of the snapshot, with their targets. `pending`: the
    saves of later snapshots of this volume, which may be committed.
    """

    snapshot: SnapshotId | None = None
    files: HeldFiles = field(default_factory=HeldFiles)
    others: Mapping[str, Fingerprint] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()


class _Other(msgspec.Struct, forbid_unknown_fields=True):
    path: PathText
    fingerprint: Fingerprint


class _Base(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: Literal[1]
    snapshot: SnapshotId | None
    # Each is a `HeldFile`. They are decoded one by one, because decoded ones take much memory.
    files: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=FILES_PER_RANK)]
    others: Annotated[tuple[_Other, ...], msgspec.Meta(max_length=FILES_PER_RANK)]
    links: Annotated[dict[PathText, PathText], msgspec.Meta(max_length=FILES_PER_RANK)]
    pending: Annotated[frozenset[NameText], msgspec.Meta(max_length=FILES_PER_RANK)]
    crc32: str = ""


_HELD_DECODER: Final = msgspec.json.Decoder(HeldFile)


def encode_base(base: MirrorBase) -> Iterator[bytes]:
    """Yield the encoding in pieces."""
    files: Any = map(base.files.__getitem__, sorted(base.files))
    return checked_json.encoded(
        _Base(
            format=1,
            snapshot=base.snapshot,
            files=files,
            others=tuple(_Other(path, fingerprint) for path, fingerprint in sorted(base.others.items())),
            links=dict(sorted(base.links.items())),
            pending=frozenset(base.pending),
        )
    )


def decode_base(content: bytes) -> MirrorBase:
    """Raises UndecodableError."""
    value = checked_json.decode(content, _Base, limit_bytes=BASE_FILE_BYTES)
    try:
        files = HeldFiles(map(_HELD_DECODER.decode, value.files))
    except (ValueError, RecursionError, OverflowError) as error:
        raise UndecodableError(str(error)) from error
    return MirrorBase(
        snapshot=value.snapshot,
        files=files,
        others={one.path: one.fingerprint for one in value.others},
        links=value.links,
        pending=value.pending,
    )


def held_files(manifest: RankManifest, looks: Mapping[str, Fingerprint]) -> Iterable[HeldFile]:
    """Yield what a snapshot holds of the files in `looks`, with an owner for each. Links are left out."""
    info = manifest.info
    # The same text as in `looks`, so that it is not in memory twice.
    paths = dict(zip(looks, looks, strict=True))
    for entry in manifest.files:
        path = paths.get(entry.path)
        if entry.link or path is None:
            continue
        owner = entry.owner or Owner(name=info.name, save=info.save, rank=manifest.rank, path=path)
        yield HeldFile(fingerprint=looks[path], entry=replace(entry, path=path, owner=owner))
