"""Destinations to restore from: in memory, a real directory, a real S3 server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectStore


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    store = FakeStore()
    await store.probe()
    yield store
    await store.close()


@pytest.fixture(params=["filesystem", "moto"])
async def real_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    if request.param == "moto":
        settings = request.getfixturevalue("moto_bucket").settings()
    else:
        (tmp_path / "bucket").mkdir()
        settings = StoreSettings(destination=f"file://{tmp_path}/bucket")
    async with open_store(settings) as store:
        await store.probe()
        yield store


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder
