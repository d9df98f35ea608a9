"""A volume without a byte left: the agent stays, takes the last save, drains, and can be started again."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, json_lines, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import step_of
from tests.harness.small_volume import mounted

from keepstep_api.v1 import agent_pb2

_MIB = 1 << 20
_ENDED = {agent_pb2.PHASE_RELEASED, agent_pb2.PHASE_SHED, agent_pb2.PHASE_FAILED}
_NOWHERE: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:9", "eviction_threshold_percent": "0"}


def _fill(volume: Path) -> None:
    """Until a single byte more is refused."""
    with (volume / "filler").open("ab", buffering=0) as file:
        for piece in (_MIB, 4096, 1):
            try:
                while file.write(os.urandom(piece)):
                    pass
            except OSError:
                continue


def _fill_until_the_journal_is_unwritable(agent: AgentProcess) -> None:
    def unwritable() -> bool:
        # Again and again: the agent gives its reserve up for its records.
        _fill(agent.volume)
        return bool(agent.log("journal.unwritable"))

    wait_until(unwritable, HANG_SECONDS, "the journal cannot be written")


def _assert_the_journal_had_no_room(agent: AgentProcess) -> None:
    """Until the commit; then the checkpoint's pins are dropped."""
    events = [line["event"] for line in json_lines(agent.log_text())]
    assert "journal.writable_again" not in events[: events.index("checkpoint.committed")]


@contextmanager
def _agent_on_a_small_volume(tmp_path: Path, **settings: Any) -> Iterator[AgentProcess]:
    """64 MiB; it sends to a directory beside it, in parts of 5 MiB."""
    with (
        mounted(tmp_path / "volume", 64 * _MIB) as volume,
        AgentProcess(volume, f"file://{tmp_path / 'destination'}", part_size_bytes="5MiB", **settings) as agent,
    ):
        yield agent


@pytest.mark.root
def test_a_full_volume_stops_neither_the_agent_nor_the_last_save(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "volume", 64 * _MIB) as volume,
        AgentProcess(volume, "s3://bucket/run", grace_seconds="4", **_NOWHERE) as agent,
    ):
        for step in (1, 2, 3):
            agent.announce(write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"a": 5 * _MIB}), step)
        last = write_checkpoint(agent.checkpoints / "checkpoint-4", {"a": _MIB})
        _fill(volume)
        # Not by the budget: giving up what is superseded is journaled, and the reserve that this takes is room again.
        wait_until(lambda: bool(agent.log("checkpoint.shed")), HANG_SECONDS, "the agent sees that nothing is left")
        answer = agent.announce(last, 4, kind=2)
        assert answer.size_bytes == _MIB
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 75
        assert "checkpoint-4 (step 4, just-in-time)" in agent.log_text()


@pytest.mark.root
def test_an_agent_that_was_killed_starts_again_on_a_full_volume(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "volume", 64 * _MIB) as volume,
        AgentProcess(volume, f"file://{tmp_path / 'destination'}") as agent,
    ):
        agent.kill()
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"a": 5 * _MIB})
        _fill(volume)
        agent.start()
        committed = agent.wait_committed(agent.announce(path, 1).save)
        assert committed.step == 1


@pytest.mark.root
def test_what_was_committed_on_a_full_volume_is_committed_after_a_restart_too(tmp_path: Path) -> None:
    with _agent_on_a_small_volume(tmp_path, bandwidth_bytes_per_second=4 * _MIB) as agent:
        save = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"a": 40 * _MIB}), 1).save
        _fill_until_the_journal_is_unwritable(agent)
        wait_until(lambda: bool(agent.log("checkpoint.committed")), HANG_SECONDS, "it is committed all the same")
        _assert_the_journal_had_no_room(agent)
        agent.kill()
        (agent.volume / "filler").unlink()
        agent.start()
        # By the marker, unless the room of its pins was enough for the record.
        assert agent.wait_committed(save).step == 1
        assert not agent.log("checkpoint.failed")


