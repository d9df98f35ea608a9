"""Trying again for people who wait: passing errors only, bounded, never what may not be repeated blindly."""

import random
from collections.abc import AsyncIterator

import pytest
from tests.fakes.fake_store import FakeStore

from keepstep_agent.adapters.retrying_store import RetryingStore, RetryPolicy
from keepstep_agent.core.errors import PASSING, ErrorKind, StoreError
from keepstep_agent.ports import ObjectInfo


class Sleeper:
    def __init__(self) -> None:
        self.waits: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


class BreakingListing(FakeStore):
    """Its listing breaks off after two objects, as often as told, and goes by folder, as SeaweedFS lists."""

    breaks = 2

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        listed = [info async for info in super().list(prefix)]
        for count, info in enumerate(sorted(listed, key=lambda info: info.key.split("/"))):
            if count == 2 and self.breaks:
                self.breaks -= 1
                raise StoreError(ErrorKind.UNREACHABLE, "the listing broke off")
            yield info


def retrying(store: FakeStore, sleeper: Sleeper, **policy: float) -> RetryingStore:
    return RetryingStore(store, RetryPolicy(**policy), sleep=sleeper, generator=random.Random(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(PASSING))
async def test_a_passing_error_is_tried_again(kind: ErrorKind) -> None:
    store, sleeper = FakeStore(), Sleeper()
    await store.put("a", b"x")
    store.fail("get", kind, times=2)

    assert await retrying(store, sleeper).get("a", limit_bytes=1) == b"x"
    assert len(sleeper.waits) == 2


@pytest.mark.parametrize("kind", sorted(set(ErrorKind) - PASSING))
async def test_an_error_that_needs_a_person_is_told_at_once(kind: ErrorKind) -> None:
    store, sleeper = FakeStore(), Sleeper()
    store.fail("head", kind)

    with pytest.raises(StoreError) as caught:
        await retrying(store, sleeper).head("a")

    assert caught.value.kind is kind
    assert sleeper.waits == []


async def test_patience_ends_with_the_last_error() -> None:
    store, sleeper = FakeStore(), Sleeper()
    store.fail("head", ErrorKind.THROTTLED, times=100)

    with pytest.raises(StoreError):
        await retrying(store, sleeper, attempts=4, first_wait_seconds=1.0, longest_wait_seconds=2.0).head("a")

    assert len(store.calls) == 4
    assert all(wait <= longest for wait, longest in zip(sleeper.waits, [1, 2, 2], strict=True))


async def test_a_listing_that_breaks_off_goes_on_without_repeating_itself() -> None:
    store, sleeper = BreakingListing(), Sleeper()
    for name in "abcde":
        await store.put(name, b"x")
    store.breaks = 1

    assert [info.key async for info in retrying(store, sleeper).list("")] == list("abcde")


@pytest.mark.parametrize("breaks", [0, 1])
async def test_no_object_is_left_out_of_a_listing_in_another_order_than_that_of_keys(breaks: int) -> None:
    store, sleeper = BreakingListing(), Sleeper()
    store.breaks = breaks
    names = ["a", "model/one", "model/two", "model.json", "z"]
    for name in names:
        await store.put(name, b"x")

    assert [info.key async for info in retrying(store, sleeper).list("")] == names


async def test_a_listing_of_folders_is_tried_again() -> None:
    store, sleeper = FakeStore(), Sleeper()
    await store.put("a/b", b"x")
    store.fail("list_folders", ErrorKind.TIMED_OUT, times=2)

    assert [folder async for folder in retrying(store, sleeper).list_folders("")] == ["a/"]
    assert len(sleeper.waits) == 2


async def test_what_may_have_acted_is_not_tried_again() -> None:
    store, sleeper = FakeStore(), Sleeper()
    await store.probe()
    store.fail("put", ErrorKind.UNREACHABLE, after_acting=True)

    with pytest.raises(StoreError, match="a test wants it"):
        await retrying(store, sleeper).put("a", b"x", if_absent=True)

    assert sleeper.waits == []
    assert store.objects["a"].body == b"x"
