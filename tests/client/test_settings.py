"""Where the client finds its places: arguments before the environment, and one directory when there is neither."""

import logging
from pathlib import Path

import pytest

from keepstep.errors import UsageError
from keepstep.settings import Settings, read_settings


def test_the_volume_alone_gives_every_place() -> None:
    assert read_settings({"KEEPSTEP_VOLUME": "/v"}) == Settings(
        volume=Path("/v"),
        checkpoint_directory=Path("/v/checkpoints"),
        run_directory=Path("/v/checkpoints"),
        socket=Path("/v/.keepstep/agent.sock"),
    )


def test_the_environment_can_move_each_place() -> None:
    environment = {"KEEPSTEP_VOLUME": "/v", "KEEPSTEP_CHECKPOINT_DIRECTORY": "/v/out", "KEEPSTEP_SOCKET": "/run/a.sock"}
    assert read_settings(environment) == Settings(
        volume=Path("/v"),
        checkpoint_directory=Path("/v/out"),
        run_directory=Path("/v/out"),
        socket=Path("/run/a.sock"),
    )


def test_arguments_go_before_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    settings = read_settings({"KEEPSTEP_VOLUME": "/v", "KEEPSTEP_SOCKET": "/s"}, directory="/w/out", volume=Path("/w"))
    assert (settings.volume, settings.checkpoint_directory, settings.socket) == (
        Path("/w"),
        Path("/w/out"),
        Path("/s"),
    )
    assert caplog.messages == []


@pytest.mark.parametrize("environment", [{}, {"KEEPSTEP_VOLUME": "", "KEEPSTEP_SOCKET": ""}])
def test_without_a_volume_there_is_one_directory_and_no_agent(environment: dict[str, str]) -> None:
    settings = read_settings(environment, directory="/out")
    assert (settings.volume, settings.checkpoint_directory, settings.socket) == (Path("/out"), Path("/out"), None)


def test_a_directory_outside_the_volume_is_said(caplog: pytest.LogCaptureFixture) -> None:
    read_settings({"KEEPSTEP_VOLUME": "/v"}, directory="/elsewhere")
    assert "directory=/elsewhere volume=/v" in caplog.text


def test_a_directory_that_cannot_be_announced_is_refused() -> None:
    with pytest.raises(UsageError, match="not UTF-8"):
        read_settings({}, directory="/\udcff")


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 1)),  # torchrun, DeepSpeed
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (5, 8, 1)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}, (5, 8, 1)),  # MPICH
        ({"RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 5)),  # some number that nobody else in the pod has
        ({}, (0, 1, 0)),
    ],
)
def test_a_ranks_place_is_what_its_launcher_says(environment: dict[str, str], place: tuple[int, int, int]) -> None:
    ranks = read_settings(environment).ranks
    assert (ranks.rank, ranks.world_size, ranks.local_rank) == place
