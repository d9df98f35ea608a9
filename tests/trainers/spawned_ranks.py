"""Runs a trainer's own file, at `paced.py`'s pace, on two ranks that `torch.multiprocessing.spawn` starts.

    python tests/trainers/spawned_ranks.py <port> examples/x.py <its arguments>

What comes after `spawn` is only done by a program whose ranks have ended well: it prints "joined".
"""

import os
import runpy
import sys
from pathlib import Path

import torch.multiprocessing

RANKS = 2


def rank(number: int, port: str, words: list[str]) -> None:
    """As a program does it whose ranks no launcher has told who they are."""
    ranks = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    paced = str(Path(__file__).with_name("paced.py"))
    torch.multiprocessing.spawn(rank, args=(sys.argv[1], [paced, *sys.argv[2:]]), nprocs=RANKS)
    print("joined", flush=True)
