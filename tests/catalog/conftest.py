"""The destination of these tests: a store in memory."""

from collections.abc import AsyncIterator

import pytest
from tests.fakes.fake_store import FakeStore


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    store = FakeStore()
    yield store
    await store.close()
