"""A destination in a folder."""

from pathlib import Path

import pytest

from keepstep_agent.core.settings.values import StoreSettings


@pytest.fixture
def bucket(tmp_path: Path) -> StoreSettings:
    (tmp_path / "bucket").mkdir()
    return StoreSettings(destination=f"file://{tmp_path}/bucket")
