"""How an agent begins."""

import asyncio
import os
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.core.play import settings
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.errors import ErrorKind, KeepstepError, VolumeError
from keepstep_agent.runtime.api.server import serve_grpc
from keepstep_agent.runtime.process import app
from keepstep_agent.runtime.process.open_volume import claim_volume
from keepstep_api.v1 import agent_pb2_grpc


async def test_signals_are_heard_while_a_long_journal_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, heard = asyncio.get_running_loop(), threading.Event()

    def recover(*_: Any) -> None:
        # As a signal's handler is called: by the event loop.
        loop.call_soon_threadsafe(heard.set)
        assert heard.wait(HANG_SECONDS), "the event loop waits for the journal"
        raise VolumeError(ErrorKind.VOLUME_UNUSABLE, "enough", hint="")

    monkeypatch.setattr(app, "recover", recover)
    volume = tmp_path / "volume"
    volume.mkdir()
    with pytest.raises(VolumeError, match="enough"):
        await app.run_agent(
            replace(
                settings(),
                volume=str(volume),
                checkpoint_directory=str(volume / "checkpoints"),
                socket=str(volume / "agent.sock"),
                state_directory=str(tmp_path / "state"),
            )
        )


def test_no_journal_goes_to_the_working_directory(tmp_path: Path) -> None:
    """The settings fill in where it goes; where they did not, that is a bug of ours."""
    with pytest.raises(AssertionError, match="state directory"):
        claim_volume(replace(settings(), volume=str(tmp_path / "volume"), state_directory=""))
    assert list(tmp_path.iterdir()) == []


async def test_a_file_in_the_place_of_the_socket_is_an_error_and_stays(tmp_path: Path) -> None:
    service = cast(Any, agent_pb2_grpc.AgentServicer())
    users = tmp_path / "results.csv"
    users.write_text("mine")
    with pytest.raises(KeepstepError, match=r"cannot serve on the socket .*results\.csv"):
        async with serve_grpc(service, users):
            pass
    assert users.read_text() == "mine"
    # The socket of an agent that was killed is in nobody's way.
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "s"))
    async with serve_grpc(service, tmp_path / "s"):
        assert (tmp_path / "s").is_socket()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("alone", "mode"), [(True, 0o600), (False, 0o660)])
@pytest.mark.parametrize("umask", [0o000, 0o077])
async def test_the_socket_is_its_owners_alone_or_for_its_group_too_whatever_the_umask(
    short_directory: Path, alone: bool, mode: int, umask: int
) -> None:
    path = short_directory / "s"
    before = os.umask(umask)
    try:
        async with serve_grpc(cast(Any, agent_pb2_grpc.AgentServicer()), path, alone=alone):
            assert stat.S_IMODE(path.stat().st_mode) == mode
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
