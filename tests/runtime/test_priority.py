"""How far an agent lets others go first: at the CPU and at the disk."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.harness.bounds import HANG_SECONDS

T = TypeVar("T")


def threads_of(agent: AgentProcess) -> list[int]:
    return [int(thread.name) for thread in Path(f"/proc/{agent.process.pid}/task").iterdir()]


def of_those_alive(value: Callable[[int], T], threads: list[int]) -> set[T]:
    """What `value` gives for these threads. The one that loads the store's library may end at any moment."""
    found = set()
    for thread in threads:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            found.add(value(thread))
    return found


def nice_of(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def io_priority_of(thread: int) -> tuple[int, int]:
    found = psutil.Process(thread).ionice()
    return int(found.ioclass), int(found.value)


@pytest.mark.parametrize(
    ("io_priority", "expected"), [("idle", (psutil.IOPRIO_CLASS_IDLE, 0)), ("6", (psutil.IOPRIO_CLASS_BE, 6))]
)
def test_every_thread_of_the_agent_goes_behind_the_others_as_far_as_the_settings_say(
    tmp_path: Path, io_priority: str, expected: tuple[int, int]
) -> None:
    ours = nice_of(0)
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/bucket", nice=3, io_priority=io_priority) as agent:
        # Threads that read and copy checkpoints come with the first one.
        source = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 100})
        agent.wait_committed(agent.announce(source, 1).save)
        threads = threads_of(agent)
        assert len(threads) > 2
        assert of_those_alive(nice_of, threads) == {min(19, ours + 3)}
        assert of_those_alive(io_priority_of, threads) == {expected}
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
    assert not agent.log("priority.refused")


def test_an_agent_that_nobody_asks_takes_its_turn_as_it_was_started(tmp_path: Path) -> None:
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/bucket") as agent:
        threads = threads_of(agent)
        assert of_those_alive(nice_of, threads) == {nice_of(0)}
        assert of_those_alive(io_priority_of, threads) == {io_priority_of(os.getpid())}
