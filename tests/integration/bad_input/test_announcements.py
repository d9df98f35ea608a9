"""Whatever is wrong with an announcement or a call is said with a hint, and the next one is served."""

import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.integration.bad_input.agent_calls import MIB, SIZES, good_checkpoint, make_agent, refusal
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from keepstep_api.v1 import agent_pb2


def outside(agent: AgentProcess) -> dict[str, Any]:
    return {"path": write_checkpoint(agent.volume.parent / "outside" / "checkpoint-1", SIZES)}


def link_that_leaves(agent: AgentProcess) -> dict[str, Any]:
    directory = good_checkpoint(agent, 1)
    (directory / "more.bin").symlink_to(write_checkpoint(agent.volume.parent / "outside", SIZES) / "config.json")
    return {"path": directory}


def missing(agent: AgentProcess) -> dict[str, Any]:
    return {"path": agent.checkpoints / "checkpoint-1"}


def empty(agent: AgentProcess) -> dict[str, Any]:
    return {"path": write_checkpoint(agent.checkpoints / "checkpoint-1", {})}


def name_not_utf8(agent: AgentProcess) -> dict[str, Any]:
    directory = good_checkpoint(agent, 1)
    Path(os.fsdecode(os.fsencode(directory) + b"/caf\xe9.bin")).write_bytes(b"x")
    return {"path": directory}


def announcing(**fields: Any) -> Callable[[AgentProcess], dict[str, Any]]:
    """A sound checkpoint with fields that make no sense."""
    return lambda agent: {"path": good_checkpoint(agent, 1), **fields}


BAD_ANNOUNCEMENTS = {
    "outside the volume": (outside, "INVALID_ARGUMENT", "PATH_OUTSIDE_VOLUME"),
    "a link out of the volume": (link_that_leaves, "INVALID_ARGUMENT", "PATH_OUTSIDE_VOLUME"),
    "nothing there": (missing, "NOT_FOUND", "PATH_MISSING"),
    "an empty directory": (empty, "INVALID_ARGUMENT", "CHECKPOINT_EMPTY"),
    "a name that is not UTF-8": (name_not_utf8, "INVALID_ARGUMENT", "BAD_NAME"),
    "a relative path": (lambda _: {"path": "checkpoints/checkpoint-1"}, "INVALID_ARGUMENT", "BAD_REQUEST"),
    "a path with a zero byte": (lambda agent: {"path": f"{agent.volume}/a\0b"}, "INVALID_ARGUMENT", "BAD_REQUEST"),
    "the same with a save id": (
        lambda agent: {"path": f"{agent.volume}/a\0b", "save": "s"},
        "INVALID_ARGUMENT",
        "BAD_REQUEST",
    ),
    "a path too long to exist": (
        lambda agent: {"path": f"{agent.volume}/{'long' * 100}"},
        "UNAVAILABLE",
        "VOLUME_UNUSABLE",
    ),
    "everything there is": (lambda _: {"path": "/"}, "INVALID_ARGUMENT", "PATH_OUTSIDE_VOLUME"),
    "no path": (lambda _: {"path": ""}, "INVALID_ARGUMENT", "BAD_REQUEST"),
    "a rank that is not in the world": (announcing(rank=2, world_size=2, save="s"), "INVALID_ARGUMENT", "BAD_REQUEST"),
    "a world of all the ranks that there can be": (
        announcing(world_size=2**32 - 1, save="s"),
        "INVALID_ARGUMENT",
        "BAD_REQUEST",
    ),
    "more ranks here than one agent serves": (
        announcing(world_size=5000, local_world_size=5000, save="s"),
        "INVALID_ARGUMENT",
        "BAD_REQUEST",
    ),
    "a step that no key has room for": (announcing(step=2**64 - 1), "INVALID_ARGUMENT", "BAD_REQUEST"),
    "a name of a megabyte": (announcing(name="n" * 2**20), "INVALID_ARGUMENT", "BAD_REQUEST"),
    "a million files": (announcing(files=["a"] * 1_000_000), "INVALID_ARGUMENT", "BAD_REQUEST"),
    "several ranks without a save id": (announcing(world_size=2), "INVALID_ARGUMENT", "BAD_REQUEST"),
    "a bad save id": (announcing(save="a/b"), "INVALID_ARGUMENT", "BAD_NAME"),
    "a bad name": (announcing(name="../escape"), "INVALID_ARGUMENT", "BAD_NAME"),
    "a bad file": (announcing(files=["../config.json"]), "INVALID_ARGUMENT", "BAD_NAME"),
    "others without files": (announcing(others=["config.json"]), "INVALID_ARGUMENT", "BAD_REQUEST"),
    "more others than are copied": (
        announcing(files=["config.json"], others=["a"] * 1001),
        "INVALID_ARGUMENT",
        "BAD_REQUEST",
    ),
    "one of the others that leads elsewhere": (
        announcing(files=["config.json"], others=["../a"]),
        "INVALID_ARGUMENT",
        "BAD_NAME",
    ),
    "a file that is not there": (announcing(files=["nothing.bin"]), "NOT_FOUND", "PATH_MISSING"),
}