@pytest.mark.root
def test_a_volume_that_is_full_of_committed_checkpoints_has_room_again(tmp_path: Path) -> None:
    with _agent_on_a_small_volume(tmp_path, bandwidth_bytes_per_second=4 * _MIB) as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"a": 40 * _MIB})
        agent.announce(path, 1)
        shutil.rmtree(path)
        _fill_until_the_journal_is_unwritable(agent)
        wait_until(lambda: bool(agent.log("journal.writable_again")), HANG_SECONDS, "its pins are dropped")
        # The journal may have room for a record before the pins are dropped.
        wait_until(lambda: shutil.disk_usage(agent.volume).free > 20 * _MIB, HANG_SECONDS, "there is room")


@pytest.mark.root
def test_an_agent_whose_reserve_is_spent_starts_again_on_a_full_volume(tmp_path: Path) -> None:
    with _agent_on_a_small_volume(tmp_path, bandwidth_bytes_per_second=4 * _MIB) as agent:
        save = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"a": 40 * _MIB}), 1).save
        _fill_until_the_journal_is_unwritable(agent)
        agent.kill()
        _fill(agent.volume)
        agent.start()
        # What was promised is kept, though the journal has still no room.
        assert agent.wait_committed(save).step == 1
        _assert_the_journal_had_no_room(agent)


@pytest.mark.root
def test_an_agent_whose_journal_is_damaged_starts_again_on_a_full_volume_without_reserve(tmp_path: Path) -> None:
    with _agent_on_a_small_volume(tmp_path, bandwidth_bytes_per_second=_MIB) as agent:
        save = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"a": 20 * _MIB}), 1).save
        _fill_until_the_journal_is_unwritable(agent)
        agent.kill()
        _fill(agent.volume)
        with (agent.volume / ".keepstep/agent/journal.sqlite3").open("r+b") as journal:
            journal.write(bytes(16))
        agent.start()
        agent.kill()
        # The damaged one was moved aside, so that none is there.
        agent.start()
        assert agent.wait_committed(save).step == 1
        _assert_the_journal_had_no_room(agent)
        (agent.volume / "filler").unlink()
        wait_until(lambda: bool(agent.log("journal.writable_again")), HANG_SECONDS, "the records are journaled")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [False, True], ids=["by one agent", "by agents that are killed"])
def test_every_acknowledged_save_on_a_full_volume_is_committed_or_reported(tmp_path: Path, killed: bool) -> None:
    with _agent_on_a_small_volume(tmp_path, bandwidth_bytes_per_second=8 * _MIB) as agent:
        acknowledged: set[int] = set()
        step = 0
        while len(acknowledged) < 40:
            step += 1
            path = agent.checkpoints / f"checkpoint-{step}"
            with suppress(OSError, grpc.RpcError):
                write_checkpoint(path, {"a": (step % 3 + 1) * _MIB, "b": 1000})
                if step % 4 == 0:
                    _fill(agent.volume)
                agent.announce(path, step, save=f"save-{step}")
                acknowledged.add(step)
            if killed and step % 8 == 0:
                agent.kill()
                agent.start()
            # Nor does the trainer keep what was refused.
            shutil.rmtree(path, ignore_errors=True)
            (agent.volume / "filler").unlink(missing_ok=True)
        wait_until(lambda: all(one.phase in _ENDED for one in agent.status().checkpoints), HANG_SECONDS, "all are over")
        log = agent.log_text()
    reported = _reported_steps(log)
    assert acknowledged <= _committed_steps(tmp_path / "destination") | reported


def _committed_steps(destination: Path) -> set[int]:
    return {step_of(marker.name) for marker in (destination / ".keepstep/commits").glob("*")}


def _reported_steps(log: str) -> set[int]:
    """Given up or failed, the last that was said of them."""
    reported: set[int] = set()
    for line in json_lines(log):
        if line["event"] in ("checkpoint.announced", "checkpoint.committed"):
            reported.discard(line["step"])
        if line["event"] in ("checkpoint.shed", "checkpoint.failed"):
            reported.add(line["step"])
    return reported
