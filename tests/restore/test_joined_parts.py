"""A store that is fast is asked for several parts of a file at a time; each part is verified all the same."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import PART_BYTES, flip_byte, store_checkpoint

from keepstep_agent.adapters.checksum import crc64nvme, joined_crc64nvme
from keepstep_agent.core.stored.object_layout import file_key

PARTS = 64


class CountingStore:
    """Remembers how many bytes each request for parts asked for; the answer to the `wrong_at`-th is wrong.

    With a rate, the event loop's clock stands still, but for what each request would take.
    """

    def __init__(self, store: FakeStore, *, wrong_at: int = -1, bytes_per_second: float = 0.0) -> None:
        self.sizes_bytes: list[int] = []
        self._store = store
        self._wrong_at = wrong_at
        self._bytes_per_second = bytes_per_second
        if bytes_per_second:
            loop = asyncio.get_running_loop()
            self._now = loop.time()
            loop.time = lambda: self._now  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_into(self, key: str, *, size_bytes: int, **options: Any) -> int:
        self.sizes_bytes.append(size_bytes)
        if self._bytes_per_second:
            self._now += size_bytes / self._bytes_per_second
        wrong = len(self.sizes_bytes) - 1 == self._wrong_at
        checksum = await self._store.get_into(key, size_bytes=size_bytes, **options)
        return checksum ^ 1 if wrong else checksum


async def restored_from(store: Any, volume: Path, *, concurrency: int = 8) -> Any:
    return await restore(
        store,
        checkpoint_directory=volume / "checkpoints",
        volume=volume,
        state_directory=volume / ".keepstep",
        concurrency=concurrency,
    )


def large() -> bytes:
    return random.Random(7).randbytes(PARTS * PART_BYTES - 5)


async def test_a_file_of_many_parts_is_fetched_once_with_far_fewer_requests(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 1, ranks=[{"model.pt": large()}])
    counting = CountingStore(store)

    restored = await restored_from(counting, volume)

    assert (restored.path / "model.pt").read_bytes() == large()
    assert sum(counting.sizes_bytes) == len(large())
    assert len(counting.sizes_bytes) <= PARTS / 2
    # So that no writer waits long for the other.
    assert counting.sizes_bytes[-1] <= PART_BYTES


async def test_the_next_file_is_fetched_with_as_large_requests_as_the_last(store: FakeStore, volume: Path) -> None:
    content = large()[: 16 * PART_BYTES]
    await store_checkpoint(store, 1, ranks=[{"a": content, "b": content, "c": content, "d": content}])
    counting = CountingStore(store, bytes_per_second=1e12)

    restored = await restored_from(counting, volume, concurrency=1)

    assert {path.read_bytes() for path in restored.path.iterdir()} == {content}
    first, *later = counting.sizes_bytes
    assert first == PART_BYTES
    # 1, 2, 4, 8 and the last one of the first file.
    assert later[4:] == [16 * PART_BYTES] * 3


@pytest.mark.parametrize(("parts_per_second", "most_parts"), [(0.1, 1), (2, 8), (4, 16)])
async def test_no_request_asks_for_more_than_arrives_in_four_seconds(
    parts_per_second: float, most_parts: int, store: FakeStore, volume: Path
) -> None:
    await store_checkpoint(store, 1, ranks=[{"model.pt": large()}])
    counting = CountingStore(store, bytes_per_second=parts_per_second * PART_BYTES)

    restored = await restored_from(counting, volume, concurrency=1)

    assert (restored.path / "model.pt").read_bytes() == large()
    assert max(counting.sizes_bytes) == most_parts * PART_BYTES


@pytest.mark.parametrize("wrong_at", [0, 4])
async def test_parts_that_arrive_wrong_together_are_fetched_again_one_by_one(
    wrong_at: int, store: FakeStore, volume: Path
) -> None:
    await store_checkpoint(store, 1, ranks=[{"model.pt": large()}])
    counting = CountingStore(store, wrong_at=wrong_at)

    restored = await restored_from(counting, volume)

    assert restored.skipped == ()
    assert (restored.path / "model.pt").read_bytes() == large()
    assert sum(counting.sizes_bytes) == len(large()) + counting.sizes_bytes[wrong_at]


async def test_of_joined_parts_the_damaged_one_is_named(store: FakeStore, volume: Path) -> None:
    await store_checkpoint(store, 1)
    info = await store_checkpoint(store, 2, ranks=[{"model.pt": large()}])
    damaged = 20 * PART_BYTES
    await flip_byte(store, file_key(info, "model.pt"), damaged + 3)

    restored = await restored_from(store, volume)

    assert restored.step == 1
    (skipped,) = restored.skipped
    assert f"bytes {damaged} to {damaged + PART_BYTES}" in str(skipped)


@pytest.mark.parametrize("sizes", [(1, 1), (0, 5), (100, 4096), (PART_BYTES, 77)])
def test_the_checksum_of_two_pieces_is_that_of_both_in_a_row(sizes: tuple[int, int]) -> None:
    first, second = (random.Random(size).randbytes(size) for size in sizes)
    assert joined_crc64nvme(crc64nvme(first), crc64nvme(second), len(second)) == crc64nvme(first + second)
