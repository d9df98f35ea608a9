"""A loop that trains a small transformer on one core and saves nothing.

    python -m benchmarks.training_steps WARM_SECONDS SECONDS

After WARM_SECONDS it prints `begin`, and SECONDS later `end STEPS SECONDS CPU_SECONDS`. Then it waits until its input
ends, so that whoever measures it can look at the processes beside it.
"""

import sys
import time

import torch
from torch import nn


def main() -> None:
    warm_seconds, seconds = float(sys.argv[1]), float(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1000, (8, 33))

    def step() -> None:
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def steps_of(length: float) -> tuple[int, float, float]:
        began, cpu = time.perf_counter(), time.process_time()
        count = 0
        while time.perf_counter() - began < length:
            step()
            count += 1
        return count, time.perf_counter() - began, time.process_time() - cpu

    steps_of(warm_seconds)
    print("begin", flush=True)
    print("end", *steps_of(seconds), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
