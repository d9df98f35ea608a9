"""An object store as values: what is where, what lands late, what is forgotten. Knows nothing of agents or time.

A file's content is the name of its bytes, so a key that is ever written with two contents is seen at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from zlib import crc32

from keepstep_agent.core.model import ManifestReference, RankManifest, SaveInfo
from keepstep_agent.core.stored.commit import largest_disjoint, manifest_key_of, missing_files, missing_packs
from keepstep_agent.core.stored.manifest import commit_marker, encode_manifest, encode_marker
from keepstep_agent.core.stored.object_layout import file_key, manifests_prefix, marker_key, pack_key, save_prefix
from keepstep_agent.core.stored.packs_and_parts import Pack


class ViolationError(Exception):
    """An invariant does not hold: of the core, or of the simulation."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    content: object
    size_bytes: int


@dataclass(slots=True)
class Upload:
    """A multipart upload. `landed_late`: its creation was nobody's any more when it took effect."""

    key: str
    landed_late: bool
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)


def content_of(save: str, path: str, number: int = 0) -> str:
    return f"{save}/{path}#{number}"


def pack_content(save: str, pack: Pack) -> tuple[str, ...]:
    """An archive's bytes say which files it has and where."""
    placed = zip(pack.files, pack.offsets_bytes, strict=True)
    return tuple(f"{content_of(save, file.path)} at {offset_bytes}" for file, offset_bytes in placed)


def receipt_of(content: str) -> str:
    return f"receipt-{content}"


def checksum_of(content: str) -> int:
    return crc32(content.encode())


@dataclass(slots=True)
class StoreModel:
    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    committed: dict[str, SaveInfo] = field(default_factory=dict)
    _next_upload: int = 1

    @property
    def upload_count(self) -> int:
        """Uploads begun so far, plus one: the number of the next."""
        return self._next_upload

    def put(self, key: str, content: object, size_bytes: int) -> None:
        known = self.objects.get(key)
        if known is not None and known.content != content:
            raise ViolationError(f"{key} was written with other bytes than before")
        self.objects[key] = StoredObject(content, size_bytes)

    def create_upload(self, key: str, *, landed_late: bool) -> str:
        token = f"u{self._next_upload}"
        self._next_upload += 1
        self.uploads[token] = Upload(key, landed_late)
        return token

    def put_part(self, token: str, number: int, content: str, size_bytes: int) -> bool:
        """False: the upload is unknown."""
        upload = self.uploads.get(token)
        if upload is None:
            return False
        upload.parts[number] = (receipt_of(content), size_bytes)
        return True

    def complete_upload(self, token: str, receipts: tuple[str, ...], content: str, size_bytes: int) -> bool:
        """False: the upload is unknown."""
        upload = self.uploads.get(token)
        if upload is None:
            return False
        held = tuple(upload.parts[number][0] for number in sorted(upload.parts))
        if held != receipts:
            raise ViolationError(f"{upload.key} was completed of {receipts}, but holds {held}")
        self.put(upload.key, content, size_bytes)
        del self.uploads[token]
        return True

    def abort_upload(self, token: str) -> None:
        self.uploads.pop(token, None)

    def sizes(self, info: SaveInfo) -> dict[str, int]:
        prefix = save_prefix(info)
        return {key: found.size_bytes for key, found in self.objects.items() if key.startswith(prefix)}

    def put_manifest(self, ranks: tuple[RankManifest, ...]) -> None:
        self.put(manifest_key_of(ranks), ranks, len(encode_manifest(ranks)))

    def manifests(self, info: SaveInfo) -> list[Sequence[RankManifest]]:
        """Those that a marker would name."""
        prefix = manifests_prefix(info)
        stored = [found.content for key, found in self.objects.items() if key.startswith(prefix)]
        return largest_disjoint(cast("list[Sequence[RankManifest]]", stored))

    def ranks(self, info: SaveInfo) -> dict[int, RankManifest]:
        return {one.rank: one for ranks in self.manifests(info) for one in ranks}

    def marker_body(self, info: SaveInfo) -> bytes:
        """As the committer makes it; every manifest must be there."""
        references = []
        for ranks in self.manifests(info):
            encoded = encode_manifest(ranks)
            references.append(
                ManifestReference(
                    first_rank=ranks[0].rank,
                    rank_count=len(ranks),
                    size_bytes=len(encoded),
                    checksum=crc32(encoded),
                )
            )
        return encode_marker(commit_marker(list(self.ranks(info).values()), references))

    def put_marker(self, info: SaveInfo, body: bytes) -> None:
        self.put(marker_key(info), body, len(body))
        self.committed[info.save] = info
        self.check_committed(info)

    def check_committed(self, info: SaveInfo) -> None:
        """A marker implies every manifest and every file of every rank, with the content that manifests speak of."""
        manifests = self.ranks(info)
        if marker_key(info) not in self.objects:
            raise ViolationError(f"the marker of {info.save} has disappeared")
        if len(manifests) != info.world_size:
            raise ViolationError(f"{info.save} is committed with manifests of ranks {sorted(manifests)} alone")
        sizes = self.sizes(info)
        for manifest in manifests.values():
            missing = [*missing_files(manifest, sizes), *missing_packs(manifest, sizes)]
            if missing:
                raise ViolationError(f"{info.save} is committed without {missing}")
            for file in manifest.files:
                if file.place:
                    pack = self.objects[pack_key(info, manifest.rank, file.place.number)].content
                    assert isinstance(pack, tuple)
                    if f"{content_of(info.save, file.path)} at {file.place.offset_bytes}" not in pack:
                        raise ViolationError(f"{info.save} is committed with a pack that lacks {file.path}")
                elif self.objects[file_key(info, file.path)].content != content_of(info.save, file.path):
                    raise ViolationError(f"{info.save} is committed with other bytes of {file.path}")
                expected = tuple(checksum_of(content_of(info.save, file.path, part.number)) for part in file.parts())
                if tuple(file.checksums) != expected:
                    raise ViolationError(f"{info.save} is committed with wrong checksums of {file.path}")
