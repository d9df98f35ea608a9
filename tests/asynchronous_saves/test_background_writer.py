"""Files are written behind the program in the order of its saves."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.bounds import HANG_SECONDS

from keepstep.asynchronous_saves import background_writer, host_memory
from keepstep.asynchronous_saves.background_writer import BackgroundSave, BackgroundWriter
from keepstep.asynchronous_saves.host_copy import HostCopy, copy_to_host
from keepstep.asynchronous_saves.host_memory import HostMemory


class Slow:
    """Writes when it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.written: list[str] = []

    def write(self, value: str, path: str) -> None:
        self.begun.set()
        assert self.go.wait(HANG_SECONDS)
        Path(path).write_text(value)
        self.written.append(value)


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.go.set()


@pytest.fixture
def writer() -> BackgroundWriter:
    return BackgroundWriter()


def hand_in(save: BackgroundSave, path: Path, value: str, write: Callable[[Any, str], object]) -> None:
    assert save.take(
        path, lambda _: HostCopy(value=value, size_bytes=1000), lambda copy, where: write(copy.value, where)
    )


def let_go_soon(slow: Slow) -> None:
    """Let it go when somebody waits, or a little later than that: nothing depends on how much later."""
    threading.Timer(0.2, slow.go.set).start()


def test_a_copy_that_fails_is_said_once_and_the_program_writes(
    writer: BackgroundWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(take: object) -> None:
        raise AttributeError("no _untyped_storage")

    save = writer.begin(tmp_path)
    assert [save.take(tmp_path / name, fail, lambda *_: None) for name in "ab"] == [False, False]
    assert len(caplog.messages) == 1
    assert "no _untyped_storage" in caplog.messages[0]


def test_a_file_that_the_program_renames_gets_its_content_there(
    writer: BackgroundWriter, slow: Slow, tmp_path: Path
) -> None:
    save = writer.begin(tmp_path)
    hand_in(save, tmp_path / "a.tmp", "text", slow.write)
    (tmp_path / "below").mkdir()
    (tmp_path / "a.tmp").rename(tmp_path / "below" / "a")
    slow.go.set()
    save.wait()
    assert (tmp_path / "below" / "a").read_text() == "text"
    assert not (tmp_path / "a.tmp").exists()


def test_a_file_that_is_gone_is_not_written(writer: BackgroundWriter, slow: Slow, tmp_path: Path) -> None:
    save = writer.begin(tmp_path)
    hand_in(save, tmp_path / "a", "text", slow.write)
    (tmp_path / "a").unlink()
    slow.go.set()
    save.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_saved_twice_has_what_was_saved_last(
    writer: BackgroundWriter, slow: Slow, tmp_path: Path
) -> None:
    slow.go.set()
    save = writer.begin(tmp_path)
    hand_in(save, tmp_path / "a", "first", slow.write)
    save.begin_writing()
    hand_in(save, tmp_path / "a", "second", slow.write)
    save.wait()
    assert (tmp_path / "a").read_text() == "second"


def test_what_follows_comes_after_all_files_and_hears_of_a_failure(writer: BackgroundWriter, tmp_path: Path) -> None:
    seen: list[Any] = []

    def fail(value: str, path: str) -> None:
        raise OSError(28, "No space left on device")

    good, bad = writer.begin(tmp_path), None
    hand_in(good, tmp_path / "a", "1", lambda value, path: seen.append(value))
    hand_in(good, tmp_path / "b", "2", lambda value, path: seen.append(value))
    good.then(seen.append)
    good.begin_writing()
    bad = writer.begin(tmp_path)
    hand_in(bad, tmp_path / "c", "3", fail)
    hand_in(bad, tmp_path / "d", "4", lambda value, path: seen.append(value))
    bad.then(lambda failure: seen.append(type(failure)))
    bad.wait()
    assert seen == ["1", "2", None, OSError]


def test_a_save_that_comes_too_early_waits_for_the_last_one(
    writer: BackgroundWriter, slow: Slow, tmp_path: Path
) -> None:
    save = writer.begin(tmp_path)
    hand_in(save, tmp_path / "a", "text", slow.write)
    save.begin_writing()
    let_go_soon(slow)
    writer.begin(tmp_path)
    assert slow.written == ["text"]


def test_without_memory_for_a_copy_the_program_writes_and_hears_of_it_once(
    writer: BackgroundWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 0)

    def copy(memory: HostMemory) -> Any:
        return memory.take([100])

    for name in ("a", "b"):
        save = writer.begin(tmp_path)
        assert not save.take(tmp_path / name, copy, lambda *_: None)
        assert not save.has_files
    assert not writer.is_on
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "the memory does not suffice for a copy of the state" in said[0]


def test_a_writer_that_hangs_ends_asynchronous_saves_and_not_the_training(
    writer: BackgroundWriter, slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_writer, "_PATIENCE_SECONDS", 0.1)
    save = writer.begin(tmp_path)
    hand_in(save, tmp_path / "a", "text", slow.write)
    save.begin_writing()
    assert slow.begun.wait(HANG_SECONDS)
    assert not writer.wait()
    monkeypatch.setattr(background_writer, "_PATIENCE_SECONDS", HANG_SECONDS)
    # Once is enough.
    assert not writer.wait()
    assert not writer.begin(tmp_path).take(tmp_path / "b", lambda _: HostCopy(value="x", size_bytes=1), slow.write)
    writer.close()
    assert not slow.written


def test_a_program_that_becomes_another_one_waits_for_what_is_written(tmp_path: Path) -> None:
    program = Path(__file__).with_name("replaced_process.py")
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["[]", "the other program"]
    assert torch.equal(torch.load(tmp_path / "checkpoint-1" / "state.pt"), torch.zeros(1024))


def test_the_thread_that_writes_gives_way_to_the_training(writer: BackgroundWriter, tmp_path: Path) -> None:
    nice: list[int] = []
    save = writer.begin(tmp_path)
    save.then(lambda _: nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    save.wait()
    assert nice[0] >= min(19, os.getpriority(os.PRIO_PROCESS, 0))
    assert nice[0] == 10


def test_no_memory_is_made_within_a_step_that_a_cuda_graph_captures(
    writer: BackgroundWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.expect()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_available", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
        assert writer._memory.size_bytes == 0
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    assert writer._memory.size_bytes > 0


@pytest.mark.parametrize("other", [None, torch.nn.Linear(100, 200)], ids=["one model", "a model beside it"])
def test_the_memory_is_there_before_the_first_save(other: torch.nn.Module | None, writer: BackgroundWriter) -> None:
    writer.expect(other)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    writer.wait()
    state = [*model.parameters(), *(tensor for kept in optimizer.state.values() for tensor in kept.values())]
    beside = [] if other is None else [*other.parameters()]
    assert writer._memory.size_bytes >= sum(tensor.nbytes for tensor in [*state, *beside])


def test_how_much_is_left_of_a_save_is_known_and_the_rest_can_be_given_up(
    writer: BackgroundWriter, slow: Slow, tmp_path: Path
) -> None:
    ended: list[BaseException | None] = []
    assert writer.in_flight() is None
    save = writer.begin(tmp_path)
    save.then(ended.append)
    hand_in(save, tmp_path / "a", "a", lambda *_: None)
    save.wait()
    assert writer.in_flight() is None

    def quarter_and_rest(value: str, path: str) -> None:
        save.wrote(250)
        slow.write(value, path)
        save.wrote(750)

    save = writer.begin(tmp_path)
    hand_in(save, tmp_path / "b", "b", lambda *_: save.wrote(400))
    hand_in(save, tmp_path / "c", "c", quarter_and_rest)
    hand_in(save, tmp_path / "d", "d", slow.write)
    save.then(ended.append)
    save.begin_writing()
    assert slow.begun.wait(HANG_SECONDS)
    flight = writer.in_flight()
    assert flight is not None
    # Of all of `a` and `b`, and of a quarter of `c`.
    assert (flight.left_bytes, flight.size_bytes) == (1750, 3000)
    assert flight.bytes_per_second > 0

    writer.give_up("no time")
    slow.go.set()
    save.wait()
    assert writer.in_flight() is None
    assert [str(failure) for failure in ended] == ["None", "no time"]
    assert slow.written == ["c"], "it was being written; what followed was not"


def test_a_second_save_of_one_state_waits_for_nothing(writer: BackgroundWriter, slow: Slow, tmp_path: Path) -> None:
    first = writer.begin(tmp_path)
    hand_in(first, tmp_path / "a", "first", slow.write)
    first.begin_writing()
    second = writer.begin(tmp_path, same_state=True)
    hand_in(second, tmp_path / "b", "second", slow.write)
    assert slow.written == []
    let_go_soon(slow)
    second.wait()
    assert slow.written == ["first", "second"]


def test_without_room_beside_the_first_copy_a_second_save_of_one_step_waits(
    writer: BackgroundWriter, slow: Slow, tmp_path: Path
) -> None:
    def one_at_a_time(memory: HostMemory) -> HostCopy | None:
        return None if memory.copies else HostCopy(value=memory.copies.setdefault(("cpu", 1, 1), "x"), size_bytes=1)

    first = writer.begin(tmp_path)
    assert first.take(tmp_path / "a", one_at_a_time, lambda _, path: slow.write("first", path))
    first.begin_writing()
    second = writer.begin(tmp_path, same_state=True)
    let_go_soon(slow)
    assert second.take(tmp_path / "b", one_at_a_time, lambda _, path: slow.write("second", path))
    assert slow.written == ["first"]
    assert writer.is_on
    second.wait()
    assert slow.written == ["first", "second"]


def test_a_second_save_of_a_state_that_has_changed_makes_no_second_copy(
    writer: BackgroundWriter, tmp_path: Path
) -> None:
    state = torch.zeros(20_000_000)
    for number in range(4):
        save = writer.begin(tmp_path, same_state=number > 0)
        assert save.take(tmp_path / str(number), lambda memory: copy_to_host(state, memory), lambda *_: None)
        save.begin_writing()
        state.add_(1)
    assert writer._memory.size_bytes < 100_000_000
    assert writer.is_on
    writer.wait()
