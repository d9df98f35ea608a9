"""Trainers that write each checkpoint over the last one, while that is still being uploaded: never a mix of the two.

Each writer writes the way its framework does. Whatever the moment: what is committed restores to exactly what was
announced, or the save fails and says why; and from the second save on, all are copied and none fails.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.harness.agent_process import AgentProcess, tree, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.lanes import nightly
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from keepstep_api.v1 import agent_pb2

MIB = 1024 * 1024
_FLOATS = 400_000
# All of a save of some megabytes takes seconds; the first file of it less.
_BYTES_PER_SECOND = MIB
# What is written: a file, or a folder, always the same one.
_FILE = "last.pt"


def _state(generation: int) -> dict[str, torch.Tensor]:
    return {f"layer{index}": torch.full((_FLOATS,), float(generation * 10 + index)) for index in range(4)}


def torch_save(path: Path, generation: int) -> None:
    """Accelerate's .bin, DeepSpeed's .pt and everybody's own: the same name, truncated and written anew."""
    path.mkdir(exist_ok=True)
    for name, tensor in _state(generation).items():
        torch.save(tensor, path / f"{name}_optim_states.pt")
        torch.save({"step": generation}, path / f"{name}.bin")


def single_file(path: Path, generation: int) -> None:
    torch.save(_state(generation), path)


def distributed(path: Path, generation: int) -> None:
    """The same id again: data in place, `.metadata` by rename."""
    dcp.save(_state(generation), checkpoint_id=path, no_dist=True)


def safetensors(path: Path, generation: int) -> None:
    path.mkdir(exist_ok=True)
    for name, tensor in _state(generation).items():
        save_file({name: tensor}, path / f"{name}.safetensors")


def copied_in_place(path: Path, generation: int) -> None:
    """As Lightning does with a TMPDIR on another filesystem: gathered elsewhere, then copied, with its times."""
    gathered = path.with_name(f".gathered-{path.name}")
    torch.save(_state(generation), gathered)
    os.utime(gathered, (generation, generation))
    shutil.copy2(gathered, path)
    gathered.unlink()


def bytes_in_place(path: Path, generation: int) -> None:
    """The worst: neither truncated nor longer."""
    path.mkdir(exist_ok=True)
    for name, tensor in _state(generation).items():
        with (path / name).open("r+b" if (path / name).exists() else "wb") as file:
            file.write(tensor.numpy().tobytes())


Writer = Callable[[Path, int], None]
WRITERS: list[Writer] = [torch_save, distributed, bytes_in_place]
WRITERS_AT_NIGHT: list[Writer] = [single_file, safetensors, copied_in_place]


class Bytes:
    """What was announced, and what the bucket has of it."""

    def __init__(self, bucket: Bucket) -> None:
        self.view = BucketView(bucket)
        self.announced: dict[str, dict[str, bytes]] = {}

    def announce(self, agent: AgentProcess, path: Path, step: int) -> str:
        save = f"attempt-{step}"
        content = _content(path)
        agent.announce(path, step, save=save, name=f"checkpoint-{step}")
        self.announced[save] = content
        return save

    def stored(self, save: str, step: int) -> dict[str, bytes]:
        prefix = f"checkpoint-{step}/{save}/"
        return {
            key.removeprefix(prefix): hashlib.sha256(self.view.read(key)).digest()
            for key in self.view.keys(prefix)
            if "/.keepstep/" not in key
        }


def _content(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return tree(path)
    return {_FILE: hashlib.sha256(path.read_bytes()).digest()}


def outcome(agent: AgentProcess, save: str) -> agent_pb2.Checkpoint:
    def ended() -> bool:
        return one().phase in (
            agent_pb2.PHASE_COMMITTED,
            agent_pb2.PHASE_RELEASED,
            agent_pb2.PHASE_FAILED,
        )

    def one() -> agent_pb2.Checkpoint:
        return next(found for found in agent.status().checkpoints if found.save == save)

    wait_until(ended, HANG_SECONDS, f"{save} has come to its end")
    return one()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
@pytest.mark.parametrize("writer", [*WRITERS, *nightly(*WRITERS_AT_NIGHT)], ids=lambda writer: writer.__name__)
def test_what_is_overwritten_during_its_upload_is_never_committed_as_a_mix(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path, writer: Writer
) -> None:
    agent = AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        endpoint_url=fault_proxy.endpoint_url,
        part_size_bytes=5 * MIB,
        max_concurrency=1,
        watch="off",
    )
    known = Bytes(rclone_bucket)
    with agent:
        source = agent.checkpoints / _FILE
        # An earlier one, which must be there whatever comes.
        before = agent.checkpoints / "before.pt"
        torch_save(before, 9)
        agent.wait_committed(known.announce(agent, before, 1))
        fault_proxy.throttle(_BYTES_PER_SECOND)
        saves = {1: "attempt-1"}
        for step in (2, 3, 4):
            writer(source, step)
            saves[step] = known.announce(agent, source, step)
            if step < 4:
                wait_until(partial(_is_on_the_way, agent, saves[step]), HANG_SECONDS, "it is being sent")
        fault_proxy.throttle(0)
        ends = {step: outcome(agent, save) for step, save in saves.items()}
    failed = [step for step, end in ends.items() if end.phase == agent_pb2.PHASE_FAILED]
    # The first one is linked, for nobody knows the trainer yet.
    assert set(failed) <= {2}, [ends[step].reason for step in failed]
    for step in failed:
        assert "in place" in ends[step].reason or "was changed after it was announced" in ends[step].reason
        assert not any(saves[step] in key for key in known.view.markers())
    for step in ends.keys() - set(failed):
        assert known.stored(saves[step], step) == known.announced[saves[step]], f"step {step} is another one"
    assert [row["problems"] for row in known.view.verify()] == [[]] * (len(ends) - len(failed))
    assert _content(known.view.restore(tmp_path / "restored")) == known.announced[saves[4]]


