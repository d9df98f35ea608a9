"""The layouts of the frameworks themselves, each written by the real library, found by an agent that nobody calls.

Beside what a program has left whole lies what a killed one would have left of it. DeepSpeed's layout is made by hand,
by the names that its engine gives: two ranks of it take too long to start.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.agent_process import AgentProcess, tree, wait_until
from tests.harness.bucket_view import BucketView
from tests.servers.server import Bucket

# They bound a hang: importing a framework alone takes half a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)
_PROGRAM_SECONDS = 300.0
_COMMIT_SECONDS = 120.0

ORBAX = """
import sys
from pathlib import Path
import jax.numpy as jnp
import orbax.checkpoint as ocp
directory = Path(sys.argv[1]).resolve()
with ocp.CheckpointManager(directory) as manager:
    for step in (10, 20):
        manager.save(step, args=ocp.args.StandardSave({"weights": jnp.full((1000,), float(step))}))
        manager.wait_until_finished()
"""

HUGGING_FACE = """
import sys
import torch
from transformers import Trainer, TrainingArguments

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": ((self.layer(x)[:, 0] - labels) ** 2).mean()}

data = [{"x": torch.randn(4), "labels": torch.zeros(())} for _ in range(64)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=20, save_steps=10, use_cpu=True, report_to=[], disable_tqdm=True
)
Trainer(model=Tiny(), args=arguments, train_dataset=data).train()
"""

ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
for step in (10, 20):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    accelerator.save_state(f"{sys.argv[1]}/checkpoint-{step}", safe_serialization=step == 10)
"""


@contextmanager
def watching(bucket: Bucket, tmp_path: Path, **settings: Any) -> Iterator[AgentProcess]:
    agent = AgentProcess(tmp_path / "volume", bucket.destination, endpoint_url=bucket.endpoint_url, **settings)
    with agent:
        yield agent


def run(program: str, agent: AgentProcess) -> None:
    line = [sys.executable, "-W", "ignore", "-c", program, str(agent.checkpoints)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=False)
    assert result.returncode == 0, result.stderr


def committed(agent: AgentProcess) -> list[str]:
    return sorted(line["name"] for line in agent.log("checkpoint.committed"))


def announced(agent: AgentProcess) -> list[str]:
    return sorted(line["name"] for line in agent.log("checkpoint.announced"))


def expect(agent: AgentProcess, *names: str) -> None:
    wait_until(lambda: committed(agent) == sorted(names), _COMMIT_SECONDS, f"{names} are committed")


def leave_half_written(agent: AgentProcess, whole: str, half: str, missing: Mapping[str, int | None]) -> Path:
    """A copy of a whole checkpoint, without these files, or with so many bytes of them."""
    target = agent.checkpoints / half
    # Under a name that is no candidate, for the watch must not see more of it than is meant.
    hidden = agent.checkpoints / f".{half}"
    shutil.copytree(agent.checkpoints / whole, hidden)
    for path, size_bytes in missing.items():
        if size_bytes is None:
            (hidden / path).unlink()
        else:
            with (hidden / path).open("r+b") as file:
                file.truncate(size_bytes)
    hidden.rename(target)
    return target


def said_incomplete(agent: AgentProcess, name: str) -> list[str]:
    return [line["why"] for line in agent.log("checkpoint_not_complete") if Path(line["path"]).name == name]


def expect_never(agent: AgentProcess, half: str, why: str) -> None:
    """The agent has judged it when nothing moved any more, and said why it is left alone."""
    wait_until(lambda: bool(said_incomplete(agent, half)), _COMMIT_SECONDS, f"{half} was judged")
    assert why in said_incomplete(agent, half)[-1]
    assert half not in announced(agent)


def restores(bucket: Bucket, tmp_path: Path, original: dict[str, bytes]) -> None:
    view = BucketView(bucket)
    assert all(row["problems"] == [] for row in view.verify())
    assert tree(view.restore(tmp_path / "restored")) == original


def test_orbax(rclone_bucket: Bucket, tmp_path: Path) -> None:
    with watching(rclone_bucket, tmp_path) as agent:
        run(ORBAX, agent)
        expect(agent, "10", "20")
        original = tree(agent.checkpoints / "20")
        half = leave_half_written(agent, "20", "30.orbax-checkpoint-tmp", {"_CHECKPOINT_METADATA": None})
        expect_never(agent, half.name, "temporary name")
        shutil.rmtree(half)
        restores(rclone_bucket, tmp_path, original)
        assert announced(agent) == ["10", "20"]


