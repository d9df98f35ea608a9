"""A Checkpointer whose program asks for it writes what `torch.save` got while training continues."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.client.agent_server import AgentServer
from tests.client.checkpointer.saved_steps import Make
from tests.harness.bounds import HANG_SECONDS

from keepstep import Checkpointer, Kind
from keepstep.asynchronous_saves.background_writer import BackgroundWriter
from keepstep.asynchronous_saves.empty_file import EmptyFile
from keepstep.checkpoints.records import read_records
from keepstep_api import names
from keepstep_api.v1 import agent_pb2


def saved(checkpointer: Checkpointer, step: int, weight: torch.Tensor, kind: Kind | None = None) -> Path:
    """Save, change the state as the next step would, and return where the checkpoint will be."""
    with checkpointer.save(step, kind) as directory:
        torch.save({"weight": weight, "step": step}, directory / "state.pt")
        (directory / "note.txt").write_text("by the program itself")
    weight.add_(1)
    return directory.parents[1] / f"checkpoint-{step}"


def loaded(path: Path) -> float:
    return float(torch.load(path / "state.pt", weights_only=True)["weight"][0])


def test_a_checkpoint_has_the_state_of_its_own_step(make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer(asynchronous=True, keep_local=3)
    weight = torch.zeros(1000)
    paths = [saved(checkpointer, step, weight) for step in (1, 2, 3)]
    checkpointer.finish()
    assert [loaded(path) for path in paths] == [0, 1, 2]
    assert all((path / "note.txt").read_text() for path in paths)


def test_what_is_saved_in_another_way_is_there_when_the_block_ends(make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer(asynchronous=True)
    with checkpointer.save(1) as directory:
        (directory / "state").write_text("x")
    assert (directory.parents[1] / "checkpoint-1").exists()


@pytest.mark.parametrize("kind", [Kind.FINAL, Kind.JUST_IN_TIME])
def test_the_last_save_of_a_process_is_complete_when_its_block_ends(make_checkpointer: Make, kind: Kind) -> None:
    checkpointer = make_checkpointer(asynchronous=True)
    path = saved(checkpointer, 1, torch.zeros(10), kind)
    assert (path / "state.pt").exists()


def test_a_notice_after_the_copy_is_obeyed_when_the_checkpoint_is_there(make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer(asynchronous=True)
    assert not checkpointer.should_save(1, every=0)
    with checkpointer.save(1) as directory:
        torch.save({"weight": torch.ones(10)}, directory / "state.pt")
        os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.stopping
    (record,) = read_records(directory.parents[2] / ".keepstep" / "records")
    assert (record.step, record.kind) == (1, Kind.JUST_IN_TIME)
    with pytest.raises(SystemExit):
        checkpointer.finish()


@pytest.mark.parametrize(
    ("grace_seconds", "upload_rate", "is_finished"),
    [(3600, 0.0, True), (3600, 1e9, True), (0, 1e9, False), (3600, 1.0, False), (None, 0.0, True)],
    ids=["there is time", "for the upload too", "none is left", "the upload takes it", "nothing ends"],
)
def test_a_save_in_flight_is_finished_before_the_just_in_time_save_if_there_is_time_for_both(
    grace_seconds: float | None,
    upload_rate: float,
    is_finished: bool,
    agent: AgentServer,
    make_checkpointer: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadline = 0.0 if grace_seconds is None else time.time() + grace_seconds
    agent.status = agent_pb2.Status(deadline=deadline, upload_rate_bytes_per_second=upload_rate)
    checkpointer = make_checkpointer(asynchronous=True, keep_local=3)
    weight = torch.zeros(10_000)
    saved(checkpointer, 1, weight)
    checkpointer._writer.wait()

    decided, find, wait = threading.Event(), EmptyFile.find, BackgroundWriter.wait

    def find_when_decided(file: EmptyFile, root: Path) -> Path | None:
        assert decided.wait(HANG_SECONDS)
        return find(file, root)

    def decided_and_wait(writer: BackgroundWriter) -> bool:
        if agent.requests("GetStatus"):
            decided.set()
        return wait(writer)

    monkeypatch.setattr(EmptyFile, "find", find_when_decided)
    monkeypatch.setattr(BackgroundWriter, "wait", decided_and_wait)
    with checkpointer.save(2) as directory:
        for name in "ab":
            torch.save({"weight": weight}, directory / name)
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.should_save(3)
    path = saved(checkpointer, 3, weight)
    assert (path.parent / "checkpoint-2").exists() is is_finished
    assert loaded(path) == 1
    announced = [request.step for request in agent.requests("AnnounceCheckpoint")]
    assert announced == ([1, 2, 3] if is_finished else [1, 3])
    with pytest.raises(SystemExit):
        checkpointer.finish()


def test_an_exception_in_the_block_leaves_nothing(make_checkpointer: Make) -> None:
    checkpointer = make_checkpointer(asynchronous=True)
    seen: list[Path] = []

    def fail() -> None:
        with checkpointer.save(1) as directory:
            seen.append(directory)
            torch.save({"weight": torch.ones(10)}, directory / "state.pt")
            raise KeyError("the program's own")

    with pytest.raises(KeyError):
        fail()
    checkpointer.finish()
    assert not seen[0].parent.exists()


@pytest.mark.parametrize(("value", "is_behind"), [("true", True), ("off", False), (None, True)])
def test_the_environment_decides_where_the_program_does_not(
    value: str | None, is_behind: bool, make_checkpointer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(names.ENV_ASYNCHRONOUS_SAVES, value)
    checkpointer = make_checkpointer()
    with checkpointer.save(1) as directory:
        torch.save({"weight": torch.ones(10)}, directory / "state.pt")
        assert ((directory / "state.pt").stat().st_size == 0) is is_behind
    checkpointer.finish()


def test_the_stall_of_a_save_that_is_written_later_is_that_of_its_copy(
    agent: AgentServer, make_checkpointer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, find = threading.Event(), EmptyFile.find

    def find_later(file: EmptyFile, root: Path) -> Path | None:
        assert goes_on.wait(HANG_SECONDS)
        return find(file, root)

    monkeypatch.setattr(EmptyFile, "find", find_later)
    checkpointer = make_checkpointer(asynchronous=True)
    with checkpointer.save(1) as directory:
        torch.save({"weight": torch.ones(10)}, directory / "state.pt")
    now = time.monotonic()
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: now + 1000)
        goes_on.set()
        checkpointer._writer.wait()
    (announced,) = agent.requests("AnnounceCheckpoint")
    assert 0 < announced.stall_seconds < 1000
    checkpointer.finish()
