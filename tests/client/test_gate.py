"""The gate of one process: SIGTERM, the signal file, and what a step costs."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

import keepstep.gate.signal_file
from keepstep.gate import Action, SingleProcessGate
from keepstep.gate.sigterm import Sigterm
from keepstep_api import signal_file

Make = Callable[[], SingleProcessGate]


@pytest.fixture
def signal_path(tmp_path: Path) -> Path:
    return tmp_path / "signal"


@pytest.fixture
def make(signal_path: Path) -> Iterator[Make]:
    made: list[tuple[SingleProcessGate, Sigterm]] = []

    def new() -> SingleProcessGate:
        sigterm = Sigterm()
        made.append((SingleProcessGate(signal_path, sigterm), sigterm))
        return made[-1][0]

    yield new
    for gate, sigterm in reversed(made):
        gate.close()
        sigterm.close()


@pytest.fixture
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepstep.gate.signal_file, "_LOOK_SECONDS", 0.0)


def request_save(signal_path: Path, number: int, *, deadline_unix: float = 0.0) -> None:
    terminating = deadline_unix > 0
    content = signal_file.encode(
        signal_file.SaveSignal(number=number, deadline_unix=deadline_unix, terminating=terminating)
    )
    descriptor = os.open(signal_path, os.O_RDWR | os.O_CREAT, 0o660)
    os.pwrite(descriptor, content, 0)
    os.close(descriptor)


def test_nothing_is_asked_of_a_quiet_process(make: Make) -> None:
    gate = make()
    assert [gate.at(step) for step in (1, 2, 3)] == [Action.NOTHING] * 3


def test_sigterm_asks_to_stop_and_stays_asked(make: Make) -> None:
    gate = make()
    os.kill(os.getpid(), signal.SIGTERM)
    assert [gate.at(step) for step in (1, 2)] == [Action.SAVE_AND_EXIT] * 2
    assert gate._sigterm.would_end_process


def test_an_earlier_handler_is_called_and_put_back(make: Make) -> None:
    called: list[int] = []

    def earlier(signal_number: int, _: object) -> None:
        called.append(signal_number)

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        gate = make()
        os.kill(os.getpid(), signal.SIGTERM)
        assert gate.at(1) is Action.SAVE_AND_EXIT
        assert called == [signal.SIGTERM]
        assert not gate._sigterm.would_end_process
        gate._sigterm.close()
        assert signal.getsignal(signal.SIGTERM) == earlier
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_earlier_handler_that_exits_does_not_end_the_process_before_the_save(make: Make) -> None:
    def earlier(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        gate = make()
        os.kill(os.getpid(), signal.SIGTERM)
        assert gate.at(1) is Action.SAVE_AND_EXIT
        assert gate._sigterm.would_end_process
    finally:
        gate._sigterm.close()
        signal.signal(signal.SIGTERM, before)


def test_a_handler_installed_later_is_left_in_place(make: Make) -> None:
    def later(*_: object) -> None: ...

    gate = make()
    before = signal.signal(signal.SIGTERM, later)
    assert not gate._sigterm.would_end_process
    gate._sigterm.close()
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert callable(before)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(HANG_SECONDS)


def terminate(gate: SingleProcessGate) -> None:
    """Send SIGTERM, and wait until any thread has taken it."""
    os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + HANG_SECONDS
    while not gate._sigterm.received and time.monotonic() < until:
        time.sleep(0.001)


def test_another_thread_than_the_main_one_hears_of_sigterm_too(make: Make, signal_path: Path) -> None:
    request_save(signal_path, 0)
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Action] = []

    def train() -> None:
        gate = make()
        seen.append(gate.at(1))
        terminate(gate)
        seen.append(gate.at(2))
        gate._sigterm.close()
        seen.append(gate.at(3))

    in_thread(train)
    assert seen == [Action.NOTHING, Action.SAVE_AND_EXIT, Action.SAVE_AND_EXIT]
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_thread_leaves_the_handler_of_the_program_in_place(make: Make, signal_path: Path) -> None:
    request_save(signal_path, 0)
    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    seen: list[Action] = []

    def train() -> None:
        gate = make()
        terminate(gate)
        seen.append(gate.at(1))
        assert not gate._sigterm.would_end_process
        # faulthandler puts its handler back when the one before it has run.
        wait_until(lambda: bool(handled), HANG_SECONDS, "the program's handler has run")
        gate._sigterm.close()

    try:
        in_thread(train)
        assert seen == [Action.SAVE_AND_EXIT]
        assert handled == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled == [signal.SIGTERM, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_worker_that_another_thread_forked_dies_of_sigterm(make: Make) -> None:
    codes: list[int] = []

    def train() -> None:
        gate = make()
        process_id = os.fork()
        if process_id == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        codes.append(os.waitpid(process_id, 0)[1])
        assert gate.at(1) is Action.NOTHING
        gate._sigterm.close()

    in_thread(train)
    assert codes == [signal.SIGTERM]


def test_a_forked_worker_dies_of_sigterm(make: Make) -> None:
    make()
    process_id = os.fork()
    if process_id == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(process_id, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_an_operators_request_asks_for_one_save(make: Make, signal_path: Path) -> None:
    request_save(signal_path, 0)
    gate = make()
    request_save(signal_path, 1)
    assert [gate.at(step) for step in (1, 1, 2)] == [Action.SAVE, Action.SAVE, Action.NOTHING]


def test_a_notice_outweighs_an_operators_request(make: Make, signal_path: Path) -> None:
    request_save(signal_path, 0)
    gate = make()
    request_save(signal_path, 1)
    assert gate.at(1) is Action.SAVE
    request_save(signal_path, 2, deadline_unix=time.time() + 3600)
    assert [gate.at(step) for step in (1, 2)] == [Action.SAVE_AND_EXIT] * 2


@pytest.mark.parametrize(("seconds_left", "asked"), [(3600.0, Action.SAVE_AND_EXIT), (-1.0, Action.NOTHING)])
def test_a_notice_from_before_the_start_counts_until_its_deadline(
    make: Make, signal_path: Path, seconds_left: float, asked: Action
) -> None:
    request_save(signal_path, 3, deadline_unix=time.time() + seconds_left)
    assert make().at(1) is asked


def test_an_operators_request_from_before_the_start_does_not_count(make: Make, signal_path: Path) -> None:
    request_save(signal_path, 3)
    assert make().at(1) is Action.NOTHING


@pytest.mark.usefixtures("look_always")
def test_a_signal_file_made_after_the_start_is_found(make: Make, signal_path: Path) -> None:
    gate = make()
    assert gate.at(1) is Action.NOTHING
    request_save(signal_path, 1)
    assert gate.at(2) is Action.SAVE


@pytest.mark.usefixtures("look_always")
def test_a_signal_file_made_anew_by_another_agent_is_found(make: Make, signal_path: Path) -> None:
    request_save(signal_path, 5)
    gate = make()
    fresh = signal_path.with_name("fresh")
    request_save(fresh, 0)
    fresh.replace(signal_path)
    assert gate.at(1) is Action.NOTHING
    request_save(signal_path, 1)
    assert gate.at(2) is Action.SAVE


@pytest.mark.usefixtures("look_always")
@pytest.mark.parametrize("content", [b"", b"MRNG", b"\xff" * 64])
def test_a_file_that_is_no_signal_file_asks_for_nothing(make: Make, signal_path: Path, content: bytes) -> None:
    signal_path.write_bytes(content)
    assert make().at(1) is Action.NOTHING


def test_a_step_costs_microseconds(make: Make, signal_path: Path) -> None:
    request_save(signal_path, 0)

    def seconds(ask: Callable[[int], object]) -> float:
        # Of this thread's own time: others may have the processor meanwhile.
        began = time.thread_time()
        for step in range(20_000):
            ask(step)
        return time.thread_time() - began

    # In turns with what Python does in some 0.05 µs, on this machine as it is now.
    gate = make()
    pairs = [(seconds(lambda step: step), seconds(gate.at)) for _ in range(5)]
    nothing, gated = (min(times) for times in zip(*pairs, strict=True))
    print(f"gate: as {gated / nothing:.0f} calls of a function that does nothing")
    assert gated < 400 * nothing
