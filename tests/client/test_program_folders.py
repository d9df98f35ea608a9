"""A checkpoint in a folder of the program's own is announced with what the program adds to it, under its last name."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.agent_server import AgentServer
from tests.harness.bounds import HANG_SECONDS

from keepstep.framework_run import FrameworkRun, run
from keepstep.framework_run.after_save import wait_until_quiet
from keepstep.gate import Action
from keepstep_api import names
from keepstep_api.v1 import agent_pb2


@pytest.fixture
def framework(agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrameworkRun]:
    monkeypatch.setenv(names.ENV_VOLUME, str(volume))
    current = FrameworkRun.current()
    yield current
    current.close()


@pytest.fixture
def never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the next save and the end show that the program is done."""
    monkeypatch.setattr(run, "wait_until_quiet", lambda _, wait_no_more: wait_no_more.wait())


def save(framework: FrameworkRun, place: Path, step: int, *, program_files_of: Path | None = None) -> None:
    def write(path: Path) -> None:
        path.mkdir()
        (path / "weights").write_text(str(step))

    assert framework.save(
        place, step, write, asynchronous=False, program_folder=True, program_files_of=program_files_of
    )
    framework.announce()


def save_and_add_when_announced(framework: FrameworkRun, place: Path) -> None:
    save(framework, place, 1)
    thread, _ = framework._waiting or pytest.fail("it is announced already")
    thread.join()
    (place / "meta.pt").write_text("late")


def announced(agent: AgentServer) -> list[tuple[str, int, list[str], list[str]]]:
    requests: list[Any] = agent.requests("AnnounceCheckpoint")
    return [(one.name, one.step, list(one.files), list(one.others)) for one in requests]


@pytest.mark.usefixtures("never_quiet")
def test_what_is_added_before_the_next_save_belongs_to_the_checkpoint(
    framework: FrameworkRun, agent: AgentServer, volume: Path
) -> None:
    for step in (1, 2):
        place = volume / "out" / f"step-{step}"
        save(framework, place, step)
        (place / "meta.pt").write_text("the program's")
        assert len(announced(agent)) == step - 1
    framework.close()
    assert announced(agent) == [(f"step-{step}", step, ["weights"], ["meta.pt"]) for step in (1, 2)]


def test_when_the_folder_is_quiet_nothing_waits_for_the_next_save(
    framework: FrameworkRun, agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_added = threading.Event()

    def wait_until_added_and_quiet(folder: Path, wait_no_more: threading.Event) -> None:
        assert is_added.wait(HANG_SECONDS)
        wait_until_quiet(folder, wait_no_more)

    monkeypatch.setattr(run, "wait_until_quiet", wait_until_added_and_quiet)
    place = volume / "out" / "step-1"
    save(framework, place, 1)
    thread, _ = framework._waiting or pytest.fail("it is announced already")
    (place / "meta.pt").write_text("the program's")
    is_added.set()
    thread.join()
    assert announced(agent) == [("step-1", 1, ["weights"], ["meta.pt"])]


def test_what_is_added_later_makes_a_new_save_of_that_checkpoint(
    framework: FrameworkRun, agent: AgentServer, volume: Path
) -> None:
    save_and_add_when_announced(framework, volume / "out" / "step-1")
    save(framework, volume / "out" / "step-2", 2)
    framework.close()
    assert announced(agent) == [
        ("step-1", 1, ["weights"], []),
        ("step-1", 1, ["weights"], ["meta.pt"]),
        ("step-2", 2, ["weights"], []),
    ]
    first, second, _ = (request.save for request in agent.requests("AnnounceCheckpoint"))
    assert first != second


@pytest.mark.parametrize("late", [False, True], ids=["before it is announced", "after it was announced"])
def test_a_checkpoint_that_is_renamed_is_announced_under_its_new_name(
    framework: FrameworkRun, agent: AgentServer, volume: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not late:
        monkeypatch.setattr(run, "wait_until_quiet", lambda _, wait_no_more: wait_no_more.wait())
    for step in (1, 2):
        save(framework, volume / "out" / "tmp", step)
        thread, _ = framework._waiting or pytest.fail("it is announced already")
        if late:
            thread.join()
        (volume / "out" / "tmp").rename(volume / "out" / f"step-{step}")
    framework.close()
    found = [(name, step) for name, step, *_ in announced(agent)]
    assert found == ([("tmp", 1), ("step-1", 1), ("tmp", 2), ("step-2", 2)] if late else [("step-1", 1), ("step-2", 2)])


def test_what_was_added_before_a_notice_makes_no_just_in_time_save(
    framework: FrameworkRun, agent: AgentServer, volume: Path
) -> None:
    save_and_add_when_announced(framework, volume / "out" / "step-1")
    assert framework.action_at(1) is Action.NOTHING
    os.kill(os.getpid(), signal.SIGTERM)
    assert framework.action_at(2) is Action.SAVE_AND_EXIT
    save(framework, volume / "out" / "step-2", 2)
    kinds = [agent_pb2.Kind.Name(request.kind) for request in agent.requests("AnnounceCheckpoint")]
    assert kinds == ["KIND_PERIODIC", "KIND_PERIODIC", "KIND_JUST_IN_TIME"]


@pytest.mark.usefixtures("never_quiet")
def test_a_save_that_the_program_does_not_know_of_takes_its_files_along(
    framework: FrameworkRun, agent: AgentServer, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "keepstep")
    place = volume / "out" / "step-1"
    save(framework, place, 1)
    (place / "state.json").write_text("of step 1")
    assert framework.action_at(1) is Action.NOTHING
    os.kill(os.getpid(), signal.SIGTERM)
    assert framework.action_at(2) is Action.SAVE_AND_EXIT
    save(framework, volume / "out" / "step-2", 2, program_files_of=place)
    assert (volume / "out" / "step-2" / "state.json").read_text() == "of step 1"
    assert "the program's own files of" in caplog.text
    assert announced(agent)[-1] == ("step-2", 2, ["state.json", "weights"], [])


def test_a_file_of_the_save_that_the_program_removes_or_changes_is_announced_as_it_is(
    framework: FrameworkRun, agent: AgentServer, volume: Path
) -> None:
    place = volume / "out" / "step-1"

    def write(path: Path) -> None:
        path.mkdir()
        for name in ("weights", "adapter"):
            (path / name).write_text("whole")

    assert framework.save(place, 1, write, asynchronous=False)
    (place / "weights").unlink()
    (place / "adapter").write_text("longer than before")
    framework.announce()
    assert announced(agent) == [("step-1", 1, ["adapter"], [])]
    assert framework.newest() == place


def test_a_save_that_fails_before_the_program_does_not_come_back_at_the_next_start(
    framework: FrameworkRun, volume: Path
) -> None:
    place = volume / "out" / "step-1"
    place.parent.mkdir(parents=True)
    place.write_text("the program's")
    with pytest.raises(OSError, match="directory"):
        save(framework, place, 1)
    assert place.read_text() == "the program's"
    assert not list((volume / ".keepstep" / "saving").iterdir())


def test_a_folder_in_which_the_whole_volume_would_be_saved_is_not_protected(
    framework: FrameworkRun, agent: AgentServer, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(path: Path) -> None:
        (path / "weights").write_text("1")

    assert framework.save(volume, 1, write, asynchronous=False)
    framework.announce()
    assert (volume / "weights").read_text() == "1"
    assert announced(agent) == []
    assert "not stored" in caplog.text
