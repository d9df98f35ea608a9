"""Several ranks with real processes and torch's real store: one step for all, one checkpoint of all, one way out."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from tests.client.agent_server import AgentServer, serving
from tests.client.ranks.job import Rank, job, notify
from tests.torch_loop.torchrun import torchrun

from keepstep_api import names, signal_file
from keepstep_api.v1 import agent_pb2

ENOUGH_STEPS = 4000
"""More than any rank does until all have agreed; as many lines fit into the smallest pipe."""
LINGERING = Path(__file__).with_name("ranks") / "lingering.py"


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return tmp_path / "v"


def begin(ranks: list[Rank], steps: int) -> None:
    for rank in ranks:
        rank.wait_for("begin")
        rank.go(steps)
    for rank in ranks:
        rank.wait_for(f"step {steps}")


def record_of(volume: Path, name: str) -> dict[str, object]:
    record: dict[str, object] = json.loads((volume / ".keepstep/records" / f"{name}.json").read_text())
    return record


def saved_steps(ranks: list[Rank], word: str = "saved") -> set[tuple[str, ...]]:
    return {tuple(line for line in rank.rest() if line.startswith(word)) for rank in ranks}


@pytest.mark.parametrize("noticed", [0, 1])
def test_a_notice_to_one_rank_makes_all_save_at_the_same_step_and_leave(
    tmp_path: Path, volume: Path, noticed: int
) -> None:
    with job("checkpointer", tmp_path, [volume], local_world_size=2) as ranks:
        begin(ranks, 5)
        notify(ranks[noticed])
        for rank in ranks:
            rank.go(ENOUGH_STEPS)
        ((saved,),) = saved_steps(ranks)
        assert [rank.exit_code() for rank in ranks] == [names.JUST_IN_TIME_EXIT_CODE] * 2
    step = int(saved.split()[1])
    record = record_of(volume, f"checkpoint-{step}")
    assert (record["kind"], record["world_size"]) == ("just-in-time", 2)
    assert [file["path"] for file in record["files"]] == ["rank-0", "rank-1"]  # type: ignore[attr-defined]

    with job("checkpointer", tmp_path, [volume], local_world_size=2, STEPS=str(step + 1)) as ranks:
        for rank in ranks:
            assert rank.wait_for("begin") == [f"begin {step}"]
            rank.go()
        assert {tuple(rank.rest()) for rank in ranks} == {(f"step {step + 1}", "done")}
        assert [rank.exit_code() for rank in ranks] == [0, 0]


@pytest.mark.parametrize(("grace_seconds", "is_finished"), [(3600, True), (0, False)], ids=["time", "no time"])
def test_a_save_that_one_rank_has_no_time_to_finish_is_given_up_by_all(
    grace_seconds: float, is_finished: bool, tmp_path: Path, volume: Path
) -> None:
    server = AgentServer()
    server.status = agent_pb2.Status(deadline=time.time() + grace_seconds)
    with serving(volume / names.STATE_DIRECTORY / names.SOCKET, server):
        scenario = "asynchronous_checkpointer_with_a_slow_rank"
        with job(scenario, tmp_path, [volume], local_world_size=2) as ranks:
            for rank in ranks:
                rank.go(ENOUGH_STEPS)
            assert [rank.exit_code() for rank in ranks] == [names.JUST_IN_TIME_EXIT_CODE] * 2
    checkpoints = {int(path.name.rpartition("-")[2]): path for path in (volume / "checkpoints").iterdir()}
    assert (2 in checkpoints) is is_finished
    newest = sorted(checkpoints[max(checkpoints)].iterdir())
    assert max(checkpoints) > 2
    assert [path.name for path in newest] == ["a-0", "a-1", "b-0", "b-1"]
    assert all(path.stat().st_size > 40_000 for path in newest)


def test_a_rank_in_a_collective_while_the_other_is_noticed_still_saves_with_it(tmp_path: Path, volume: Path) -> None:
    with job("checkpointer", tmp_path, [volume], local_world_size=2) as ranks:
        begin(ranks, 3)
        ranks[1].go()  # It waits for rank 0 in C++ now, or soon.
        notify(ranks[1])
        ranks[0].go(ENOUGH_STEPS)
        ranks[1].go(ENOUGH_STEPS)
        ((saved,),) = saved_steps(ranks)
        assert int(saved.split()[1]) >= 4
        assert [rank.exit_code() for rank in ranks] == [names.JUST_IN_TIME_EXIT_CODE] * 2


def test_a_notice_before_the_first_step_is_remembered(tmp_path: Path, volume: Path) -> None:
    with job("checkpointer", tmp_path, [volume], local_world_size=2) as ranks:
        for rank in ranks:
            rank.wait_for("begin")
        notify(ranks[1])
        for rank in ranks:
            rank.go(ENOUGH_STEPS)
        ((saved,),) = saved_steps(ranks)
        assert int(saved.split()[1]) >= 1
        assert [rank.exit_code() for rank in ranks] == [names.JUST_IN_TIME_EXIT_CODE] * 2


@pytest.mark.parametrize("scenario", ["checkpointer", "framework"])
def test_ranks_that_are_started_again_in_a_pod_that_ends_all_leave_before_the_first_step(
    tmp_path: Path, scenario: str
) -> None:
    volumes = [tmp_path / "a", tmp_path / "b"]
    ending = AgentServer()
    ending.terminating = True
    # The other pod knows nothing of it.
    socket = volumes[1] / names.STATE_DIRECTORY / names.SOCKET
    with serving(socket, ending), job(scenario, tmp_path, volumes, local_world_size=1) as ranks:
        assert [rank.rest() for rank in ranks] == [[], []]
        assert [rank.exit_code() for rank in ranks] == [names.JUST_IN_TIME_EXIT_CODE] * 2


def test_an_operators_request_saves_once_and_training_goes_on(tmp_path: Path, volume: Path) -> None:
    signal_path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    signal_path.parent.mkdir(parents=True)
    signal_path.write_bytes(signal_file.encode(signal_file.SaveSignal(number=0, deadline_unix=0.0, terminating=False)))
    with job("checkpointer", tmp_path, [volume], local_world_size=2) as ranks:
        begin(ranks, 3)
        descriptor = os.open(signal_path, os.O_RDWR)
        os.pwrite(
            descriptor, signal_file.encode(signal_file.SaveSignal(number=1, deadline_unix=0.0, terminating=False)), 0
        )
        os.close(descriptor)
        for rank in ranks:
            rank.go()
        # Each gate sees it by itself; all see it before the training thread may pass the step that is decided on.
        seen: list[str] = []
        step, steps_after = 3, 0
        while steps_after < 200:
            step += 1
            steps_after += bool(seen)
            lines = {tuple(rank.wait_for(f"step {step}")) for rank in ranks}
            assert len(lines) == 1, "the ranks saved at different steps"
            seen += [line for line in lines.pop() if line.startswith("saved")]
            for rank in ranks:
                rank.go()
        assert len(seen) == 1, seen


def test_a_save_that_one_rank_cannot_write_leaves_nothing(tmp_path: Path, volume: Path) -> None:
    with job("checkpointer", tmp_path, [volume], local_world_size=2, EVERY="2", FAIL_RANK="1") as ranks:
        for rank in ranks:
            rank.wait_for("begin")
            rank.go(2)
        assert ranks[1].exit_code() == 1
        ranks[0].wait_for("step 2")
        assert not list((volume / "checkpoints").iterdir())
        assert "another rank failed" in ranks[0].log_text()


def test_a_volume_that_is_full_for_one_rank_costs_that_checkpoint_and_all_go_on(tmp_path: Path, volume: Path) -> None:
    environment = {"EVERY": "2", "STEPS": "4", "FULL_AT": "1 2"}
    with job("checkpointer", tmp_path, [volume], local_world_size=2, **environment) as ranks:
        begin(ranks, 4)
        assert [rank.rest() for rank in ranks] == [["done"]] * 2
        assert [rank.exit_code() for rank in ranks] == [0, 0]
        assert "checkpoint given up, training goes on: step=2" in ranks[1].log_text()
    assert [path.name for path in (volume / "checkpoints").iterdir()] == ["checkpoint-4"]


def test_a_full_volume_raises_where_another_rank_waits_for_this_one_in_the_midst_of_writing(
    tmp_path: Path, volume: Path
) -> None:
    """To go on would pair that collective with one of the next step."""
    environment = {"EVERY": "2", "FULL_AT": "1 2", "BARRIER": "1", "WRITE_SECONDS": "1"}
    with job("checkpointer", tmp_path, [volume], local_world_size=2, **environment) as ranks:
        for rank in ranks:
            rank.wait_for("begin")
            rank.go(2)
        assert ranks[1].exit_code() == 1
        assert "OSError: [Errno 28] No space left on device" in ranks[1].log_text()


def test_the_store_of_the_ranks_does_not_grow_with_the_saves(tmp_path: Path, volume: Path) -> None:
    environment = {"EVERY": "1", "STEPS": "41", "KEYS": "1", "FULL_AT": "1 7", "RAISE_EVERY": "5"}
    with job("checkpointer", tmp_path, [volume], local_world_size=2, **environment) as ranks:
        for rank in ranks:
            rank.go(41)
        lines = ranks[0].rest()
        assert ranks[1].rest()[-1] == "done"
    keys = [int(line.split()[1]) for line in lines if line.startswith("keys")]
    # Rank 0 looks while the other still has to read, so a single count says nothing.
    assert min(keys[-20:]) - min(keys[:20]) <= 4, keys


def test_a_rank_that_is_late_to_resume_is_named_and_not_taken_for_a_missing_checkpoint(
    tmp_path: Path, volume: Path
) -> None:
    scenario = "checkpointer_that_a_rank_is_late_to_resume"
    with job(scenario, tmp_path, [volume], local_world_size=2) as ranks:
        expected = "RanksError: rank 1 did not come within 1 s to name the checkpoints to choose from"
        assert ranks[0].line() == expected
        ranks[1].go()
        assert ranks[1].line() == expected
        assert "waited_for=rank 1" in ranks[0].log_text()


def test_periodic_saves_are_of_all_ranks_and_every_agent_learns_of_its_own(tmp_path: Path) -> None:
    pods = [tmp_path / "a", tmp_path / "b"]
    sockets = [pod / names.STATE_DIRECTORY / names.SOCKET for pod in pods]
    with (
        serving(sockets[0], AgentServer()) as first,
        serving(sockets[1], AgentServer()) as second,
        job("checkpointer", tmp_path, pods, local_world_size=2, EVERY="2", STEPS="4") as ranks,
    ):
        for rank in ranks:
            rank.go(4)
        assert {tuple(rank.rest()) for rank in ranks} == {
            ("begin 0", "step 1", "saved 2", "step 2", "step 3", "saved 4", "step 4", "done")
        }
        announced = [agent.requests("AnnounceCheckpoint") for agent in (first, second)]
        assert [sorted((one.step, one.rank) for one in of_one) for of_one in announced] == [
            [(2, 0), (2, 1), (4, 0), (4, 1)],
            [(2, 2), (2, 3), (4, 2), (4, 3)],
        ]
        both = [*announced[0], *announced[1]]
        assert {(one.world_size, one.local_world_size) for one in both} == {(4, 2)}
        assert len({one.save for one in both}) == 2
        # Of each pod one rank asks for room.
        assert [len(agent.requests("BeginSave")) for agent in (first, second)] == [2, 2]
        assert {one.save for agent in (first, second) for one in agent.requests("BeginSave")} == {
            one.save for one in both
        }


@pytest.mark.parametrize("left", ["nothing", "what an earlier restore brought"])
def test_one_file_of_rank_0_is_whole_whatever_the_other_pod_has_under_its_name(tmp_path: Path, left: str) -> None:
    pods = [tmp_path / "a", tmp_path / "b"]
    if left != "nothing":
        (pods[1] / "out").mkdir(parents=True)
        (pods[1] / "out/epoch=0-step=1.ckpt").write_text(left)
    sockets = [pod / names.STATE_DIRECTORY / names.SOCKET for pod in pods]
    with (
        serving(sockets[0], AgentServer()) as first,
        serving(sockets[1], AgentServer()) as second,
        job("framework_of_one_file", tmp_path, pods, local_world_size=2) as ranks,
    ):
        assert [rank.rest() for rank in ranks] == [["announced True"]] * 4
        announced = first.requests("AnnounceCheckpoint")
        assert sorted((one.rank, one.world_size, one.local_world_size) for one in announced) == [(0, 2, 2), (1, 2, 2)]
        assert second.requests("AnnounceCheckpoint") == []
    record = json.loads(next((pods[0] / ".keepstep/records").glob("epoch=0-step=1.ckpt@*.json")).read_text())
    assert (record["world_size"], record["ranks"]) == (2, [0, 1])
    assert not list((pods[1] / ".keepstep/records").glob("*"))


def test_a_rank_that_fails_once_costs_that_checkpoint_alone(tmp_path: Path, volume: Path) -> None:
    socket = volume / names.STATE_DIRECTORY / names.SOCKET
    with (
        serving(socket, AgentServer()) as agent,
        job("framework_of_which_a_rank_fails_once", tmp_path, [volume], local_world_size=2) as ranks,
    ):
        assert [rank.rest() for rank in ranks] == [["saved 1 True", "saved 2 False", "saved 3 True", "done"]] * 2
        requests = agent.requests("AnnounceCheckpoint")
        announced = sorted((one.step, one.rank, list(one.files), list(one.others)) for one in requests)
        files = ["rank-0", "rank-1"]
        assert announced == [(step, rank, files, ["state.json"]) for step in (1, 3) for rank in (0, 1)]
        assert not any("late" in rank.log_text() for rank in ranks)


def test_what_is_not_there_is_never_taken_for_saved(tmp_path: Path, volume: Path) -> None:
    socket = volume / names.STATE_DIRECTORY / names.SOCKET
    with (
        serving(socket, AgentServer()) as agent,
        job("framework_that_wrote_nothing", tmp_path, [volume], local_world_size=1) as (rank,),
    ):
        assert rank.rest() == ["announced False False"]
        assert agent.requests("AnnounceCheckpoint") == []
        assert "checkpoint not recorded" in rank.log_text()


def test_a_rank_that_the_others_left_alone_waits_for_them_once_and_trains_on(tmp_path: Path, volume: Path) -> None:
    with job("framework_that_rank_1_does_without", tmp_path, [volume], local_world_size=2) as ranks:
        for rank in ranks:
            rank.go()
        assert ranks[0].rest() == ["nothing False None True nothing", "done"]
        assert ranks[1].rest() == ["done"]
        assert ranks[0].log_text().count("not protected") == 1, ranks[0].log_text()


def test_no_thread_of_ours_is_left_in_the_store_when_the_interpreter_ends(tmp_path: Path, volume: Path) -> None:
    with job("program_that_closes_nothing", tmp_path, [volume], local_world_size=2) as ranks:
        assert [rank.rest() for rank in ranks] == [["gates 1", "gates 0"]] * 2
        assert [rank.exit_code() for rank in ranks] == [3, 3]


def test_a_folder_of_which_one_pod_has_nothing_is_announced_by_nobody(tmp_path: Path) -> None:
    pods = [tmp_path / "a", tmp_path / "b"]
    socket = pods[0] / names.STATE_DIRECTORY / names.SOCKET
    with (
        serving(socket, AgentServer()) as agent,
        job("framework_with_a_missing_part", tmp_path, pods, local_world_size=1) as ranks,
    ):
        assert [rank.rest() for rank in ranks] == [["announced False"]] * 2
        assert agent.requests("AnnounceCheckpoint") == []
        assert "no files in one of the pods" in ranks[1].log_text()


def test_no_pod_saves_when_one_has_no_room(tmp_path: Path) -> None:
    pods = [tmp_path / "a", tmp_path / "b"]
    sockets = [pod / names.STATE_DIRECTORY / names.SOCKET for pod in pods]
    full = AgentServer()
    full.admitted = False
    with (
        serving(sockets[0], AgentServer()) as roomy,
        serving(sockets[1], full),
        job("checkpointer", tmp_path, pods, local_world_size=1, EVERY="1", STEPS="2") as ranks,
    ):
        for rank in ranks:
            rank.go(2)
        assert {tuple(rank.rest()) for rank in ranks} == {("begin 0", "step 1", "step 2", "done")}
        assert [one.save for one in roomy.requests("AbortSave")] == [one.save for one in roomy.requests("BeginSave")]


def test_pods_that_hold_only_their_own_parts_do_not_begin_afresh(tmp_path: Path) -> None:
    pods = [tmp_path / "a", tmp_path / "b"]
    with job("checkpointer", tmp_path, pods, local_world_size=1, EVERY="1", STEPS="1") as ranks:
        for rank in ranks:
            rank.go()
        assert [rank.exit_code() for rank in ranks] == [0, 0]
    with job("checkpointer", tmp_path, pods, local_world_size=1) as ranks:
        assert [rank.exit_code() for rank in ranks] == [1, 1]
        assert all(
            "run `keepstep restore`" in rank.log_text() or "none that is whole" in rank.log_text() for rank in ranks
        )


def test_rank_0_may_save_for_all(tmp_path: Path, volume: Path) -> None:
    with job("rank_0_alone", tmp_path, [volume], local_world_size=2) as ranks:
        for rank in ranks:
            rank.go(3)
        assert [rank.exit_code() for rank in ranks] == [0, 0]
    assert record_of(volume, "checkpoint-3")["world_size"] == 1


@pytest.mark.parametrize("saver", ["checkpointer", "framework"])
def test_a_rank_that_torchrun_signals_on_its_way_out_ends_with_the_same_code(tmp_path: Path, saver: str) -> None:
    ended = torchrun(LINGERING, saver, directory=tmp_path)
    assert ended.lines("started") == ["-15"], ended.output
    assert re.findall(r"exitcode +: (-?\d+)", ended.output) == [str(names.JUST_IN_TIME_EXIT_CODE)] * 2, ended.output


@pytest.mark.parametrize("noticed_in", ["step 3", "tick 4 2"])
def test_a_frameworks_checkpoint_is_announced_by_all_ranks_and_resumed_from(
    tmp_path: Path, volume: Path, noticed_in: str
) -> None:
    socket = volume / names.STATE_DIRECTORY / names.SOCKET
    with serving(socket, AgentServer()) as agent:
        with job("framework", tmp_path, [volume], local_world_size=2) as ranks:
            for rank in ranks:
                rank.go(6 if noticed_in == "step 3" else 9)
            for rank in ranks:
                rank.wait_for(noticed_in)
            notify(ranks[1])
            for rank in ranks:
                rank.go(ENOUGH_STEPS)
            ((announced,),) = saved_steps(ranks, "announced")
            assert [rank.exit_code() for rank in ranks] == [names.JUST_IN_TIME_EXIT_CODE] * 2
        _, step, answer = announced.split()
        assert answer == "True"
        requests = agent.requests("AnnounceCheckpoint")
        assert sorted(one.rank for one in requests) == [0, 1]
        assert {(one.path, one.kind) for one in requests} == {
            (str(volume / f"out/out-{step}"), agent_pb2.KIND_JUST_IN_TIME)
        }
        with job("framework", tmp_path, [volume], local_world_size=2, STEPS=step) as ranks:
            assert {tuple(rank.rest()) for rank in ranks} == {(f"begin {step}", "done")}


def test_what_a_framework_writes_outside_the_volume_is_said_once(tmp_path: Path, volume: Path) -> None:
    with job("framework", tmp_path, [volume], local_world_size=1, OUTPUT=str(tmp_path / "elsewhere")) as (rank,):
        rank.wait_for("begin")
        notify(rank)
        rank.go(ENOUGH_STEPS)
        assert rank.wait_for("announced")[-1].endswith("False")
        assert rank.log_text().count("only what is saved just in time is stored") == 1


@pytest.mark.parametrize("fails", ["", "1"])
def test_an_asynchronous_checkpoint_is_announced_when_all_ranks_have_written(
    tmp_path: Path, volume: Path, fails: str
) -> None:
    socket = volume / names.STATE_DIRECTORY / names.SOCKET
    with serving(socket, AgentServer()) as agent:
        with job("asynchronous_framework", tmp_path, [volume], local_world_size=2, FAIL_RANK=fails) as ranks:
            for rank in ranks:
                rank.go()
            assert [rank.exit_code() for rank in ranks] == [0, 0]
        assert len(agent.requests("AnnounceCheckpoint")) == (0 if fails else 2)
