"""Where a checkpoint directory may lie is decided by what is written, as the settings' reader writes it."""

import pytest

from mooring_agent.core.settings.checks import setting_problems


def problems(volume: str, checkpoint_directory: str) -> list[str]:
    values = {"volume": volume, "checkpoint_directory": checkpoint_directory, "store.destination": "s3://bucket"}
    return list(setting_problems(values))


@pytest.mark.parametrize(
    ("volume", "directory"),
    [
        ("/volume", "/volume"),
        ("/volume", "/volume/a/b"),
        ("/volume", "/volume//a/./b"),
        # What `..` leads to is known to the disk alone: a link may stand before it.
        ("/volume", "/volume/../elsewhere"),
        ("/", "/a"),
        ("//volume", "//volume/a"),
    ],
)
def test_a_checkpoint_directory_may_be_the_volume_or_lie_anywhere_below_it(volume: str, directory: str) -> None:
    assert problems(volume, directory) == []


@pytest.mark.parametrize(
    ("volume", "directory"),
    [
        ("/volume", "/volume2"),
        ("/volume", "/"),
        ("/volume/a", "/volume"),
        ("/volume", "/other/../volume/a"),
        ("/volume", "//volume/a"),
    ],
)
def test_a_checkpoint_directory_elsewhere_is_refused(volume: str, directory: str) -> None:
    assert problems(volume, directory) == [f"checkpoint_directory {directory} must lie below the volume {volume}"]
