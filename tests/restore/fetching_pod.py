"""One pod's agent as far as it restores lazily, and what it has fetched."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.fakes.fake_store import FakeStore
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.agent.events import Announced
from keepstep_agent.core.model import SaveInfo
from keepstep_agent.core.settings.values import Settings, StoreSettings
from keepstep_agent.ports import ObjectStore
from keepstep_agent.restore.partial_copy import FileRange
from keepstep_agent.runtime.work.fetches import Fetches, FetchProgress, Guessing


class Pod:
    """One pod's agent, as far as it restores."""

    def __init__(self, store: ObjectStore, volume: Path, fetches: Fetches) -> None:
        self.store, self.volume, self.fetches = store, volume, fetches

    async def fetch(self, info: SaveInfo, *ranges: FileRange) -> FetchProgress:
        return await self.fetches.fetch(info.save, ranges, whole=not ranges, wait_seconds=HANG_SECONDS)

    async def offered(self) -> list[int]:
        found = await self.fetches.restorable(None, HANG_SECONDS)
        assert found.committed is not None
        return [one.step for one in found.committed]


@asynccontextmanager
async def pod(
    store: ObjectStore,
    volume: Path,
    *,
    mode: str = "whole",
    place: str = "",
    node_rank: int = 0,
    guessing: Guessing | None = nullcontext,
) -> AsyncIterator[Pod]:
    settings = Settings(
        volume=str(volume),
        checkpoint_directory=f"{volume}/checkpoints",
        socket=f"{volume}/socket",
        state_directory=f"{volume}/state",
        store=StoreSettings(destination="s3://bucket/run"),
        restore=mode,
        place=place,
        node_rank=node_rank,
    )

    async def get() -> ObjectStore:
        return store

    volume.mkdir(exist_ok=True)  # noqa: ASYNC240 - a local disk
    with ThreadPoolExecutor(1) as disk:
        fetches = Fetches(store=cast(Any, SimpleNamespace(get=get)), settings=settings, disk=disk, guessing=guessing)
        running = asyncio.create_task(fetches.run())
        try:
            yield Pod(store, volume, fetches)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not holds():  # noqa: ASYNC110 - the disk tells nobody
            await asyncio.sleep(0.01)


def on_disk(path: Path | None) -> dict[str, bytes]:
    assert path is not None
    return {found.relative_to(path).as_posix(): found.read_bytes() for found in path.rglob("*") if found.is_file()}


def announced(info: SaveInfo) -> Announced:
    return Announced(at=0.0, info=info, rank=0, path="/checkpoint", files=(), local_world_size=1)


def fetched(store: FakeStore) -> list[str]:
    """The files whose bytes were read since `calls` was cleared, one entry per request."""
    return [key.rpartition("/")[2] for method, key in store.calls if method == "get_into"]