def test_a_bad_announcement_is_refused_with_a_reason_and_a_hint_and_the_next_is_served(agent: AgentProcess) -> None:
    for step, (case, (make, code, reason)) in enumerate(BAD_ANNOUNCEMENTS.items(), start=7):
        fields = make(agent)
        found_code, found_reason, hint = refusal(lambda fields=fields: agent.announce(**{"step": 1, **fields}))  # type: ignore[misc]
        assert (found_code, found_reason) == (code, reason), case
        assert hint, case
        save = agent.announce(good_checkpoint(agent, step), step).save
        assert agent.wait_committed(save).step == step, case
        for used in (agent.checkpoints / "checkpoint-1", agent.volume.parent / "outside"):
            shutil.rmtree(used, ignore_errors=True)


def test_no_other_call_fails_without_a_reason_and_a_hint(agent: AgentProcess) -> None:
    with agent.stub() as stub:
        calls = (
            lambda: stub.Register(agent_pb2.RegisterRequest(rank=2, world_size=2), timeout=HANG_SECONDS),
            lambda: stub.BeginSave(agent_pb2.BeginSaveRequest(attempt="a/b"), timeout=HANG_SECONDS),
            lambda: stub.NotifyTermination(agent_pb2.NotifyTerminationRequest(grace_seconds=-1), timeout=HANG_SECONDS),
            lambda: stub.NotifyTermination(
                agent_pb2.NotifyTerminationRequest(grace_seconds=math.inf), timeout=HANG_SECONDS
            ),
            lambda: stub.WaitCommitted(agent_pb2.WaitCommittedRequest(save="unknown"), timeout=HANG_SECONDS),
        )
        refusals = [refusal(call) for call in calls]
    assert [(code, reason) for code, reason, _ in refusals] == [
        ("INVALID_ARGUMENT", "BAD_REQUEST"),
        ("INVALID_ARGUMENT", "BAD_NAME"),
        ("INVALID_ARGUMENT", "BAD_REQUEST"),
        ("INVALID_ARGUMENT", "BAD_REQUEST"),
        ("NOT_FOUND", "UNKNOWN_SAVE"),
    ]
    assert all(hint for _, _, hint in refusals)


def test_an_announcement_that_was_refused_is_welcome_once_it_is_mended(agent: AgentProcess) -> None:
    path = agent.checkpoints / "checkpoint-1"
    fields = {"save": "attempt-1", "name": "checkpoint-1"}
    assert refusal(lambda: agent.announce(path, 1, **fields))[1] == "PATH_MISSING"
    path.mkdir()
    assert refusal(lambda: agent.announce(path, 1, **fields))[1] == "CHECKPOINT_EMPTY"
    (path / "model.safetensors").write_bytes(b"weights")
    assert agent.announce(path, 1, **fields).save == "attempt-1"
    assert agent.wait_committed("attempt-1").phase in (agent_pb2.PHASE_COMMITTED, agent_pb2.PHASE_RELEASED)


