"""How often the volume is walked: seldom where that takes long."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.volume.disk import VolumeMeter
from keepstep_agent.ports import DiskReading
from keepstep_agent.runtime.monitors import monitors
from keepstep_agent.runtime.monitors.monitors import Monitors

_WALK_SECONDS = 0.03


class _Engine:
    """Always busy, and always changing."""

    state = SimpleNamespace(unfinished=lambda: iter([1]))
    revision = 0

    async def submit(self, event: object) -> None:
        pass

    async def next_change(self, seen_revision: int) -> int:
        return seen_revision + 1


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_a_walk_that_takes_long_is_followed_by_a_longer_rest(
    tmp_path: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the shortest time between two walks is judged, which a busy machine makes longer."""
    walks: list[tuple[float, float]] = []
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    def walk_slowly(_meter: VolumeMeter) -> DiskReading:
        began = time.monotonic()
        while time.monotonic() < began + _WALK_SECONDS:
            pass
        walks.append((began, time.monotonic()))
        if len(walks) == 4:
            loop.call_soon_threadsafe(enough.set)
        return DiskReading(used_bytes=0, free_bytes=0, total_bytes=1)

    monkeypatch.setattr(VolumeMeter, "measure", walk_slowly)
    monkeypatch.setattr(monitors, "_DISK_BUSY_SECONDS", 0.0)
    watched = Monitors(
        engine=cast(Any, _Engine()),
        clock=cast(Any, SimpleNamespace(now=time.time)),
        live_ranks=cast(Any, None),
        executor=executor,
        settings=cast(Any, SimpleNamespace(volume=str(tmp_path))),
        mirror=None,
        unannounced=cast(Any, None),
    )
    watching = asyncio.create_task(watched.watch_disk())
    try:
        async with asyncio.timeout(HANG_SECONDS):
            await enough.wait()
    finally:
        watching.cancel()
    gaps = [began - ended for (_, ended), (began, _) in pairwise(walks)]
    assert min(gaps) > 5 * _WALK_SECONDS
