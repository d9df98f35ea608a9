"""`keepstep verify`: finds every problem of a committed checkpoint, down to its last byte.

Keeps nothing of what it reads: the bytes are checked on their way into the null device.
"""

import os
from collections.abc import Awaitable, Callable

from keepstep_agent.catalog.fetching import StoredPack, fetch_pack, fetch_part, packs_at_once, packs_of
from keepstep_agent.catalog.object_reads import DAMAGE, for_each
from keepstep_agent.catalog.reading import Problem, StoredFile, examine
from keepstep_agent.core.errors import StoreError
from keepstep_agent.core.model import Part
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.ports import StoreReader


async def check(
    store: StoreReader,
    committed: CommittedSave,
    *,
    concurrency: int = 8,
    on_progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> tuple[Problem, ...]:
    """Return all problems of a checkpoint; none if it can be restored. Downloads and verifies every file."""
    examination = await examine(store, committed)
    checkpoint = examination.checkpoint
    if checkpoint is None:
        return tuple(examination.problems)
    problems: list[Problem] = []
    done_bytes = 0
    # Computed once: it is a sum over all files.
    total_bytes = checkpoint.size_bytes
    on_progress(0, total_bytes)
    sink = os.open(os.devnull, os.O_WRONLY)

    async def check_one(key: str, size_bytes: int, fetch: Awaitable[object]) -> None:
        nonlocal done_bytes
        try:
            await fetch
        except StoreError as error:
            if error.kind not in DAMAGE:
                raise
            problems.append(Problem(key=key, what=str(error).removeprefix(f"{key} ")))
        done_bytes += size_bytes
        on_progress(done_bytes, total_bytes)

    async def check_part(piece: tuple[StoredFile, Part]) -> None:
        file, part = piece
        await check_one(file.key, part.size_bytes, fetch_part(store, file, part, sink))

    async def check_pack(pack: StoredPack) -> None:
        await check_one(pack.key, pack.content_bytes, fetch_pack(store, pack))

    pieces = ((file, part) for file in checkpoint.files if not file.entry.place for part in file.entry.parts())
    try:
        await for_each(pieces, check_part, at_once=concurrency)
        packs = packs_of(checkpoint.files)
        await for_each(packs, check_pack, at_once=packs_at_once(packs, most=concurrency))
    finally:
        os.close(sink)
    return tuple(sorted(problems, key=str))