HALF_WRITTEN: dict[str, dict[str, int | None]] = {
    "trainer_state.json is not written": {"trainer_state.json": None},
    "rng_state": {"rng_state.pth": None},
    "trainer_state.json is cut short": {"trainer_state.json": 100},
    "optimizer.pt is cut short": {"optimizer.pt": 2000},
    "model.safetensors is cut short": {"model.safetensors": 90},
}


def test_hugging_face(rclone_bucket: Bucket, tmp_path: Path) -> None:
    with watching(rclone_bucket, tmp_path) as agent:
        run(HUGGING_FACE, agent)
        expect(agent, "checkpoint-10", "checkpoint-20")
        original = tree(agent.checkpoints / "checkpoint-20")
        halves = {why: f"checkpoint-{step}" for step, why in enumerate(HALF_WRITTEN, start=30)}
        for why, half in halves.items():
            leave_half_written(agent, "checkpoint-20", half, HALF_WRITTEN[why])
        for why, half in halves.items():
            expect_never(agent, half, why)
        restores(rclone_bucket, tmp_path, original)
        assert announced(agent) == ["checkpoint-10", "checkpoint-20"]


def test_accelerate(rclone_bucket: Bucket, tmp_path: Path) -> None:
    with watching(rclone_bucket, tmp_path, world_size=1) as agent:
        run(ACCELERATE, agent)
        expect(agent, "checkpoint-10", "checkpoint-20")
        restores(rclone_bucket, tmp_path, tree(agent.checkpoints / "checkpoint-20"))
        assert {"pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"} <= set(
            tree(agent.checkpoints / "checkpoint-20")
        )
        leave_half_written(agent, "checkpoint-10", "checkpoint-30", {"random_states_0.pkl": None})
        expect_never(agent, "checkpoint-30", "announce it")
        leave_half_written(agent, "checkpoint-20", "checkpoint-40", {"random_states_0.pkl": 700})
        expect_never(agent, "checkpoint-40", "random_states_0.pkl is cut short")
        leave_half_written(agent, "checkpoint-20", "checkpoint-50", {"optimizer.bin": 700})
        expect_never(agent, "checkpoint-50", "optimizer.bin is cut short")


def write_deepspeed(folder: Path, ranks: int, *, of: int = 2) -> None:
    """What ZeRO-3 ranks write, each its model states first; `latest` comes without waiting for anybody."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(of):
        torch.save({"module": torch.full((100,), rank)}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    for rank in range(ranks):
        path = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"state": torch.full((100,), rank)}, path)
    (folder.parent / "latest").write_text(folder.name)


def test_deepspeed(rclone_bucket: Bucket, tmp_path: Path) -> None:
    with watching(rclone_bucket, tmp_path, world_size=2) as agent:
        write_deepspeed(agent.checkpoints / "global_step10", 2)
        write_deepspeed(agent.checkpoints / "global_step20", 1)
        expect_never(agent, "global_step20", "1 of 2 ranks")
        write_deepspeed(agent.checkpoints / "global_step20", 2)
        expect(agent, "global_step10", "global_step20")
        restores(rclone_bucket, tmp_path, tree(agent.checkpoints / "global_step20"))


def test_one_pods_part_of_a_checkpoint_is_never_committed(rclone_bucket: Bucket, tmp_path: Path) -> None:
    """Each pod has a volume of its own, and what it shows is the same each time: two ranks, of four."""
    with watching(rclone_bucket, tmp_path) as agent:
        for step in (10, 20):
            write_deepspeed(agent.checkpoints / f"global_step{step}", 2)
            folder = agent.checkpoints / f"checkpoint-{step}"
            folder.mkdir()
            for rank in range(2):
                torch.save({}, folder / f"random_states_{rank}.pkl")
        for name in ("global_step10", "global_step20", "checkpoint-10", "checkpoint-20"):
            expect_never(agent, name, "set world_size")
        # It has looked at all of them again.
        torch.save({}, agent.checkpoints / "model-30.pt")
        expect(agent, "model-30.pt")