def _is_stored(view: BucketView, generations: dict[bytes, int], generation: int) -> bool:
    """Whether a committed snapshot has sent the files of that generation."""
    saves = [marker.rpartition("/")[2].split(".")[1] for marker in view.keys(".keepstep/snapshots/")]
    keys = [key for save in saves for key in view.keys(f"node-0/{save}/") if key.endswith("model.pt")]
    return any(generations.get(hashlib.sha256(view.read(key)).digest()) == generation for key in keys)


def _has_found(agent: AgentProcess, known: int) -> bool:
    return len(agent.log("snapshot.taken")) > known


def _is_on_the_way(agent: AgentProcess, save: str) -> bool:
    """A part of it is stored, or about to be."""
    one = next(found for found in agent.status().checkpoints if found.save == save)
    return one.phase != agent_pb2.PHASE_STAGED


def test_the_one_before_remains_when_an_overwritten_one_was_the_last(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    agent = AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        endpoint_url=fault_proxy.endpoint_url,
        part_size_bytes=5 * MIB,
        watch="off",
    )
    known = Bytes(rclone_bucket)
    with agent:
        source = agent.checkpoints / _FILE
        single_file(source, 1)
        agent.wait_committed(known.announce(agent, source, 1))
        shutil.move(source, agent.checkpoints / "first.pt")
        fault_proxy.throttle(_BYTES_PER_SECOND)
        single_file(source, 2)
        save = known.announce(agent, source, 2)
        wait_until(lambda: _is_on_the_way(agent, save), HANG_SECONDS, "it is being sent")
        # The job is killed in the middle of the next one.
        with source.open("r+b") as file:
            file.truncate(1000)
        fault_proxy.throttle(0)
        with pytest.raises(grpc.RpcError) as failure:
            agent.wait_committed(save)
        assert "changed after it was announced" in str(failure.value.details())
        assert outcome(agent, save).phase == agent_pb2.PHASE_FAILED
    assert _content(known.view.restore(tmp_path / "restored")) == known.announced["attempt-1"]


def test_a_snapshot_of_files_that_are_being_overwritten_is_of_one_save_or_the_other(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """Nobody waits for the agent here, so it may look at any moment."""
    fault_proxy.throttle(4 * MIB)
    generations: dict[bytes, int] = {}
    names = ["rng_state.pth", "optimizer.pt", "model.pt"]
    view = BucketView(rclone_bucket)
    with AgentProcess(
        tmp_path / "volume", rclone_bucket.destination, endpoint_url=fault_proxy.endpoint_url, part_size_bytes=5 * MIB
    ) as agent:
        source = agent.checkpoints / "checkpoint-5"
        source.mkdir()
        deadline = time.monotonic() + 60
        for generation in range(1, 100):
            for name in names:
                torch.save(torch.full((_FLOATS,), float(generation)), source / name)
                generations[hashlib.sha256((source / name).read_bytes()).digest()] = generation
            (source / "trainer_state.json").write_text(f'{{"global_step": {generation}}}')
            # It pauses for as long as it takes until a snapshot is taken, and writes on just then.
            wait_until(partial(_has_found, agent, len(agent.log("snapshot.taken"))), HANG_SECONDS, "it was found")
            if generation >= 4 or time.monotonic() > deadline:
                break
        last = generation
        wait_until(partial(_is_stored, view, generations, last), HANG_SECONDS, "the last one is committed")
    for marker in view.keys(".keepstep/snapshots/"):
        save = marker.rpartition("/")[2].split(".")[1]
        stored = {
            key.rpartition("/")[2]: hashlib.sha256(view.read(key)).digest()
            for key in view.keys(f"node-0/{save}/")
            if key.rpartition("/")[2] in names
        }
        assert len({generations[digest] for digest in stored.values()}) == 1, stored
    assert all(row["problems"] == [] for row in view.verify())
