"""Finds out after a restart what the store has of a save. What is certainly ours is kept; the rest is sent again.

A part that arrived while the agent died is in the store and not in the journal. It is recognised by its MD5, which most
stores tell. On other stores the part is sent once more, which costs nothing but its bytes.
"""

import asyncio
from concurrent.futures import Executor
from pathlib import Path

from keepstep_agent.adapters.checksum import region_checksum, region_md5
from keepstep_agent.adapters.region_file import part_region
from keepstep_agent.core.agent.commands import KnownFile, Reconcile
from keepstep_agent.core.agent.events import Committed, FoundFile, FoundUpload, Reconciled
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import Part, SaveInfo
from keepstep_agent.core.stored.object_layout import file_key, save_prefix
from keepstep_agent.core.stored.packs_and_parts import plan
from keepstep_agent.ports import Clock, ObjectInfo, ObjectStore, StagingArea
from keepstep_agent.runtime.work.committer import sweep_uploads
from keepstep_agent.runtime.work.duplicate_save_guard import is_committed


class Reconciler:
    """Compares saves with the store. `volume` is where pins lie; hashing and stat run on `executor`."""

    def __init__(self, *, staging: StagingArea, clock: Clock, executor: Executor, volume: Path) -> None:
        self._staging = staging
        self._clock = clock
        self._executor = executor
        self._volume = volume

    async def reconcile(self, store: ObjectStore, command: Reconcile) -> Reconciled | Committed:
        """Raises VolumeError when a pinned file is gone or was changed: that save cannot be completed."""
        # Before its pins are checked: a committed save needs none, and may have lost them before it was journaled.
        if await is_committed(store, command.info, dict(command.announced_at)):
            # Every rank is sealed, so nobody needs an upload that is still open below this save.
            await sweep_uploads(store, save_prefix(command.info), of=None, keep=frozenset())
            return Committed(at=self._clock.now(), work=command.work)
        loop = asyncio.get_running_loop()
        for rank, staged in command.staged:
            await loop.run_in_executor(self._executor, self._staging.check, command.info.save, rank, staged)
        known = {(file_key(command.info, file.file.path), file.upload) for file in command.unfinished}
        ours = frozenset(file_key(command.info, file.path) for _, staged in command.staged for file in staged)
        await sweep_uploads(store, save_prefix(command.info), of=ours, keep=frozenset(known))
        listing = {info.key: info async for info in store.list(save_prefix(command.info))}
        files: list[FoundFile] = []
        uploads: list[FoundUpload] = []
        for known_file in command.unfinished:
            stored = listing.get(file_key(command.info, known_file.file.path))
            found = await self._found_file(known_file, stored) if stored else None
            if found:
                files.append(found)
            elif known_file.upload:
                uploads += await self._found_upload(store, command.info, known_file)
        return Reconciled(at=self._clock.now(), work=command.work, uploads=tuple(uploads), files=tuple(files))

    async def _found_file(self, known: KnownFile, stored: ObjectInfo) -> FoundFile | None:
        if stored.size_bytes != known.file.size_bytes:
            return None
        parts = plan(known.file.size_bytes, known.part_size_bytes)
        if len(parts) > 1:
            # An upload is completed only with every part in the journal; without them the checksums are unknown.
            complete = len(known.parts) == len(parts)
            return FoundFile(rank=known.rank, path=known.file.path, checksum=None) if complete else None
        if not parts:
            return FoundFile(rank=known.rank, path=known.file.path, checksum=None)
        checksum = await self._checksum_if_ours(known, parts[0], stored.md5)
        return None if checksum is None else FoundFile(rank=known.rank, path=known.file.path, checksum=checksum)

    async def _found_upload(self, store: ObjectStore, info: SaveInfo, known: KnownFile) -> list[FoundUpload]:
        try:
            held = await store.list_parts(file_key(info, known.file.path), known.upload)
        except StoreError as error:
            if error.kind is ErrorKind.UPLOAD_LOST:
                return []
            raise
        journaled = {number: (receipt, checksum) for number, receipt, checksum in known.parts}
        planned = {part.number: part for part in plan(known.file.size_bytes, known.part_size_bytes)}
        parts: list[tuple[int, str, int]] = []
        for part in held:
            wanted = planned.get(part.number)
            if wanted is None or wanted.size_bytes != part.size_bytes:
                continue
            receipt, found = journaled.get(part.number, ("", None))
            if receipt != part.receipt:
                found = await self._checksum_if_ours(known, wanted, part.md5)
            if found is not None:
                parts.append((part.number, part.receipt, found))
        return [FoundUpload(rank=known.rank, path=known.file.path, upload=known.upload, parts=tuple(parts))]

    async def _checksum_if_ours(self, known: KnownFile, part: Part, md5: str) -> int | None:
        """Return the part's checksum if the store's MD5 is that of our bytes, else None."""
        if not md5:
            return None
        region = part_region(self._volume, known.file.pin, part, known.file.fingerprint)
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._executor, region_md5, region) != md5.lower():
            return None
        return await loop.run_in_executor(self._executor, region_checksum, region)
