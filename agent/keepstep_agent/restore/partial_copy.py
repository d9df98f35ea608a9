"""Brings a committed checkpoint to the volume piece by piece: what a reader asks for, and nothing else.

Owns `.keepstep/incoming/<save>`, which holds the checkpoint's files at their full size, with holes where nothing has
arrived. Files are known by their positions in the checkpoint, pieces by their numbers. Invariants: a piece counts
as here only after its bytes in that folder had the manifest's checksums; a file that is a hard link to one of the
trainer's is whole and verified, and is never written to; the checkpoint gets its place only when all pieces are here
and on disk.

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
from keepstep_agent.catalog.fetching import PACKS_AT_ONCE, StoredPack, fetch_pack, fetch_part, packs_at_once
from keepstep_agent.catalog.reading import CommittedCheckpoint, StoredFile
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.file_lists import paths_of
from keepstep_agent.core.model import Part, RankManifest
from keepstep_agent.ports import StoreReader
from keepstep_agent.restore.download import check_room, open_to_write, sync_folders
from keepstep_agent.restore.local_copy import LocalCopies
from keepstep_agent.restore.pieces import Pieces, PieceSet, joined

_READ_BYTES: Final = 1024**2
_Result = TypeVar("_Result")

log = structlog.get_logger("keepstep.fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Bytes of one file. `length_bytes` 0: to the end of the file."""

    path: str
    offset_bytes: int = 0
    length_bytes: int = 0


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
        self.pieces = Pieces(checkpoint.files)
        self._here = PieceSet(len(self.pieces))
        self._coming: dict[int, asyncio.Task[None]] = {}
        # A pack is in memory while it arrives.
        self._pack_slots = asyncio.Semaphore(packs_at_once(self.pieces.packs, most=PACKS_AT_ONCE))
        # Of each file: whether it was made empty here, so that nothing needs to be looked for in it; and whether it was
        # looked at.
        self._new, self._opened = bytearray(len(checkpoint.files)), bytearray(len(checkpoint.files))
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
    def is_in_place(self) -> bool:
        """Whether all of it is on disk, under its name in the checkpoint directory."""
        return self._is_in_place

    def pieces_of(self, ranges: Sequence[FileRange]) -> list[range]:
        """Return the pieces that hold these ranges, in their order and each once.

        Raises RequestError for a file that it does not have.
        """
        positions = {path: self._position(path) for path in {one.path for one in ranges}}
        return self.pieces.distinct(
            self.pieces.of_file(positions[one.path], one.offset_bytes, one.length_bytes) for one in ranges
        )

    def _position(self, path: str) -> int:
        position = self.checkpoint.files.position(path)
        if position is None:
            raise RequestError(
                ErrorKind.FILE_MISSING,
                f"{self.checkpoint.marker.info.name} has no file {path!r}",
                hint="ask for paths that are relative to the checkpoint",
            )
        return position

    def all_pieces(self) -> range:
        return range(len(self.pieces))

    def contribution(self, number: int) -> list[range]:
        """Return the pieces of the files in one manifest; the manifests are numbered in the order of their ranks."""
        groups = _by_agent(self.checkpoint)
        if number >= len(groups):
            return []
        # As text, one wide character makes four bytes of each.
        paths = {path.encode() for one in groups[number] for path in paths_of(one.files)}
        return joined(
            self.pieces.of_file(position)
            for position, path in enumerate(self.checkpoint.files.paths())
            if path.encode() in paths
        )

    def missing(self, pieces: Iterable[range]) -> list[range]:
        """Return those of the pieces that are not here."""
        return list(self._here.missing(pieces))

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
            self._here.add(self.all_pieces())
        return self._is_in_place

    async def check_room(self, pieces: Iterable[range], size_limit_bytes: int) -> None:
        """Raise VolumeError(DISK_FULL) if there is no room for these pieces. `size_limit_bytes` 0: none."""
        if self._has_own and not self._has_linked_own:
            await self._on_disk(self._link_all_own)
            self._has_linked_own = True
        missing_bytes = self.pieces.size_bytes(self.missing(pieces))
        name = self.checkpoint.marker.info.name
        await self._on_disk(partial(check_room, name, missing_bytes, self._volume, size_limit_bytes))

    async def bring(self, piece: int) -> None:
        """Fetch and verify a piece unless it is here. Raises StoreError or VolumeError.

        Never twice at a time: what was verified must not be written to again.
        """
        while piece not in self._here:
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

    async def _bring(self, piece: int) -> None:
        number = self.pieces.pack_number(piece)
        if number is None:
            await self._bring_part(piece)
        else:
            async with self._pack_slots:
                await self._bring_pack(self.pieces.packs[number])
        self._here.add(range(piece, piece + 1))

    async def make_durable(self) -> None:
        """Write the whole checkpoint to disk; all pieces are here. Raises VolumeError."""
        assert not self.missing([self.all_pieces()]), "pieces are missing"
        await self._on_disk(self._make_durable)

    async def put_in_place(self) -> None:
        """Give the whole checkpoint its place; all pieces are here. Raises VolumeError."""
        if not self._is_in_place:
            await self.make_durable()
            await self._on_disk(partial(self._local.install, self.checkpoint))
            self._is_in_place = True

    async def _bring_part(self, piece: int) -> None:
        position, part = self.pieces.part(piece)
        file = self.checkpoint.files[position]
        if await self._on_disk(partial(self._finds, piece, position, file, part)):
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
        if await self._on_disk(lambda: all(map(self._finds_whole, pack.files))):
            return
        body = await fetch_pack(self._store, pack)
        await self._on_disk(partial(self._write, pack, body))

    def _finds(self, piece: int, position: int, file: StoredFile, part: Part) -> bool:
        """Whether the part lies in its file already; makes the file. Blocks."""
        path = file.entry.path
        try:
            with open_volume(self._volume) as root, root.folder(self._local.incoming(self.checkpoint)) as folder:
                if not self._opened[position]:
                    self._open_first(root, folder, position, file)
                    self._opened[position] = True
                if piece in self._here:
                    return True
                if self._new[position]:
                    return False
                with folder.opened_file(path) as descriptor:
                    return _checksum(descriptor, part) == file.entry.checksums[part.number - 1]
        except OSError as error:
            raise volume_error(error, f"making room for {path} in {self._volume}") from error

    def _open_first(self, root: Folder, folder: Folder, position: int, file: StoredFile) -> None:
        """Find out what there is of a file: what an earlier agent brought, this pod's own copy, or nothing."""
        path, size_bytes = file.entry.path, file.entry.size_bytes
        if folder.exists(path):
            status = folder.status(path)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_size == size_bytes and status.st_nlink == 1
            if is_ours:
                return
            if _is_whole(folder, file):
                self._here.add(self.pieces.of_file(position))
                return
            folder.remove(path)
        elif self._link_own(root, folder, file):
            self._here.add(self.pieces.of_file(position))
            return
        with folder.opened_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            os.ftruncate(descriptor, size_bytes)
        self._new[position] = True

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
        if _is_whole(folder, file):
            return True
        folder.unlink(file.entry.path)
        return False

    def _link_all_own(self) -> None:
        try:
            with open_volume(self._volume) as root, root.folder(self._local.incoming(self.checkpoint)) as folder:
                for position, file in enumerate(self.checkpoint.files):
                    if not folder.exists(file.entry.path) and self._link_own(root, folder, file):
                        self._opened[position] = True
                        if not file.entry.place:
                            self._here.add(self.pieces.of_file(position))
        except OSError as error:
            raise volume_error(error, f"reading this pod's own files of {self.checkpoint.marker.info.name}") from error
        for number, pack in enumerate(self.pieces.packs):
            if all(map(self._opened.__getitem__, pack.files.positions)):
                self._here.add(self.pieces.of_pack(number))

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
                made = ""
                for file in self.checkpoint.files:
                    path = file.entry.path
                    above = path.rpartition("/")[0]
                    if above and above != made:
                        folder.make_folder(above).close()
                        made = above
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
                for file in self.checkpoint.files:
                    with folder.opened_file(file.entry.path) as descriptor:
                        os.fsync(descriptor)
                sync_folders(folder, str(self.path))
                share_tree(folder, root)
        except OSError as error:
            raise volume_error(error, f"writing {self.path}") from error

    async def _on_disk(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


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
