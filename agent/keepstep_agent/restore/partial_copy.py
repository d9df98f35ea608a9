"""Brings a committed checkpoint to the volume piece by piece: what a reader asks for, and nothing else.

Owns `.keepstep/incoming/<save>`, which holds the checkpoint's files at their full size, with holes where nothing has
arrived. A piece is one part of a file, or a pack of small files. Invariants: a piece counts as here only after its
bytes in that folder had the manifest's checksums; a file that is a hard link to one of the trainer's is whole and
verified, and is never written to; the checkpoint gets its place only when all pieces are here and on disk.

Not every byte is fetched. What an agent that was killed has brought is verified and kept, and so are files that this
pod itself contributed to the checkpoint, if they still lie in its place.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.durable_files import write_all
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.adapters.volume.shared_folders import share_tree
from keepstep_agent.adapters.volume.shared_volume import Folder, open_volume
from keepstep_agent.catalog.fetching import PACKS_AT_ONCE, StoredPack, fetch_pack, fetch_part, packs_at_once, packs_of
from keepstep_agent.catalog.reading import CommittedCheckpoint, StoredFile
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.model import Part, RankManifest
from keepstep_agent.ports import StoreReader
from keepstep_agent.restore.download import check_room, open_to_write, sync_folders
from keepstep_agent.restore.local_copy import LocalCopies

_READ_BYTES: Final = 1024**2
_Result = TypeVar("_Result")

log = structlog.get_logger("keepstep.fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Bytes of one file. `length_bytes` 0: to the end of the file."""

    path: str
    offset_bytes: int = 0
    length_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What is fetched with one request: part `number` of the file `name`, or, with number 0, the pack `name`."""

    name: str
    number: int


class PartialCopy:
    """One checkpoint on its way to the volume. `disk` has one thread. Call `prepare` first."""

    def __init__(
        self, store: StoreReader, checkpoint: CommittedCheckpoint, local: LocalCopies, volume: Path, disk: Executor
    ) -> None:
        self.checkpoint = checkpoint
        self._store = store
        self._local = local
        self._volume = volume
        self._disk = disk
        self._files = {file.entry.path: file for file in checkpoint.files}
        self._packs = {pack.key: pack for pack in packs_of(checkpoint.files)}
        self._here: set[Piece] = set()
        self._coming: dict[Piece, asyncio.Task[None]] = {}
        # A pack is in memory while it arrives.
        self._pack_slots = asyncio.Semaphore(packs_at_once(self._packs.values(), most=PACKS_AT_ONCE))
        # Files that were made empty here, in which nothing needs to be looked for.
        self._new: set[str] = set()
        self._opened: set[str] = set()
        self._has_own = False
        self._has_linked_own = False
        self._is_in_place = False

    @property
    def path(self) -> Path:
        """Where to read: the checkpoint's place, or the folder with what has arrived."""
        return self.place if self._is_in_place else self._volume / self._local.incoming(self.checkpoint)

    @property
    def place(self) -> Path:
        """Where the whole checkpoint has its place."""
        return self._local.place(self.checkpoint)

    @property
    def files(self) -> Sequence[str]:
        """The paths of all files, relative to the checkpoint."""
        return list(self._files)

    @property
    def is_in_place(self) -> bool:
        """Whether all of it is on disk, under its name in the checkpoint directory."""
        return self._is_in_place

    def pieces_of(self, ranges: Iterable[FileRange]) -> list[Piece]:
        """Return the pieces that hold these ranges, each once. Raises RequestError for a file that it does not have."""
        found: dict[Piece, None] = {}
        for one in ranges:
            file = self._files.get(one.path)
            if file is None:
                raise RequestError(
                    ErrorKind.FILE_MISSING,
                    f"{self.checkpoint.marker.info.name} has no file {one.path!r}",
                    hint="ask for paths that are relative to the checkpoint",
                )
            found.update(dict.fromkeys(_pieces(file, one.offset_bytes, one.length_bytes)))
        return list(found)

    def all_pieces(self) -> list[Piece]:
        return list(dict.fromkeys(piece for file in self.checkpoint.files for piece in _pieces(file)))

    def contribution(self, number: int) -> list[Piece]:
        """Return the pieces of the files in one manifest; the manifests are numbered in the order of their ranks."""
        groups = _by_agent(self.checkpoint)
        if number >= len(groups):
            return []
        paths = {file.path for one in groups[number] for file in one.files}
        return list(
            dict.fromkeys(piece for path in paths if path in self._files for piece in _pieces(self._files[path]))
        )

    def size_bytes(self, piece: Piece) -> int:
        if not piece.number:
            return self._packs[piece.name].size_bytes
        return _part(self._files[piece.name], piece.number).size_bytes

    def has(self, piece: Piece) -> bool:
        return self._is_in_place or piece in self._here

    async def prepare(self) -> None:
        """Make the folder, and remove what was brought of other checkpoints. Raises VolumeError."""
        await self._on_disk(partial(self._local.prepare, keep=self.checkpoint.marker.info.save))
        await self._on_disk(self._make_folders)
        self._has_own = await self._on_disk(partial(self._local.is_recorded, self.checkpoint))

    async def take_place_if_whole(self) -> bool:
        """Whether the checkpoint is in its place already, with every byte as it was written."""
        if not self._is_in_place and await self._on_disk(partial(self._local.holds, self.checkpoint)):
            await self._on_disk(partial(self._local.record, self.checkpoint))
            self._is_in_place = True
        return self._is_in_place

    async def check_room(self, pieces: Sequence[Piece], size_limit_bytes: int) -> None:
        """Raise VolumeError(DISK_FULL) if there is no room for these pieces. `size_limit_bytes` 0: none."""
        if self._has_own and not self._has_linked_own:
            await self._on_disk(self._link_all_own)
            self._has_linked_own = True
        missing_bytes = sum(self.size_bytes(piece) for piece in pieces if piece not in self._here)
        name = self.checkpoint.marker.info.name
        await self._on_disk(partial(check_room, name, missing_bytes, self._volume, size_limit_bytes))

    async def bring(self, piece: Piece) -> None:
        """Fetch and verify a piece unless it is here. Raises StoreError or VolumeError.

        Never twice at a time: what was verified must not be written to again.
        """
        while not self.has(piece):
            coming = self._coming.get(piece)
            if coming is not None:
                await asyncio.wait({coming})
                continue
            coming = self._coming[piece] = asyncio.create_task(self._bring(piece))
            try:
                await coming
            finally:
                coming.cancel()
                await asyncio.wait({coming})
                del self._coming[piece]

    async def _bring(self, piece: Piece) -> None:
        if piece.number:
            await self._bring_part(self._files[piece.name], piece)
        else:
            async with self._pack_slots:
                await self._bring_pack(self._packs[piece.name])
        self._here.add(piece)

    async def make_durable(self) -> None:
        """Write the whole checkpoint to disk; all pieces are here. Raises VolumeError."""
        assert all(map(self.has, self.all_pieces())), "pieces are missing"
        await self._on_disk(self._make_durable)

    async def put_in_place(self) -> None:
        """Give the whole checkpoint its place; all pieces are here. Raises VolumeError."""
        if not self._is_in_place:
            await self.make_durable()
            await self._on_disk(partial(self._local.install, self.checkpoint))
            self._is_in_place = True

    async def _bring_part(self, file: StoredFile, piece: Piece) -> None:
        part = _part(file, piece.number)
        if await self._on_disk(partial(self._finds, file, part)):
            return
        opening = asyncio.ensure_future(self._on_disk(partial(self._open, file, part)))
        try:
            await fetch_part(self._store, file, part, await asyncio.shield(opening))
        finally:
            # Also if this was cancelled while the thread still opened it.
            await asyncio.wait({opening})
            if not opening.exception():
                await self._on_disk(partial(os.close, opening.result()))

    async def _bring_pack(self, pack: StoredPack) -> None:
        if await self._on_disk(lambda: all(self._finds_whole(file) for file in pack.files)):
            return
        body = await fetch_pack(self._store, pack)
        await self._on_disk(partial(self._write, pack, body))

    def _finds(self, file: StoredFile, part: Part) -> bool:
        """Whether the part lies in its file already; makes the file. Blocks."""
        path = file.entry.path
        try:
            with open_volume(self._volume) as root, root.folder(self._local.incoming(self.checkpoint)) as folder:
                if path not in self._opened:
                    self._open_first(root, folder, file)
                    self._opened.add(path)
                if Piece(path, part.number) in self._here:
                    return True
                if path in self._new:
                    return False
                with folder.opened_file(path) as descriptor:
                    return _checksum(descriptor, part) == file.entry.checksums[part.number - 1]
        except OSError as error:
            raise volume_error(error, f"making room for {path} in {self._volume}") from error

    def _open_first(self, root: Folder, folder: Folder, file: StoredFile) -> None:
        """Find out what there is of a file: what an earlier agent brought, this pod's own copy, or nothing."""
        path, size_bytes = file.entry.path, file.entry.size_bytes
        if folder.exists(path):
            status = folder.status(path)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_size == size_bytes and status.st_nlink == 1
            if is_ours or self._keep_if_whole(folder, file):
                return
            folder.remove(path)
        elif self._link_own(root, folder, file):
            return
        with folder.opened_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            os.ftruncate(descriptor, size_bytes)
        self._new.add(path)

    def _link_own(self, root: Folder, folder: Folder, file: StoredFile) -> bool:
        """Link the file in the checkpoint's place, if this pod has contributed it and it is whole."""
        if not self._has_own:
            return False
        try:
            with root.opened_file(self._local.path_of(self.checkpoint, file)) as descriptor:
                folder.link_open_file(descriptor, file.entry.path)
        except OSError:
            # It is gone, or the kernel does not let this user link it: it is fetched.
            return False
        if self._keep_if_whole(folder, file):
            return True
        folder.unlink(file.entry.path)
        return False

    def _keep_if_whole(self, folder: Folder, file: StoredFile) -> bool:
        """Note all pieces of a linked file as here if every byte is as it was written."""
        if not _is_whole(folder, file):
            return False
        self._here.update(_pieces(file))
        return True

    def _link_all_own(self) -> None:
        try:
            with open_volume(self._volume) as root, root.folder(self._local.incoming(self.checkpoint)) as folder:
                for path, file in self._files.items():
                    if not folder.exists(path) and self._link_own(root, folder, file):
                        self._opened.add(path)
        except OSError as error:
            raise volume_error(error, f"reading this pod's own files of {self.checkpoint.marker.info.name}") from error

    def _finds_whole(self, file: StoredFile) -> bool:
        try:
            with open_volume(self._volume) as root, root.folder(self._local.incoming(self.checkpoint)) as folder:
                return _is_whole(folder, file) or self._link_own(root, folder, file)
        except OSError as error:
            raise volume_error(error, f"reading {file.entry.path} in {self._volume}") from error

    def _open(self, file: StoredFile, part: Part) -> int:
        try:
            with open_volume(self._volume) as root, root.folder(self._local.incoming(self.checkpoint)) as folder:
                # Readable, because libc reads where a filesystem cannot allocate by itself.
                with folder.opened_file(file.entry.path, os.O_RDWR) as descriptor:
                    os.posix_fallocate(descriptor, part.offset_bytes, part.size_bytes)
                return open_to_write(folder, file.entry.path, file.entry.size_bytes)
        except OSError as error:
            raise volume_error(error, f"opening {file.entry.path}") from error

    def _write(self, pack: StoredPack, body: bytes) -> None:
        try:
            with open_volume(self._volume) as root, root.folder(self._local.incoming(self.checkpoint)) as folder:
                for file in pack.files:
                    folder.unlink(file.entry.path)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                    with folder.opened_file(file.entry.path, flags) as descriptor:
                        write_all(descriptor, pack.content(body, file), 0)
        except OSError as error:
            raise volume_error(error, f"writing the files of {pack.key}") from error

    def _make_folders(self) -> None:
        """Make the folder with all below it, and the files that have no bytes."""
        try:
            with open_volume(self._volume) as root, root.make_folder(self._local.incoming(self.checkpoint)) as folder:
                for above in {path.rpartition("/")[0] for path in self._files} - {""}:
                    folder.make_folder(above).close()
                for path, file in self._files.items():
                    if not file.entry.size_bytes and not file.entry.place:
                        folder.remove(path)
                        os.close(folder.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError as error:
            raise volume_error(
                error, f"making room for {self.checkpoint.marker.info.name} in {self._volume}"
            ) from error

    def _make_durable(self) -> None:
        try:
            with open_volume(self._volume) as root, root.folder(self._local.incoming(self.checkpoint)) as folder:
                for path in self._files:
                    with folder.opened_file(path) as descriptor:
                        os.fsync(descriptor)
                sync_folders(folder, str(self.path))
                share_tree(folder, root)
        except OSError as error:
            raise volume_error(error, f"writing {self.path}") from error

    async def _on_disk(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


def _pieces(file: StoredFile, offset_bytes: int = 0, length_bytes: int = 0) -> Iterable[Piece]:
    entry = file.entry
    if entry.place:
        return (Piece(file.key, 0),)
    end_bytes = min(offset_bytes + length_bytes, entry.size_bytes) if length_bytes else entry.size_bytes
    if end_bytes <= offset_bytes:
        return ()
    numbers = range(offset_bytes // entry.part_size_bytes, -(-end_bytes // entry.part_size_bytes))
    return (Piece(entry.path, number + 1) for number in numbers)


def _part(file: StoredFile, number: int) -> Part:
    offset_bytes = (number - 1) * file.entry.part_size_bytes
    return Part(
        number=number,
        offset_bytes=offset_bytes,
        size_bytes=min(file.entry.part_size_bytes, file.entry.size_bytes - offset_bytes),
    )


def _by_agent(checkpoint: CommittedCheckpoint) -> Sequence[Sequence[RankManifest]]:
    """Return the ranks' parts of each agent, in the order of the ranks."""
    ranks = {one.rank: one for one in checkpoint.manifests}
    references = sorted(checkpoint.marker.manifests, key=lambda one: one.first_rank)
    firsts = [one.first_rank for one in references]
    ends = [*firsts[1:], checkpoint.marker.info.world_size]
    return [
        [ranks[rank] for rank in range(first, end) if rank in ranks] for first, end in zip(firsts, ends, strict=True)
    ]


def _is_whole(folder: Folder, file: StoredFile) -> bool:
    path, entry = file.entry.path, file.entry
    if not folder.exists(path):
        return False
    status = folder.status(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size_bytes:
        return False
    with folder.opened_file(path) as descriptor:
        return all(
            _checksum(descriptor, part) == checksum
            for part, checksum in zip(entry.parts(), entry.checksums, strict=True)
        )


def _checksum(descriptor: int, part: Part) -> int:
    checksum = 0
    for at in range(part.offset_bytes, part.offset_bytes + part.size_bytes, _READ_BYTES):
        size_bytes = min(_READ_BYTES, part.offset_bytes + part.size_bytes - at)
        checksum = crc64nvme(os.pread(descriptor, size_bytes, at), checksum)
    return checksum
