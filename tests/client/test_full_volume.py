"""A volume that is full or broken when a checkpoint is due: it costs that checkpoint, and training goes on."""

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.client.agent_server import AgentServer, serving
from tests.harness.small_volume import mounted

from keepstep import Checkpointer, ErrorKind, VolumeError
from keepstep.checkpoints.records import read_records
from keepstep.torch_loop import TrainingState
from keepstep_api.v1 import agent_pb2

Make = Callable[..., Checkpointer]
_MIB = 1 << 20


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "volume", 8 * _MIB) as volume:
        yield volume


def write_bytes(directory: Path, size_bytes: int) -> None:
    (directory / "state").write_bytes(bytes(size_bytes))


def write_torch(directory: Path, size_bytes: int) -> None:
    torch.save(torch.zeros(size_bytes, dtype=torch.uint8), directory / "state")


def write_training_state(directory: Path, size_bytes: int) -> None:
    model = torch.nn.Linear(size_bytes // 4, 1, bias=False)
    TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1)).save(directory)


def steps_saved(directory: Path) -> list[int]:
    return sorted(record.step for record in read_records(directory / ".keepstep" / "records"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_bytes, write_torch, write_training_state])
@pytest.mark.root
def test_a_volume_that_fills_up_while_a_checkpoint_is_written_costs_that_checkpoint(
    make_checkpointer: Make,
    small_volume: Path,
    caplog: pytest.LogCaptureFixture,
    write: Callable[[Path, int], None],
) -> None:
    checkpointer = make_checkpointer(volume=None, directory=small_volume)
    for step, size_bytes in ((1, _MIB), (2, 16 * _MIB), (3, _MIB)):
        assert checkpointer.should_save(step, every=1)
        with checkpointer.save(step) as directory:
            write(directory, size_bytes)
    checkpointer.finish()
    assert steps_saved(small_volume) == [1, 3]
    assert sorted(path.name for path in small_volume.iterdir()) == [".keepstep", "checkpoint-1", "checkpoint-3"]
    (warning,) = [message for message in caplog.messages if "given up" in message]
    assert "step=2" in warning
    assert re.search("check whether the volume.* is full", warning)


@pytest.mark.root
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_last_save_that_does_not_fit_gets_the_room_of_what_is_stored(
    make_checkpointer: Make, small_volume: Path, caplog: pytest.LogCaptureFixture, is_stored: bool
) -> None:
    with serving(small_volume / "agent.sock", AgentServer()) as agent:
        checkpointer = make_checkpointer(volume=small_volume, socket=small_volume / "agent.sock", keep_local=9)
        for step in (1, 2):
            with checkpointer.save(step) as directory:
                write_bytes(directory, 3 * _MIB)
        stored = {request.step: request.save for request in agent.requests("AnnounceCheckpoint")}
        if is_stored:
            agent.status = agent_pb2.Status(newest_committed=agent_pb2.Checkpoint(save=stored[2]))
        os.kill(os.getpid(), signal.SIGTERM)
        for step in (3, 4, 5):
            if not checkpointer.stopping and checkpointer.should_save(step):
                with checkpointer.save(step) as directory:
                    write_bytes(directory, 4 * _MIB)
        with pytest.raises(SystemExit) as left:
            checkpointer.finish()
    records = small_volume / ".keepstep" / "records"
    assert sorted(record.step for record in read_records(records)) == ([1, 4] if is_stored else [1, 2])
    assert left.value.code == (143 if is_stored else 75)
    lost = [message for message in caplog.messages if "given up" in message]
    assert len(lost) == (1 if is_stored else 2), "it is tried again once, and not at each step"
    assert ("leaving at step 4, which is not stored: the steps after 2 are lost" in caplog.messages) == (not is_stored)


def test_where_not_even_a_directory_can_be_made_training_goes_on(
    make_checkpointer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make_checkpointer(volume=None, directory=tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "gone")
    (tmp_path / "out").write_text("a file")
    with checkpointer.save(1) as directory:
        write_bytes(directory, 1)
    # Nor where the block writes nothing, as on most ranks.
    with checkpointer.save(2):
        pass
    assert sum("given up, training goes on" in message for message in caplog.messages) == 2
    with pytest.raises(VolumeError) as raised, checkpointer.save(3, "final"):
        pytest.fail("there is nothing to write into")
    assert raised.value.hint
    assert raised.value.retryable


@pytest.mark.root
def test_the_last_save_of_all_says_that_it_failed(
    make_checkpointer: Make, small_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpointer = make_checkpointer(volume=None, directory=small_volume)
    with pytest.raises(OSError, match="No space"), checkpointer.save(1, "final") as directory:
        write_bytes(directory, 16 * _MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        lost = pytest.raises(VolumeError, match="the final checkpoint of step 1 was lost")
        with lost as raised, checkpointer.save(1, "final") as directory:
            write_bytes(directory, 1)
    assert raised.value.kind is ErrorKind.VOLUME_UNUSABLE
    with checkpointer.save(1, "final") as directory:
        write_bytes(directory, 1)
    assert steps_saved(small_volume) == [1]


@pytest.mark.parametrize("error", [ValueError("a bug"), FileNotFoundError("config.json"), KeyboardInterrupt()])
def test_what_is_not_the_volumes_fault_goes_through(
    make_checkpointer: Make, tmp_path: Path, error: BaseException
) -> None:
    checkpointer = make_checkpointer(volume=None, directory=tmp_path / "out")

    def write_and_fail(directory: Path) -> None:
        write_bytes(directory, 1)
        raise error

    with pytest.raises(type(error)), checkpointer.save(1) as directory:
        write_and_fail(directory)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != ".keepstep"] == []
