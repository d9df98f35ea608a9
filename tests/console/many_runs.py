"""A store with many runs that all look the same, made up while it is read; and a console on it, in its own process."""

import asyncio
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
from tests.console.stored_runs import Objects, long_run

from keepstep_agent.adapters.http_server import serving
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.s3.store import open_s3_store
from keepstep_agent.console.access import Access
from keepstep_agent.console.application import console_pages
from keepstep_agent.console.refresh import Runs
from keepstep_agent.console.settings import ConsoleSettings
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectInfo, PartInfo, UploadInfo

BEGAN_AT = 1_700_000_000.0


class ManyRuns:
    """A `ports.StoreReader`. `own`: objects that a run has besides, by their whole keys. `calls` counts by method."""

    def __init__(self, runs: int, checkpoints: int) -> None:
        self.folders = [f"team/run-{number:05}/" for number in range(runs)]
        self.own: dict[str, tuple[bytes, float]] = {}
        self.calls: Counter[str] = Counter()
        self._objects: Objects = long_run(checkpoints, began_at=BEGAN_AT)
        self._keys = sorted(self._objects)

    async def list_folders(self, prefix: str) -> AsyncIterator[str]:
        self.calls["list_folders"] += 1
        for folder in {"": ["team/"], "team/": self.folders}.get(prefix, [f"{prefix}.keepstep/"]):
            yield folder

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        self.calls["list"] += 1
        folder, name = self._split(prefix)
        for key in self._keys[bisect_left(self._keys, name) :]:
            if not key.startswith(name):
                break
            yield _info(folder + key, self._objects[key])
        for key in [key for key in self.own if key.startswith(prefix)]:
            yield _info(key, self.own[key])

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        self.calls["get"] += 1
        found = self.own.get(key) or self._objects.get(self._split(key)[1])
        if found is None:
            raise StoreError(ErrorKind.NOT_FOUND, f"there is no {key}")
        return found[0]

    async def head(self, key: str) -> ObjectInfo:
        raise NotImplementedError

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, version: str, descriptor: int) -> int:
        raise NotImplementedError

    async def list_parts(self, key: str, upload: str) -> Sequence[PartInfo]:
        raise NotImplementedError

    def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        raise NotImplementedError

    def _split(self, key: str) -> tuple[str, str]:
        team, run, below = key.split("/", 2)
        return f"{team}/{run}/", below


def _info(key: str, found: tuple[bytes, float]) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=len(found[0]), modified_at=found[1], version="")


async def _serve(runs: int, checkpoints: int, *, stay: bool) -> None:
    """Read all runs twice, and ask for pages; or, with `stay`, say the address and serve for ever."""
    # Its client is most of what a console on S3 takes, so it is loaded though nothing is asked of it.
    client = await open_s3_store(StoreSettings(destination="s3://bucket/runs", region="us-east-1"), RateLimiter())
    settings = ConsoleSettings(destination="s3://bucket/runs")
    many = ManyRuns(runs, checkpoints)
    known = Runs(many, settings)
    for _ in range(2):
        await known.read_all()
    async with (
        serving(
            console_pages(known, settings, Access(settings)),
            ("127.0.0.1", 0),
            option="--address",
            most=16,
            ask_seconds=60.0,
            finish_seconds=1.0,
        ) as (host, port),
        aiohttp.ClientSession() as session,
    ):
        if stay:
            print(f"http://{host}:{port}/", flush=True)
            await asyncio.Event().wait()
        for address in ("/", "/?sort=goodput", "/api/runs", "/run?name=team/run-00001"):
            async with session.get(f"http://{host}:{port}{address}") as answer:
                assert answer.status == 200
                assert "run-00001" in await answer.text()
    await client.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), stay="--stay" in sys.argv))
    status = Path("/proc/self/status").read_text()
    # The most memory that this process had, in KiB.
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
