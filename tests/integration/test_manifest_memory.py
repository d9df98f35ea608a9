"""Restore in the memory that the chart gives it, where somebody forged a checkpoint to take more.

The restore step, and the agent that restores lazily.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.control_group import ControlGroup, NoControlGroup, memory_control_group
from tests.harness.forged_checkpoint import SHAPES, store_forged
from tests.lanes import nightly
from tests.restore.stored_checkpoints import all_files, store_checkpoint

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.manifest import needed_bytes
from keepstep_api.v1 import agent_pb2

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)]

MIB = 1024**2
MEMORY_BYTES = 256 * MIB
"""The chart's default."""
FITS = {"many parts": (76, 4), "many empty files": (55_000, 4), "wide names": (20_000, 4)}
"""Of each shape the most files of a rank, and ranks, that the estimate lets in."""


@pytest.fixture
def memory() -> Iterator[ControlGroup]:
    try:
        with memory_control_group(MEMORY_BYTES) as group:
            yield group
    except NoControlGroup as reason:
        pytest.skip(str(reason))


def restores_the_older(memory: ControlGroup, folder: Path) -> str:
    """Standard error of a restore that ends well, in that memory."""
    command = ["restore", f"file://{folder}/destination", f"--volume={folder}/volume", "--log-format=json"]
    wrapped = memory.wrap([sys.executable, "-m", "keepstep_agent", *command])
    said = subprocess.run(wrapped, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert said.returncode == 0, (said.returncode, said.stderr[-2000:], memory.out_of_memory_kills())
    place = folder / "volume" / "checkpoints" / "checkpoint-1"
    found = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert found == all_files(1)
    assert memory.out_of_memory_kills() == 0
    return said.stderr


def forge(folder: Path, shape: str, *, files_of_rank: int, ranks: int) -> int:
    """Beside a checkpoint that is whole; what the newer one is reckoned to need."""

    async def run() -> list[int]:
        async with open_store(StoreSettings(destination=f"file://{folder}/destination")) as store:
            await store.probe()
            await store_checkpoint(store, 1)
            return await store_forged(store, 2, SHAPES[shape], files_of_rank=files_of_rank, ranks=ranks)

    return needed_bytes(files=files_of_rank * ranks, manifests_bytes=asyncio.run(run()))


@pytest.mark.parametrize("shape", FITS)
def test_a_forged_checkpoint_that_is_let_in_fits_into_the_memory(
    memory: ControlGroup, tmp_path: Path, shape: str
) -> None:
    files_of_rank, ranks = FITS[shape]
    needed = forge(tmp_path, shape, files_of_rank=files_of_rank, ranks=ranks)
    assert 0.9 * MEMORY_BYTES < needed < MEMORY_BYTES
    if shape != "many parts":
        # These have no byte that could be wrong: the marker says more of them than there are.
        spoil(tmp_path)
    assert "skipped" in restores_the_older(memory, tmp_path)


@pytest.mark.parametrize("shape", ["many parts", *nightly("wide names")])
def test_a_forged_checkpoint_that_is_let_in_fits_into_a_lazy_agents_memory(
    memory: ControlGroup, tmp_path: Path, shape: str
) -> None:
    files_of_rank, ranks = FITS[shape]
    forge(tmp_path, shape, files_of_rank=files_of_rank, ranks=ranks)
    agent = AgentProcess(tmp_path / "volume", f"file://{tmp_path}/destination", warm=False, restore="lazy", watch="off")
    with memory.inside():
        agent.start(wait=False)
    try:
        agent.wait_serving()
        if shape == "many parts":
            # Not one of them has the checksum that the manifest says.
            assert "StatusCode.DATA_LOSS" in refusal(agent, "f0f0f0f0-000002")
        else:
            place = Path(fetch(agent, "f0f0f0f0-000002").path)
            assert sum(path.is_file() for path in place.rglob("*")) == files_of_rank * ranks
        assert fetch(agent, "0123abcd-000001").path.endswith("checkpoint-1")
    finally:
        agent.kill()
    assert memory.out_of_memory_kills() == 0


def fetch(agent: AgentProcess, save: str) -> agent_pb2.FetchResponse:
    """Ask for all of it until it is in its place."""
    answers: list[agent_pb2.FetchResponse] = []

    def is_done() -> bool:
        with agent.stub() as stub:
            request = agent_pb2.FetchRequest(save=save, whole=True, wait_ms=1000)
            answers.append(stub.Fetch(request, timeout=HANG_SECONDS))
        return answers[-1].done

    wait_until(is_done, 10 * HANG_SECONDS, f"{save} is here")
    return answers[-1]


def refusal(agent: AgentProcess, save: str) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        fetch(agent, save)
    return str(caught.value)


def test_a_forged_checkpoint_of_four_large_manifests_is_skipped_with_the_memory_it_needs(
    memory: ControlGroup, tmp_path: Path
) -> None:
    needed = forge(tmp_path, "many parts", files_of_rank=86, ranks=4)
    assert needed > MEMORY_BYTES
    said = restores_the_older(memory, tmp_path)
    assert f"needs {-(-needed // MIB)} MiB of memory for its manifests, this process may have 256 MiB" in said
    assert "keepstep.dev/memory" in said


def spoil(folder: Path) -> None:
    """One pack is missing: seen after all manifests were decoded."""
    (packs := sorted((folder / "destination/checkpoint-2").rglob("pack-*.tar")))[-1].unlink()
    assert len(packs) > 1
