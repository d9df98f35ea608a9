"""The wire API of a real agent, call by call, as a client in any language would use it."""

import threading
from pathlib import Path

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.stored.manifest import decode_manifest, decode_marker
from keepstep_agent.core.stored.object_layout import LEDGER_PREFIX
from keepstep_api.names import API_VERSION, JOURNAL
from keepstep_api.v1 import agent_pb2


def _destination(tmp_path: Path) -> tuple[Path, str]:
    folder = tmp_path / "destination"
    return folder, f"file://{folder}"


def test_the_least_a_client_needs_is_one_call(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-7", {"model.bin": 100_000, "sub/extra.txt": 3})
        answer = agent.announce(path, 7)
        # The upload may have begun by the time it answers.
        assert answer.phase in (agent_pb2.PHASE_STAGED, agent_pb2.PHASE_UPLOADING)
        assert (answer.file_count, answer.size_bytes) == (2, 100_003)
        committed = agent.wait_committed(answer.save)
        assert (committed.name, committed.step, committed.world_size) == ("checkpoint-7", 7, 1)
        assert (folder / "checkpoint-7" / answer.save / "model.bin").read_bytes() == (path / "model.bin").read_bytes()


@pytest.mark.parametrize("is_journal_lost", [False, True])
def test_ten_thousand_files_that_are_named_are_staged_and_found_again(tmp_path: Path, is_journal_lost: bool) -> None:
    _, destination = _destination(tmp_path)
    names = [f"part-{number // 1000:03d}/sample-{number:06d}.bin" for number in range(10_000)]
    with AgentProcess(tmp_path / "volume", destination, bandwidth_bytes_per_second=1) as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", dict.fromkeys(names, 1))
        save = agent.announce(path, 1, files=names).save
        agent.kill()
    if is_journal_lost:
        for file in (agent.volume / ".keepstep").glob(f"{JOURNAL}*"):
            file.unlink()
    with AgentProcess(tmp_path / "volume", destination) as agent:
        agent.wait_committed(save)


def test_the_trainer_may_delete_its_copy_as_soon_as_the_announcement_returns(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 5_000_000})
        content = (path / "model.bin").read_bytes()
        answer = agent.announce(path, 1)
        (path / "model.bin").unlink()
        path.rmdir()
        agent.wait_committed(answer.save)
        assert (folder / "checkpoint-1" / answer.save / "model.bin").read_bytes() == content
        wait_until(lambda: not any((agent.volume / ".keepstep/staged").iterdir()), HANG_SECONDS, "the pins are dropped")


