"""What can come out of a Checkpointer, and what a person sees of it."""

import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep import Checkpointer, ErrorKind, KeepstepError, RanksError, UsageError, VolumeError
from keepstep.errors import StoreLostError
from keepstep_agent.core import errors as agent_errors

BROKEN = {
    "protobuf is older than 3.20": "import sys\nsys.modules['google.protobuf.internal.builder'] = None",
    "protobuf is missing": "import sys\nsys.modules['google.protobuf'] = None",
    "grpcio is missing": "import sys\nsys.modules['grpc'] = None",
    "grpcio is damaged": "import sys\nsys.modules['grpc'] = 'damaged'",
}
PROGRAM = """
import keepstep
checkpointer = keepstep.Checkpointer()
assert checkpointer.should_save(1, every=1)
with checkpointer.save(1) as directory:
    (directory / "state").write_text("x")
checkpointer.finish()
"""


@pytest.mark.parametrize("broken", BROKEN)
def test_an_installation_that_cannot_call_the_agent_saves_locally_and_says_so_once(broken: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN[broken] + PROGRAM],
        env={**os.environ, "KEEPSTEP_VOLUME": str(tmp_path), "GRPC_ENABLE_FORK_SUPPORT": "0"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "checkpoints" / "checkpoint-1" / "state").exists()
    (line,) = ended.stderr.splitlines()
    assert line.startswith("no agent: gRPC cannot be loaded")
    assert "hint=pip install --upgrade" in line


@pytest.mark.parametrize(
    ("directory", "error"),
    [("a\0b", UsageError), ("loop", VolumeError), ("state-loop", VolumeError), ("file", VolumeError)],
)
def test_a_place_that_is_none_is_refused_by_an_error_of_ours(
    directory: str, error: type[KeepstepError], tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    (tmp_path / "state-loop").mkdir()
    (tmp_path / "state-loop" / ".keepstep").symlink_to(tmp_path / "state-loop" / ".keepstep")
    with pytest.raises(error) as raised:
        Checkpointer(tmp_path / directory)
    assert raised.value.hint


def test_a_working_directory_that_is_gone_is_refused_by_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="relative to a directory that is gone"):
        Checkpointer("checkpoints")


def test_a_traceback_shows_the_hint_below_the_message() -> None:
    for error in (
        VolumeError(ErrorKind.VOLUME_UNUSABLE, "it is full", hint="make room"),
        agent_errors.VolumeError(agent_errors.ErrorKind.DISK_FULL, "it is full", hint="make room"),
    ):
        assert "".join(traceback.format_exception(error)).endswith("VolumeError: it is full\nhint: make room\n")
        assert str(error) == "it is full"
    plain = VolumeError(ErrorKind.VOLUME_UNUSABLE, "it is full")
    assert "hint" not in "".join(traceback.format_exception(plain))


@pytest.mark.parametrize("kind", [UsageError, VolumeError, RanksError])
def test_an_error_crosses_ranks_whole(kind: type[KeepstepError]) -> None:
    error = pickle.loads(pickle.dumps(kind(ErrorKind.RANKS_LATE, "late", hint="wait")))
    assert (type(error), str(error), error.kind, error.hint, error.__notes__) == (
        kind,
        "late",
        ErrorKind.RANKS_LATE,
        "wait",
        ["hint: wait"],
    )


def test_a_lost_store_crosses_ranks_whole() -> None:
    error = pickle.loads(pickle.dumps(StoreLostError("connection closed")))
    assert (type(error), str(error), error.kind) == (StoreLostError, "connection closed", ErrorKind.STORE_LOST)
