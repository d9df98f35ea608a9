"""One control plane for all tests of a worker, where its binaries are, and one webhook that they may end."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.control_plane import ASSETS_VARIABLE, ControlPlane, NoAssetsError, find_assets
from tests.cluster.installation import Installation, InstalledWebhook
from tests.servers.process import free_port


@pytest.fixture(scope="session")
def assets() -> Path:
    try:
        return find_assets(os.environ.get(ASSETS_VARIABLE))
    except NoAssetsError as error:
        if error.told:
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def installation(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with ControlPlane(assets, tmp_path_factory.mktemp("control-plane")) as control_plane:
        installation = Installation(control_plane, free_port())
        installation.install()
        yield installation


@pytest.fixture(scope="session")
def process(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledWebhook]:
    with InstalledWebhook(tmp_path_factory.mktemp("webhook"), installation) as webhook:
        yield webhook


@pytest.fixture
def webhook(installation: Installation, process: InstalledWebhook) -> InstalledWebhook:
    """It serves, whatever the test before did to it, and the API server asks it."""
    if process.process.poll() is not None:
        process.start()
    installation.wait_until_asked()
    return process