def test_ranks_that_disagree_about_their_world_are_told_so(agent: AgentProcess) -> None:
    fields = {"save": "attempt-1", "local_world_size": 2}
    directory = good_checkpoint(agent, 1)
    agent.announce(directory, 1, rank=0, world_size=2, **fields)
    code, reason, hint = refusal(lambda: agent.announce(directory, 1, rank=1, world_size=3, **fields))
    assert (code, reason) == ("FAILED_PRECONDITION", "CONTRADICTION")
    assert "world size" in hint
    agent.announce(directory, 1, rank=1, world_size=2, **fields)
    assert agent.wait_committed("attempt-1").world_size == 2


def test_the_same_announcement_twice_is_one_checkpoint_with_one_answer(agent: AgentProcess) -> None:
    directory = good_checkpoint(agent)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: agent.announce(directory, 7, save="attempt-7"), range(4)))
    answers.append(agent.announce(directory, 7, save="attempt-7"))
    assert {(answer.save, answer.size_bytes, answer.file_count) for answer in answers} == {("attempt-7", 300_200, 2)}
    agent.wait_committed("attempt-7")
    assert len(agent.status().checkpoints) == 1
    assert len(agent.log("checkpoint.announced")) == 1


def test_the_same_announcement_twice_without_a_save_id_is_one_checkpoint_too(agent: AgentProcess) -> None:
    directory = good_checkpoint(agent)
    save = agent.announce(directory, 7).save
    assert agent.announce(directory, 7).save == save
    agent.wait_committed(save)
    assert agent.announce(directory, 7).save == save
    assert len(agent.status().checkpoints) == 1


def test_waiting_for_a_save_that_nobody_knows_is_refused(agent: AgentProcess) -> None:
    code, reason, hint = refusal(lambda: agent.wait_committed("never-heard-of"))
    assert (code, reason) == ("NOT_FOUND", "UNKNOWN_SAVE")
    assert "ListCheckpoints" in hint
    assert refusal(lambda: agent.wait_committed(""))[1] == "UNKNOWN_SAVE"


def test_a_rank_that_is_not_in_the_world_cannot_register(agent: AgentProcess) -> None:
    with agent.stub() as stub:
        request = agent_pb2.RegisterRequest(rank=4, world_size=4)
        code, reason, _ = refusal(lambda: stub.Register(request, timeout=HANG_SECONDS))
    assert (code, reason) == ("INVALID_ARGUMENT", "BAD_REQUEST")


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"other bytes")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [rewrite, truncate])
def test_a_file_that_changes_while_it_is_sent_fails_its_checkpoint_alone(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy, change: Callable[[Path], None]
) -> None:
    # A minute for a file that is changed after a moment.
    fault_proxy.throttle(MIB)
    agent = make_agent(tmp_path / "volume", rclone_bucket, endpoint_url=fault_proxy.endpoint_url)
    with agent:
        directory = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.safetensors": 60 * MIB})
        save = agent.announce(directory, 1).save
        wait_until(
            lambda: agent.status().checkpoints[0].phase == agent_pb2.PHASE_UPLOADING, HANG_SECONDS, "it is being sent"
        )
        change(directory / "model.safetensors")
        fault_proxy.throttle(0)
        code, reason, hint = refusal(lambda: agent.wait_committed(save))
        assert (code, reason) == ("ABORTED", "CHECKPOINT_FAILED")
        assert "new files" in hint
        assert agent.status().checkpoints[0].reason

        good = good_checkpoint(agent)
        original = tree(good)
        agent.wait_committed(agent.announce(good, 7).save)
    view = BucketView(rclone_bucket)
    assert [row["step"] for row in view.verify()] == [7]
    assert tree(view.restore(tmp_path / "other")) == original


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_files_simply_work(agent: AgentProcess, rclone_bucket: Bucket, tmp_path: Path) -> None:
    sizes = {f"shard-{number % 100:02d}/{number:05d}.bin": number % 700 for number in range(10_000)}
    directory = write_checkpoint(agent.checkpoints / "checkpoint-1", sizes)
    began = time.monotonic()
    answer = agent.announce(directory, 1)
    staged = time.monotonic()
    assert answer.file_count == 10_000
    agent.wait_committed(answer.save, HANG_SECONDS)
    print(f"10,000 files: staged in {staged - began:.1f} s, committed {time.monotonic() - staged:.1f} s later")
    assert tree(BucketView(rclone_bucket).restore(tmp_path / "other")) == tree(directory)
