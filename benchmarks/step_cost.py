"""What a training step pays when nothing is asked: seconds per call, of each way to ask.

Each figure is the least of many batches of calls, on which the rest of the machine has no say. The gate of several
ranks is real, beside its thread, which looks into the store of torch.distributed meanwhile.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from keepstep import Checkpointer
from keepstep.framework_run import FrameworkRun
from keepstep.gate import RanksGate
from keepstep.gate.sigterm import Sigterm
from keepstep.ranks.rank_store import Ranks, RankStore
from keepstep.torch_loop import TorchLoop
from keepstep_api import names

CALLS: Final = 10_000
BATCHES: Final = 50


def measure(batches: int = BATCHES) -> dict[str, float]:
    """Way to ask -> seconds."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: _least(ask, batches) for name, ask in _ways(Path(folder))}


def _least(ask: Callable[[int], object], batches: int) -> float:
    steps = itertools.count(1)
    least = float("inf")
    for _ in range(batches):
        batch = list(itertools.islice(steps, CALLS))
        began_at = time.thread_time()
        for step in batch:
            ask(step)
        least = min(least, (time.thread_time() - began_at) / CALLS)
    return least


def _ways(folder: Path) -> Iterator[tuple[str, Callable[[int], object]]]:
    checkpointer = Checkpointer(folder / "plain")
    yield "Checkpointer.should_save", lambda step: checkpointer.should_save(step, 0)
    checkpointer.close()
    with _framework_run(folder) as run:
        yield "FrameworkRun.action_at", run.action_at
    with _ranks_gate(folder) as gate:
        yield "the gate of two ranks", gate.at
    model = torch.nn.Linear(1, 1)
    loop = TorchLoop(model, torch.optim.SGD(model.parameters()), checkpointer=Checkpointer(folder / "loop"))
    yield "TorchLoop.step", lambda step: loop.step(every=0)
    loop.finish()


@contextmanager
def _framework_run(folder: Path) -> Iterator[FrameworkRun]:
    before = os.environ.get(names.ENV_VOLUME)
    os.environ[names.ENV_VOLUME] = str(folder / "framework")
    try:
        run = FrameworkRun()
    finally:
        if before is None:
            del os.environ[names.ENV_VOLUME]
        else:
            os.environ[names.ENV_VOLUME] = before
    yield run
    run.close()


@contextmanager
def _ranks_gate(folder: Path) -> Iterator[RanksGate]:
    store = dist.HashStore()
    with ExitStack() as stack:
        gates = []
        for rank in range(2):
            sigterm = Sigterm()
            stack.callback(sigterm.close)
            ranks = Ranks(rank=rank, world_size=2)
            gates.append(RanksGate(folder / f"signal-{rank}", sigterm, RankStore(store, ranks)))
            stack.callback(gates[-1].close)
        yield gates[0]