def test_ranks_that_share_a_directory_are_staged_when_the_last_has_announced(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-5", {"rank1.pt": 10})
        fields = {"save": "attempt-1", "world_size": 2, "local_world_size": 2}
        first = agent.announce(path, 5, rank=1, **fields)
        assert first.phase == agent_pb2.PHASE_ANNOUNCED
        # Rank 0 is still writing while rank 1 has announced.
        (path / "rank0.pt").write_bytes(b"late")
        agent.announce(path, 5, rank=0, **fields)
        agent.wait_committed("attempt-1")
        marker_path = next((folder / ".keepstep/commits").iterdir())
        marker = decode_marker(marker_path.read_bytes(), "marker")
        assert (marker.info.world_size, marker.file_count) == (2, 2)


def test_ranks_that_share_a_directory_may_list_the_files_of_the_save(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent:
        sizes = {"rank0.pt": 10, "rank1.pt": 20, "train.log": 5, "scratch": 3}
        path = write_checkpoint(agent.checkpoints / "checkpoint-5", sizes)
        fields = {"save": "attempt-1", "world_size": 2, "local_world_size": 2, "others": ["train.log"]}
        first = agent.announce(path, 5, rank=1, files=["rank0.pt", "rank1.pt"], **fields)
        assert first.phase == agent_pb2.PHASE_ANNOUNCED
        with pytest.raises(grpc.RpcError, match="list different files") as refused:
            agent.announce(path, 5, rank=0, files=["rank0.pt"], **fields)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        agent.announce(path, 5, rank=0, files=["rank0.pt", "rank1.pt"], **fields)
        agent.wait_committed("attempt-1")
        assert _stored(folder / "checkpoint-5/attempt-1") == ["rank0.pt", "rank1.pt", "train.log"]


def _stored(save: Path) -> list[str]:
    return sorted(path for path in tree(save) if not path.startswith(".keepstep/"))


def test_what_the_program_puts_beside_a_save_belongs_to_it_and_may_go_on_growing(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination, watch="off") as agent:
        sizes = {"model.bin": 100_000, "logs/train.log": 50, "scratch": 3}
        path = write_checkpoint(agent.checkpoints / "checkpoint-7", sizes)
        train_log = (path / "logs/train.log").read_bytes()
        (path / "outside.log").symlink_to(tmp_path / "secret")
        others = ["logs/train.log", "gone.log", "outside.log", "model.bin"]
        answer = agent.announce(path, 7, files=["model.bin"], others=others)
        with (path / "logs/train.log").open("ab") as growing:
            growing.write(b"another line")
        assert (answer.file_count, answer.size_bytes) == (2, 100_050)
        agent.wait_committed(answer.save)
        stored = folder / "checkpoint-7" / answer.save
        assert _stored(stored) == ["logs/train.log", "model.bin"]
        assert (stored / "logs/train.log").read_bytes() == train_log
        (line,) = agent.log("staging.others_left_out")
        assert (line["count"], line["first"]) == (2, "gone.log")


def test_a_checkpoint_is_committed_only_when_every_agent_has_sealed_its_ranks(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "pod0", destination) as first, AgentProcess(tmp_path / "pod1", destination) as second:
        fields = {"save": "attempt-1", "world_size": 2}
        first.announce(write_checkpoint(first.checkpoints / "checkpoint-3", {"rank0.pt": 1000}), 3, rank=0, **fields)
        wait_until(
            lambda: first.status().checkpoints[0].phase == agent_pb2.PHASE_SEALED,
            HANG_SECONDS,
            "rank 0 is sealed alone",
        )
        assert not (folder / ".keepstep/commits").exists()
        second.announce(write_checkpoint(second.checkpoints / "checkpoint-3", {"rank1.pt": 2000}), 3, rank=1, **fields)
        for agent in (first, second):
            assert agent.wait_committed("attempt-1").world_size == 2
        assert len(list((folder / ".keepstep/commits").iterdir())) == 1
        manifest_path = folder / "checkpoint-3/attempt-1/.keepstep/manifest-00001-00001.json"
        (rank,) = decode_manifest(manifest_path.read_bytes(), "manifest")
        assert [file.path for file in rank.files] == ["rank1.pt"]


def test_ranks_that_write_one_file_name_with_different_bytes_are_told_so(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination, watch="off") as agent:
        paths = [write_checkpoint(agent.checkpoints / f"rank-{rank}", {"state.pt": 1000}, seed=rank) for rank in (0, 1)]
        fields = {"save": "attempt-1", "name": "checkpoint-3", "world_size": 2}
        agent.announce(paths[0], 3, rank=0, **fields)
        with pytest.raises(grpc.RpcError, match=r"ranks 0 and 1 .* for state\.pt .*different file names"):
            agent.announce(paths[1], 3, rank=1, **fields)
        assert agent.status().checkpoints[0].phase == agent_pb2.PHASE_FAILED
        assert not (folder / ".keepstep/commits").exists()


def test_no_marker_is_written_when_the_ranks_of_two_agents_contradict_each_other(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    fields = {"save": "attempt-1", "world_size": 2}
    with AgentProcess(tmp_path / "pod0", destination) as first, AgentProcess(tmp_path / "pod1", destination) as second:
        for rank, agent in enumerate((first, second)):
            path = write_checkpoint(agent.checkpoints / "checkpoint-3", {"state.pt": 1000}, seed=rank)
            agent.announce(path, 3, rank=rank, **fields)
        for agent in (first, second):
            with pytest.raises(grpc.RpcError, match=r"ranks 0 and 1 have different bytes for state\.pt"):
                agent.wait_committed("attempt-1")
        assert not (folder / ".keepstep/commits").exists()


@pytest.mark.parametrize("volume", ["volume", "another"], ids=["long forgotten", "on a new volume"])
def test_an_id_of_a_committed_save_that_is_used_again_touches_nothing(volume: str, tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    count = 12 if volume == "volume" else 1
    with AgentProcess(tmp_path / "volume", destination, watch="off") as agent:
        for step in range(count):
            path = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": 1000})
            agent.announce(path, step, save=f"run-{step}")
            agent.wait_committed(f"run-{step}")
    before = _without_ledger(folder)
    with AgentProcess(tmp_path / volume, destination, watch="off") as agent:
        path = write_checkpoint(agent.checkpoints / "again" / "checkpoint-0", {"model.bin": 1000}, seed=1)
        agent.announce(path, 0, save="run-0")
        with pytest.raises(grpc.RpcError, match="run-0 is committed already"):
            agent.wait_committed("run-0")
    assert _without_ledger(folder) == before


def _without_ledger(folder: Path) -> dict[str, bytes]:
    """All but the ledger, and what an agent that was ended left of an object of it."""
    ours = (LEDGER_PREFIX, ".keepstep/uploads/put-")
    return {key: body for key, body in tree(folder).items() if not key.startswith(ours)}


def test_an_agent_without_rank_0_commits_when_the_one_that_has_it_is_gone(tmp_path: Path) -> None:
    folder, destination = _destination(tmp_path)
    fields = {"save": "attempt-1", "world_size": 2}
    with AgentProcess(tmp_path / "pod0", destination) as first:
        first.announce(write_checkpoint(first.checkpoints / "checkpoint-3", {"rank0.pt": 1000}), 3, rank=0, **fields)
        manifest = folder / "checkpoint-3/attempt-1/.keepstep/manifest-00000-00001.json"
        wait_until(manifest.exists, HANG_SECONDS, "rank 0 is sealed")
        first.kill()
    with AgentProcess(tmp_path / "pod1", destination) as second:
        second.announce(write_checkpoint(second.checkpoints / "checkpoint-3", {"rank1.pt": 2000}), 3, rank=1, **fields)
        assert second.wait_committed("attempt-1").step == 3


def test_a_client_of_another_version_is_said_once_and_served(tmp_path: Path) -> None:
    _, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent, agent.stub() as stub:
        for api_version in (API_VERSION, 0, API_VERSION + 1, API_VERSION + 2):
            request = agent_pb2.RegisterRequest(world_size=1, client="test\n1", api_version=api_version)
            assert stub.Register(request, timeout=HANG_SECONDS).api_version == API_VERSION
        said = agent.log("client.other_version")
        assert [(line["client_api"], line["client"]) for line in said] == [(API_VERSION + 1, "test\\n1")]


def test_an_attached_client_counts_as_alive_and_gets_the_save_requests(tmp_path: Path) -> None:
    _, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent, agent.stub() as stub:
        requests: list[agent_pb2.SaveRequest] = []
        stream = stub.Attach(agent_pb2.AttachRequest(local_rank=0, world_size=1, client="test"))

        def listen() -> None:
            try:
                requests.extend(stream)
            except grpc.RpcError:
                return

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            wait_until(lambda: agent.status().live_ranks == 1, HANG_SECONDS, "the attached rank counts")
            assert stub.RequestSave(agent_pb2.RequestSaveRequest(reason="test"), timeout=HANG_SECONDS).ranks == 1
            agent.notify_termination(grace_seconds=60)
            wait_until(lambda: len(requests) == 2, HANG_SECONDS, "both requests arrive")
        finally:
            stream.cancel()
            listener.join(HANG_SECONDS)
        assert [request.terminating for request in requests] == [False, True]
        assert requests[0].deadline == 0
        assert requests[1].deadline == agent.status().deadline
        wait_until(lambda: agent.status().live_ranks == 0, HANG_SECONDS, "a closed stream is a dead rank")


def test_watching_the_status_shows_the_change_and_not_the_silence(tmp_path: Path) -> None:
    _, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent, agent.stub() as stub:
        updates = stub.WatchStatus(agent_pb2.WatchStatusRequest(interval_ms=10), timeout=HANG_SECONDS)
        assert not next(updates).checkpoints
        answer = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"a": 10}), 1)
        seen = next(update for update in updates if update.HasField("newest_committed"))
        assert seen.newest_committed.save == answer.save
        assert seen.recovery_point_age_seconds >= 0
        updates.cancel()


def test_status_counts_what_is_staged_and_what_is_durable(tmp_path: Path) -> None:
    with AgentProcess(tmp_path / "volume", "s3://bucket/run", endpoint_url="http://127.0.0.1:9") as agent:
        agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-2", {"a": 1_000_000}), 2)
        status = agent.status()
        assert status.backlog_bytes == 1_000_000
        assert status.recovery_point_age_seconds == -1
        assert status.drain_seconds == -1
        wait_until(lambda: bool(agent.status().storage_error), HANG_SECONDS, "the store's error is shown")
        listed = agent.status().checkpoints
        assert [(one.step, one.durable_bytes, one.size_bytes) for one in listed] == [(2, 0, 1_000_000)]


def test_a_save_is_begun_with_an_id_that_the_announcement_uses(tmp_path: Path) -> None:
    _, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent, agent.stub() as stub:
        begun = stub.BeginSave(agent_pb2.BeginSaveRequest(step=4, attempt="job1"), timeout=HANG_SECONDS)
        assert begun.admitted
        assert begun.save.startswith("job1-")
        path = write_checkpoint(agent.checkpoints / "checkpoint-4", {"a": 10})
        assert agent.announce(path, 4, save=begun.save).save == begun.save
        taken_back = stub.BeginSave(agent_pb2.BeginSaveRequest(step=5, attempt="job1"), timeout=HANG_SECONDS)
        assert taken_back.save != begun.save
        stub.AbortSave(agent_pb2.AbortSaveRequest(save=taken_back.save), timeout=HANG_SECONDS)


def test_the_id_that_ranks_have_agreed_on_is_kept_asked_for_twice_and_announced_or_taken_back(tmp_path: Path) -> None:
    _, destination = _destination(tmp_path)
    size_bytes = 50_000_000
    # Room for two saves, and not for three.
    limit_bytes = 2 * size_bytes + size_bytes // 2
    with (
        AgentProcess(tmp_path / "volume", destination, size_limit_bytes=limit_bytes) as agent,
        agent.stub() as stub,
    ):

        def begin(save: str, step: int) -> bool:
            request = agent_pb2.BeginSaveRequest(step=step, save=save, size_bytes=size_bytes)
            answer: agent_pb2.BeginSaveResponse = stub.BeginSave(request, timeout=HANG_SECONDS)
            assert answer.save == (save if answer.admitted else "")
            return answer.admitted

        assert begin("ours-1", 1)
        # The answer may have been lost: room is kept for it once.
        assert begin("ours-1", 1)
        assert not begin("ours-2", 2)
        stub.AbortSave(agent_pb2.AbortSaveRequest(save="ours-1"), timeout=HANG_SECONDS)
        assert begin("ours-2", 2)
        path = write_checkpoint(agent.checkpoints / "checkpoint-2", {"a": 10})
        ranks = {"world_size": 2, "local_world_size": 2}
        agent.announce(path, 2, save="ours-2", rank=1, **ranks)
        assert begin("ours-3", 3)
        agent.announce(path, 2, save="ours-2", rank=0, **ranks)
        agent.wait_committed("ours-2")
        with pytest.raises(grpc.RpcError) as refusal:
            begin("no/token", 4)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_registering_tells_a_trainer_what_is_going_on(tmp_path: Path) -> None:
    _, destination = _destination(tmp_path)
    with AgentProcess(tmp_path / "volume", destination) as agent, agent.stub() as stub:
        answer = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-9", {"a": 10}), 9)
        agent.wait_committed(answer.save)
        agent.notify_termination(grace_seconds=60)
        told = stub.Register(agent_pb2.RegisterRequest(local_rank=0, rank=0, world_size=1), timeout=HANG_SECONDS)
        assert told.volume == str(agent.volume)
        assert told.newest_committed.step == 9
        assert told.terminating
        with pytest.raises(grpc.RpcError, match="rank 3 does not exist"):
            stub.Register(agent_pb2.RegisterRequest(rank=3, world_size=2), timeout=HANG_SECONDS)
