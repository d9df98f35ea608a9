"""Lightning with all its defaults, in WORK: three epochs of five steps. Dies after CRASH_AT steps; prints each step."""

import os

import lightning.pytorch as pl
import torch

import keepstep
from keepstep.framework_run import FrameworkRun


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.global_step == int(os.environ["CRASH_AT"]):
            # Its last checkpoint is announced by then.
            FrameworkRun.current().wait()
            os._exit(7)
        print(f"step={self.global_step + 1}", flush=True)
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


os.chdir(os.environ["WORK"])
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(5, 4)), batch_size=1)
trainer = keepstep.protect(pl.Trainer(accelerator="cpu", devices=1, max_epochs=3, enable_progress_bar=False))
trainer.fit(Model(), data)
