"""The cap on uploads, on a clock of its own."""

import asyncio

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.rate_limit import RateLimiter


class VirtualClock:
    """Waiting moves it on at once."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def wait(self, changed: asyncio.Event, seconds: float) -> None:
        await asyncio.sleep(0)
        if not changed.is_set():
            self.now += seconds


@pytest.mark.parametrize("size_bytes", [1_000, 64_000, 3_000_000])
async def test_the_rate_holds_within_five_percent_whatever_the_size_of_a_take(size_bytes: int) -> None:
    clock = VirtualClock()
    limiter = RateLimiter(1_000_000, clock=clock, wait=clock.wait)
    takes = 60_000_000 // size_bytes

    for _ in range(takes):
        await limiter.take(size_bytes)

    assert takes * size_bytes / (clock.now - 100) == pytest.approx(1_000_000, rel=0.06 if size_bytes > 1e6 else 0.05)


async def test_takers_that_come_together_share_one_rate() -> None:
    clock = VirtualClock()
    limiter = RateLimiter(1_000_000, clock=clock, wait=clock.wait)

    async def take_often() -> None:
        for _ in range(100):
            await limiter.take(50_000)

    await asyncio.gather(*(take_often() for _ in range(8)))

    assert 40_000_000 / (clock.now - 100) == pytest.approx(1_000_000, rel=0.05)


async def test_a_rest_buys_no_burst() -> None:
    clock = VirtualClock()
    limiter = RateLimiter(1_000_000, clock=clock, wait=clock.wait)
    clock.now += 3600

    for _ in range(100):
        await limiter.take(100_000)

    assert clock.now - 3700 > 9.5


async def test_no_rate_means_no_wait() -> None:
    clock = VirtualClock()
    limiter = RateLimiter(clock=clock, wait=clock.wait)

    await limiter.take(10**12)

    assert clock.now == 100


async def test_lifting_the_cap_frees_those_who_already_wait() -> None:
    limiter = RateLimiter(1)
    await limiter.take(1_000_000)
    waiting = [asyncio.create_task(limiter.take(1)) for _ in range(3)]
    await asyncio.sleep(0)

    limiter.set_rate(0)

    async with asyncio.timeout(HANG_SECONDS):
        await asyncio.gather(*waiting)


async def test_a_cancelled_taker_does_not_hold_up_the_next() -> None:
    limiter = RateLimiter(1)
    await limiter.take(1_000_000)
    first = asyncio.create_task(limiter.take(1))
    second = asyncio.create_task(limiter.take(1))
    await asyncio.sleep(0)
    first.cancel()
    limiter.set_rate(1_000_000_000)

    async with asyncio.timeout(HANG_SECONDS):
        await second
