"""A Lightning Fabric loop that saves to a directory of its own, which nobody stores.

fabric_program.py OUTPUT
"""

import itertools
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
for step in itertools.count(1):
    fabric.backward(model(torch.randn(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    fabric.save(Path(sys.argv[1], "newest.ckpt"), {"model": model, "optimizer": optimizer, "step": step})
    print(f"step={step}", flush=True)
