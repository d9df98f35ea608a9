"""What is saved while the agent is away reaches the store all the same, whatever becomes of the training program."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.client.ranks.job import job
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from keepstep.checkpoints.records import Kind, Record, RecordedFile, write_record
from keepstep_api import names
from keepstep_api.v1 import agent_pb2

# One step for every line on its standard input; it never calls `finish`.
PROGRAM = """
import sys
import keepstep
from keepstep.agent_client import channel
# An agent that answers late on a busy machine is not away.
channel.Channel._call.__kwdefaults__["deadline_seconds"] = channel.ANNOUNCE_SECONDS = 300.0
checkpointer = keepstep.Checkpointer()
checkpointer.resume()
print("ready", flush=True)
for line in sys.stdin:
    if checkpointer.should_save(int(line), every=100):
        with checkpointer.save(int(line)) as directory:
            (directory / "state").write_text(line)
    print("done", flush=True)
"""


class Program:
    """A training program with the real client, at the other end of two pipes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._expect("ready\n")

    def step(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        self._expect("done\n")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(HANG_SECONDS)

    def _expect(self, line: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == line


@contextmanager
def program(volume: Path) -> Iterator[Program]:
    environment = {**os.environ, names.ENV_VOLUME: str(volume)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


def committed(agent: AgentProcess) -> list[str]:
    return [line["name"] for line in agent.log("checkpoint.committed")]


def test_what_was_saved_while_the_agent_was_away_is_committed_when_it_is_back(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with AgentProcess(volume, f"file://{tmp_path}/store") as agent, program(volume) as training:
        agent.kill()
        training.step(100)
        training.step(200)
        agent.start()
        wait_until(lambda: "checkpoint-200" in committed(agent), HANG_SECONDS, "the newest is committed")
        # Nobody ended, and nobody saved again.
        training.step(201)
        assert len(agent.log("checkpoint.announced")) == 2


def test_an_agent_that_does_not_watch_takes_up_what_was_saved_without_it_too(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with AgentProcess(volume, f"file://{tmp_path}/store", watch="off") as agent:
        agent.kill()
        with program(volume) as training:
            training.step(100)
        agent.start()
        wait_until(lambda: committed(agent) == ["checkpoint-100"], HANG_SECONDS, "it is committed")


def test_of_a_folder_that_the_program_uses_too_the_record_says_what_is_taken_up(tmp_path: Path) -> None:
    volume, store = tmp_path / "volume", tmp_path / "store"
    with AgentProcess(volume, f"file://{store}", watch="off") as agent:
        agent.kill()
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 5000, "args.json": 10, "scratch": 7})
        record = Record(
            name=path.name,
            step=1,
            save="a-1",
            kind=Kind.PERIODIC,
            world_size=1,
            saved_at=time.time(),
            files=(RecordedFile(path="model.bin", size_bytes=5000),),
            others=("args.json", "train.log"),
        )
        write_record(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY, record)
        (path / "train.log").write_bytes(b"a line\n")
        agent.start()
        wait_until(lambda: committed(agent) == ["checkpoint-1"], HANG_SECONDS, "it is committed")
    stored = store / "checkpoint-1" / "a-1"
    files = sorted(name for name in tree(stored) if not name.startswith(".keepstep/"))
    assert files == ["args.json", "model.bin", "train.log"]
    assert (stored / "train.log").read_bytes() == b"a line\n"


def test_a_program_killed_before_it_could_announce_has_its_checkpoint_committed(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with AgentProcess(volume, f"file://{tmp_path}/store") as agent:
        with program(volume) as training:
            wait_until(lambda: bool(agent.log("ranks.alive")), HANG_SECONDS, "the agent knows the program")
            # The agent lives and cannot be reached.
            agent.socket.rename(agent.socket.with_name("hidden"))
            training.step(100)
            training.kill()
        wait_until(lambda: committed(agent) == ["checkpoint-100"], HANG_SECONDS, "it is committed")
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0


def test_what_an_agent_had_is_not_taken_up_by_the_next_one(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with AgentProcess(volume, f"file://{tmp_path}/store") as agent:
        with program(volume) as training:
            training.step(100)
            training.step(200)
            wait_until(lambda: "checkpoint-200" in committed(agent), HANG_SECONDS, "it is committed")
        agent.kill()
        # Not even one that has forgotten everything.
        (volume / ".keepstep/agent/journal.sqlite3").unlink()
        agent.start()
        with program(volume):
            pass
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
        assert agent.log("unannounced.found") == []


def test_what_a_forgotten_agent_committed_ends_committed_though_the_store_was_silent_first(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    volume = tmp_path / "volume"
    with AgentProcess(volume, rclone_bucket.destination, endpoint_url=fault_proxy.endpoint_url) as agent:
        with program(volume) as training:
            training.step(100)
        agent.wait_committed("")
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
        # Neither its answer nor its journal is left.
        record = volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY / "checkpoint-100.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "announced": False, "committed": False}))
        (volume / ".keepstep/agent/journal.sqlite3").unlink()
        fault_proxy.outage(True)
        agent.start()
        wait_until(lambda: bool(agent.log("unannounced.found")), HANG_SECONDS, "it is announced again")
        fault_proxy.outage(False)
        wait_until(lambda: len(committed(agent)) == 2, HANG_SECONDS, "the agent knows that it is committed")
        assert agent.log("checkpoint.failed") == []
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0


KILLS_THE_AGENT = """
import os, signal
from pathlib import Path
import keepstep
checkpointer = keepstep.Checkpointer()
runner = os.getppid()
for pid in Path(f"/proc/{runner}/task/{runner}/children").read_text().split():
    if b"agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0"):
        os.kill(int(pid), signal.SIGKILL)
with checkpointer.save(100) as directory:
    (directory / "state").write_text("100")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_whose_agent_and_then_program_are_killed_stores_what_was_saved_between(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = (sys.executable, "-c", KILLS_THE_AGENT)
    with RunProcess(tmp_path / "volume", f"file://{store}", command=command) as run:
        assert run.wait() == 137, run.output()
    assert [line["name"] for line in run.log("checkpoint.committed")] == ["checkpoint-100"]
    with RunProcess(tmp_path / "another", f"file://{store}", command=(sys.executable, "-c", RESUMES)) as run:
        assert run.wait() == 0, run.output()
    assert "resumes 100\n" in run.output()
    assert run.log("checkpoint.announced") == []


# No finish, so that the program leaves nothing to announce when the next agent is there.
SAVES_TWICE_WITHOUT_AN_AGENT = KILLS_THE_AGENT.replace(
    "os.kill(os.getpid(), signal.SIGKILL)",
    """
with checkpointer.save(200) as directory:
    (directory / "state").write_text("200")
os._exit(0)
""",
)


def test_what_the_next_agent_takes_up_at_the_end_of_a_run_is_not_called_nothing(tmp_path: Path) -> None:
    command = (sys.executable, "-c", SAVES_TWICE_WITHOUT_AN_AGENT)
    with RunProcess(tmp_path / "volume", f"file://{tmp_path}/store", command=command) as run:
        assert run.wait() == 0, run.output()
    assert "checkpoint-200" in [line["name"] for line in run.log("checkpoint.committed")]
    assert "nothing was stored" not in run.output()


RESUMES = """
import keepstep
checkpointer = keepstep.Checkpointer()
path = checkpointer.resume()
print("resumes", (path / "state").read_text(), flush=True)
checkpointer.finish()
"""


def test_what_the_ranks_of_two_pods_saved_without_any_agent_is_committed_once_both_have_one(tmp_path: Path) -> None:
    pods = [tmp_path / "a", tmp_path / "b"]
    first, second = (AgentProcess(pod, f"file://{tmp_path}/store") for pod in pods)
    with first:
        # Of an attempt in which this pod had all ranks.
        for number in range(4):
            first.register(local_rank=number, rank=number, world_size=4)
        first.kill()
        with job("checkpointer", tmp_path, pods, local_world_size=2, EVERY="1", STEPS="1") as ranks:
            for rank in ranks:
                rank.go()
            for rank in ranks:
                rank.wait_for("done")
        first.start()
        wait_until(lambda: bool(first.log("checkpoint.staged")), HANG_SECONDS, "the first pod's part is staged")
        assert committed(first) == []
        with second:
            wait_until(lambda: committed(first) + committed(second) != [], HANG_SECONDS, "it is committed")
            assert [line["ranks"] for line in first.log("unannounced.found")] == [[0, 1]]
            assert [line["ranks"] for line in second.log("unannounced.found")] == [[2, 3]]


def test_what_two_ranks_wrote_to_a_folder_of_their_own_is_committed_for_both_when_the_agent_is_back(
    tmp_path: Path,
) -> None:
    volume = tmp_path / "volume"
    with AgentProcess(volume, f"file://{tmp_path}/store") as agent:
        for rank in (0, 1):
            agent.register(local_rank=rank, rank=rank, world_size=2)
        agent.kill()
        sizes = {"rank0.pt": 1000, "rank1.pt": 2000}
        write_checkpoint(volume / "outputs" / "checkpoint-100", sizes)
        record = Record(
            name="checkpoint-100",
            step=100,
            save="a-c000100",
            kind=Kind.JUST_IN_TIME,
            world_size=2,
            saved_at=time.time(),
            files=tuple(RecordedFile(path=path, size_bytes=size_bytes) for path, size_bytes in sizes.items()),
            directory="outputs",
        )
        write_record(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY, record)
        agent.start()
        wait_until(lambda: committed(agent) == ["checkpoint-100"], HANG_SECONDS, "it is committed")
        assert agent.wait_committed("a-c000100").world_size == 2
        assert [line["ranks"] for line in agent.log("unannounced.found")] == [[0, 1]]
        # A rank that still tries is told that it is done.
        for rank in (0, 1):
            agent.announce(
                volume / "outputs/checkpoint-100",
                100,
                save="a-c000100",
                kind=agent_pb2.KIND_JUST_IN_TIME,
                rank=rank,
                world_size=2,
                local_world_size=2,
            )
