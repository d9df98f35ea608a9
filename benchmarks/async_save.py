"""How long a checkpoint of 1 GiB holds up training, and how much slower training is while it is written.

    python -m benchmarks.async_save

Every way to save gets the same state in turn, so that what else the machine does meets all of them alike. Writes
benchmarks/ASYNC_SAVE.md and the plot beside it, and exits 1 if a goal is missed. Needs 8 GiB of memory and 3 GiB of
free disk below the temporary directory.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from benchmarks.async_save_report import OURS, Way, plot, report
from safetensors.torch import save_file
from tests.servers.process import free_port
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks import step_cost
from keepstep import Checkpointer
from keepstep.torch_loop import TorchLoop

TENSORS: Final = 16
TENSOR_SIDE: Final = 4096
"""16 tensors of 64 MiB."""
ROUNDS: Final = 8


class Big(torch.nn.Module):
    """1 GiB of fp32."""

    def __init__(self) -> None:
        super().__init__()
        sides = (TENSOR_SIDE, TENSOR_SIDE)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(sides)) for _ in range(TENSORS))

    def change(self) -> None:
        """As an optimizer step does."""
        with torch.no_grad():
            for weight in self.weights:
                weight.add_(1.0)


class SmallSteps:
    """Training steps of many small operations: Python is busy, as it is when a GPU computes."""

    def __init__(self) -> None:
        layers = [torch.nn.Linear(64, 64) for _ in range(8)]
        self._model = torch.nn.Sequential(*layers)
        self._inputs = torch.randn(8, 64)

    def rate(self, goes_on: Callable[[], bool]) -> float | None:
        """Steps per second while it goes on; None if that is too short to tell."""
        steps, began_at = 0, time.perf_counter()
        while goes_on():
            self._model(self._inputs).sum().backward()
            steps += 1
        seconds = time.perf_counter() - began_at
        return steps / seconds if seconds > 0.1 else None


def main() -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=0, world_size=1)
    model, small = Big(), SmallSteps()
    with tempfile.TemporaryDirectory(prefix="async-save-") as folder:
        ours = Ours(model, Path(folder) / "ours")
        ways = [*torch_ways(model), Way(OURS, ours.save)]
        alone = statistics.median(small.rate(_for_seconds(1.0)) or 0.0 for _ in range(3))
        for number in range(ROUNDS):
            for way in ways:
                model.change()
                one_round(way, Path(folder) / f"{number}", small, alone)
        ours.loop.finish()
    dist.destroy_process_group()
    costs = step_cost.measure()
    plot(ways)
    return report(ways, costs, first_step_seconds=ours.first_step_seconds, rounds=ROUNDS)


def torch_ways(model: Big) -> list[Way]:
    def state() -> dict[str, Any]:
        return {"model": model.state_dict()}

    def asynchronous(**options: Any) -> Callable[[Path], "Future[Any] | None"]:
        return lambda path: dcp.async_save(state(), checkpoint_id=path, **options)  # type: ignore[return-value]

    process = AsyncCheckpointerType.PROCESS
    private = DefaultStager(StagingOptions(False, False, False, False))
    shared = DefaultStager(StagingOptions(False, True, False, False))
    return [
        Way("torch.save", lambda path: torch.save(state(), path)),
        Way("safetensors", lambda path: save_file(model.state_dict(), path)),
        Way("dcp.save", lambda path: dcp.save(state(), checkpoint_id=path) and None),
        Way("dcp.async_save, thread", asynchronous()),
        Way("dcp.async_save, process", asynchronous(async_checkpointer_type=process)),
        Way("dcp.async_save, thread, reused stager", asynchronous(async_stager=private)),
        Way(
            "dcp.async_save, process, reused shared stager",
            asynchronous(async_checkpointer_type=process, async_stager=shared),
        ),
    ]


class Ours:
    """The whole call that a loop makes at the end of a step, as a loop makes it."""

    def __init__(self, model: Big, directory: Path) -> None:
        self._checkpointer = Checkpointer(directory)
        self.loop = TorchLoop(model, torch.optim.SGD(model.parameters()), checkpointer=self._checkpointer)
        began_at = time.perf_counter()
        self.loop.step(every=0)
        self.first_step_seconds = time.perf_counter() - began_at
        """The memory of the copy is made in it."""

    def save(self, _: Path) -> "Future[Any]":
        self.loop.step(every=1)
        return _Saving(self._checkpointer)


class _Saving(Future[Any]):
    """What TorchLoop writes, as the others show it."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        super().__init__()
        self._checkpointer = checkpointer

    def done(self) -> bool:
        last = self._checkpointer._writer._last
        return last is None or last.done()

    def result(self, timeout: float | None = None) -> None:
        self._checkpointer.wait()


def one_round(way: Way, path: Path, small: SmallSteps, alone: float) -> None:
    began_at = time.perf_counter()
    written = way.save(path)
    way.stalls.append(time.perf_counter() - began_at)
    if written is not None:
        rate = small.rate(lambda: not written.done())
        written.result()
        if rate is not None:
            way.rates.append(rate / alone)
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def _for_seconds(seconds: float) -> Callable[[], bool]:
    ends_at = time.perf_counter() + seconds
    return lambda: time.perf_counter() < ends_at


if __name__ == "__main__":
    sys.exit(main())
