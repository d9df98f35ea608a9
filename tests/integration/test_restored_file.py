"""A checkpoint that is one file is that file again after a restore, for whoever reads it: found, or announced.

On the same paths: the volume is wiped in between, as where a pod starts anew.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bucket_view import BucketView
from tests.servers.server import Bucket

from mooring_api import names

# They bound a hang: importing a framework alone takes half a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)
_PROGRAM_SECONDS = 300.0
_COMMIT_SECONDS = 120.0

LIGHTNING = """
import json, os, sys, warnings
from pathlib import Path
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
import mooring

warnings.simplefilter("ignore")
directory, chosen, steps = Path(os.environ["MOORING_CHECKPOINT_DIRECTORY"]), sys.argv[1] or None, int(sys.argv[2])

class Tiny(pl.LightningModule):
    trained = []
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        self.trained.append(self.global_step + 1)
        return self.layer(batch[0]).square().mean()
    def test_step(self, batch, index):
        self.log("test", self.layer(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 4)))

name = "last" if chosen == "last" else "{step}"
trainer = pl.Trainer(
    max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(directory, filename=name, every_n_train_steps=4)],
)
mooring.protect(trainer)
model = Tiny()
if chosen == "best":
    trainer.fit(model, loader())
    trainer.test(model, loader(), ckpt_path="best", verbose=False)
else:
    trainer.fit(model, loader(), ckpt_path=chosen)
print(json.dumps([model.trained, trainer.ckpt_path]))
"""


def test_a_file_that_the_watch_found_is_that_file_again_and_not_taken_for_news(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    volume, view = tmp_path / "volume", BucketView(rclone_bucket)
    with AgentProcess(volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url) as agent:
        saved = agent.checkpoints / "epoch=1-step=10.ckpt"
        torch.save({"step": 10}, saved)
        wait_until(lambda: bool(agent.log("checkpoint.committed")), _COMMIT_SECONDS, "it is committed")
    original = saved.read_bytes()
    shutil.rmtree(volume)
    assert view.restore(volume) == saved
    assert saved.read_bytes() == original
    assert [row["problems"] for row in view.verify()] == [[]]
    with AgentProcess(volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url) as agent:
        torch.save({"step": 20}, agent.checkpoints / "epoch=2-step=20.ckpt")
        wait_until(lambda: len(view.markers()) == 2, _COMMIT_SECONDS, "the next one is committed")
        assert saved.name not in {line["name"] for line in agent.log("checkpoint.announced")[1:]}


@pytest.mark.parametrize("readers", [["best", ""], ["last"]], ids=["a step", "last"])
def test_lightning_finds_its_file_where_it_was(readers: list[str], rclone_bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    volume, view = tmp_path / "volume", BucketView(rclone_bucket)
    with AgentProcess(volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url) as agent:
        assert train(agent, "last" if readers == ["last"] else "", 4)[0] == [1, 2, 3, 4]
        wait_until(lambda: bool(agent.log("checkpoint.committed")), _COMMIT_SECONDS, "it is committed")
    (saved,) = agent.checkpoints.iterdir()
    shutil.rmtree(volume)
    assert view.restore(volume) == saved
    with AgentProcess(volume, rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url) as agent:
        for chosen in readers:
            trained, loaded = train(agent, chosen, 4 if chosen == "best" else 6)
            assert trained == ([] if chosen == "best" else [5, 6])
            assert loaded == str(saved)


def train(agent: AgentProcess, chosen: str, steps: int) -> tuple[list[int], str]:
    """The steps that it trained, and the checkpoint that was loaded last."""
    result = subprocess.run(
        [sys.executable, "-c", LIGHTNING, chosen, str(steps)],
        env={**os.environ, names.ENV_VOLUME: str(agent.volume), names.ENV_CHECKPOINT_DIRECTORY: str(agent.checkpoints)},
        capture_output=True,
        text=True,
        timeout=_PROGRAM_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    trained, loaded = json.loads(result.stdout.splitlines()[-1])
    return trained, loaded
