"""A checkpoint of as many files as may be, in the memory that the chart gives an agent, as the kernel counts it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.control_group import ControlGroup, NoControlGroup, memory_control_group

from keepstep_agent.core.limits import FILES_PER_RANK
from keepstep_api.v1 import agent_pb2

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

MIB = 1024**2
MEMORY_BYTES = 256 * MIB
"""The chart's default."""
FEW_FILES = 40_000
FEWER_FILES = 1000
LITTLE_MEMORY_BYTES = 128 * MIB


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[ControlGroup]:
    try:
        with memory_control_group(request.param) as group:
            yield group
    except NoControlGroup as reason:
        pytest.skip(str(reason))


def write_files(checkpoint: Path, count: int, suffix: str = ".bin") -> Path:
    """In one folder: that takes the most memory where a folder is looked through."""
    (folder := checkpoint / "samples").mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:06d}{suffix}").write_bytes(b"%d" % number * 40)
    return checkpoint


def announce(agent: AgentProcess, checkpoint: Path) -> str:
    request = agent_pb2.AnnounceCheckpointRequest(path=str(checkpoint), step=1)
    with agent.stub() as stub:
        response: agent_pb2.AnnounceCheckpointResponse = stub.AnnounceCheckpoint(request, timeout=2 * HANG_SECONDS)
    return response.save


@pytest.mark.parametrize("memory", [MEMORY_BYTES], indirect=True)
def test_a_checkpoint_of_a_hundred_thousand_files_is_stored_and_restored(memory: ControlGroup, tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/destination"
    agent = AgentProcess(tmp_path / "volume", destination, warm=False, watch="off", bandwidth_bytes_per_second=8 * MIB)
    checkpoint = write_files(agent.checkpoints / "checkpoint-1", FILES_PER_RANK)
    with memory.inside():
        agent.start(wait=False)
    try:
        agent.wait_serving()
        save = announce(agent, checkpoint)
        # It is known from the journal alone then.
        agent.kill()
        with memory.inside():
            agent.start(wait=False)
        agent.wait_serving()
        agent.wait_committed(save, 4 * HANG_SECONDS)
    finally:
        agent.kill()
    restore(memory, destination, f"--volume={tmp_path}/again")
    last = "samples/099999.bin"
    assert (tmp_path / "again/checkpoints/checkpoint-1" / last).read_bytes() == (checkpoint / last).read_bytes()


def restore(memory: ControlGroup, *arguments: str) -> None:
    wrapped = memory.wrap([sys.executable, "-m", "keepstep_agent", "restore", *arguments])
    said = subprocess.run(wrapped, capture_output=True, text=True, timeout=4 * HANG_SECONDS, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    assert memory.out_of_memory_kills() == 0


@pytest.mark.parametrize("memory", [MEMORY_BYTES], indirect=True)
def test_an_output_directory_of_a_hundred_thousand_files_is_stored_twice_and_restored(
    memory: ControlGroup, tmp_path: Path
) -> None:
    output, destination = tmp_path / "volume" / "out", f"file://{tmp_path}/destination"
    agent = AgentProcess(tmp_path / "volume", destination, warm=False, watch=str(output))
    write_files(output, FILES_PER_RANK - 1)
    with memory.inside():
        agent.start(wait=False)
    try:
        agent.wait_serving()
        wait_until(lambda: stored_files(agent) == FILES_PER_RANK - 1, 4 * HANG_SECONDS, "all files are stored")
        # The next one looks at all of them too.
        agent.kill()
        with memory.inside():
            agent.start(wait=False)
        agent.wait_serving()
        (output / "last.bin").write_bytes(b"last")
        wait_until(lambda: stored_files(agent) == FILES_PER_RANK, 4 * HANG_SECONDS, "the last file is stored too")
    finally:
        agent.kill()
    assert memory.out_of_memory_kills() == 0
    again = tmp_path / "again" / "out"
    restore(memory, destination, f"--volume={again.parent}", f"--watch={again}")
    assert (again / "last.bin").read_bytes() == b"last"
    assert len(list((again / "samples").iterdir())) == FILES_PER_RANK - 1


def stored_files(agent: AgentProcess) -> int:
    """How many files the newest committed snapshot has; 0 if there is none."""
    taken = {line["save"]: line["sent"] + line["kept"] for line in agent.log("snapshot.taken")}
    return max((taken.get(line["save"], 0) for line in agent.log("checkpoint.committed")), default=0)


@pytest.mark.parametrize("memory", [MEMORY_BYTES], indirect=True)
def test_names_that_take_much_memory_are_refused_and_end_no_agent(memory: ControlGroup, tmp_path: Path) -> None:
    output = tmp_path / "volume" / "out"
    agent = AgentProcess(tmp_path / "volume", f"file://{tmp_path}/destination", warm=False, watch=str(output))
    # With one wide character, Python takes four bytes for each.
    write_files(output, FILES_PER_RANK, f"\U0001f680{'x' * 240}")
    few = write_files(agent.checkpoints / "checkpoint-2", FEWER_FILES)
    with memory.inside():
        agent.start(wait=False)
    try:
        agent.wait_serving()
        with pytest.raises(grpc.RpcError, match="too long"):
            announce(agent, output)
        wait_until(
            lambda: any("too long" in line for line in agent.status().not_stored), HANG_SECONDS, "the folder is named"
        )
        agent.wait_committed(announce(agent, few), HANG_SECONDS)
    finally:
        agent.kill()
    assert memory.out_of_memory_kills() == 0


@pytest.mark.parametrize("memory", [LITTLE_MEMORY_BYTES], indirect=True)
def test_what_does_not_fit_is_refused_before_it_is_staged_with_what_it_needs(
    memory: ControlGroup, tmp_path: Path
) -> None:
    agent = AgentProcess(tmp_path / "volume", f"file://{tmp_path}/destination", warm=False, watch="off")
    many = write_files(agent.checkpoints / "checkpoint-1", FEW_FILES)
    few = write_files(agent.checkpoints / "checkpoint-2", FEWER_FILES)
    with memory.inside():
        agent.start(wait=False)
    try:
        agent.wait_serving()
        with pytest.raises(grpc.RpcError) as caught:
            announce(agent, many)
        said = str(caught.value)
        assert f"{FEW_FILES:,} files are too many here" in said
        assert "keepstep.dev/memory" in said
        assert not list((agent.volume / ".keepstep" / "staged").rglob("*.bin"))
        agent.wait_committed(announce(agent, few), HANG_SECONDS)
    finally:
        agent.kill()
    assert memory.out_of_memory_kills() == 0
