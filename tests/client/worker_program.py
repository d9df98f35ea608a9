"""A program with worker processes that heeds SIGTERM itself, for tests/client/test_worker_processes.py.

Prints one line per event: `children PID…` when they are at work, `stopping` when SIGTERM arrived, `done` when all was
delivered after it. With --install it calls `worker_processes.install` as a Checkpointer does; autoload needs nothing.
"""

import argparse
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

PARSER = argparse.ArgumentParser()
PARSER.add_argument("work", choices=["load", "write"])
PARSER.add_argument("--install", choices=["before-torch", "after-torch"])
PARSER.add_argument("--method", default="fork")
PARSER.add_argument("--busy", action="store_true", help="Workers are stuck in a sample after the first two.")
PARSER.add_argument("--early", action="store_true", help="SIGTERM is to come while the writer process is importing.")
PARSER.add_argument("--folder", type=Path)
ARGUMENTS = PARSER.parse_args() if __name__ in ("__main__", "__mp_main__") else PARSER.parse_args(["load"])

if __name__ == "__mp_main__" and ARGUMENTS.early:
    print("children", os.getpid(), flush=True)
    while not (ARGUMENTS.folder / "stopping").exists():
        time.sleep(0.01)

if ARGUMENTS.install == "before-torch":
    from keepstep.workers import worker_processes

    worker_processes.install()

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

if ARGUMENTS.install == "after-torch":
    from keepstep.workers import worker_processes

    worker_processes.install()
    worker_processes.install()

stopping: list[int] = []


def say(*words: object) -> None:
    print(*words, flush=True)


def wait_for(condition: Any) -> None:
    while not condition():
        time.sleep(0.01)


class Numbers(Dataset[int]):
    """0, 1, 2, … and with `busy` nothing more after 0 and 1."""

    def __init__(self, busy: bool) -> None:
        self._busy = busy

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if self._busy and index > 1:
            time.sleep(3600)
        return index


# Nobody else imports it, which takes as long as the rest of torch.
if ARGUMENTS.work == "write":
    import torch.distributed
    import torch.distributed.checkpoint as dcp

    class PatientWriter(dcp.FileSystemWriter):
        """Writes nothing before the file `go` exists."""

        def write_data(self, *arguments: Any, **named: Any) -> Any:
            (self.checkpoint_id.parent / "writing").write_text(str(os.getpid()))  # type: ignore[union-attr]
            wait_for((self.checkpoint_id.parent / "go").exists)  # type: ignore[union-attr]
            return super().write_data(*arguments, **named)


def load(method: str, busy: bool) -> None:
    loader = DataLoader(
        Numbers(busy), batch_size=1, num_workers=2, prefetch_factor=1, multiprocessing_context=method, shuffle=False
    )
    batches = iter(loader)
    # One of each worker: both are at work.
    assert [next(batches).item() for _ in range(2)] == [0, 1]
    say("children", *(worker.pid for worker in batches._workers))  # type: ignore[attr-defined]
    wait_for(lambda: stopping)
    say("stopping")
    # More than the workers made ahead.
    assert [next(batches).item() for _ in range(20)] == list(range(2, 22))
    workers = list(batches._workers)  # type: ignore[attr-defined]
    del batches
    assert not any(worker.is_alive() for worker in workers)


def write(folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    tensors = {"weight": torch.arange(1000)}
    for name in ("first", "second"):
        if name == "second":
            (folder / "writing").unlink()
            if not ARGUMENTS.early:
                (folder / "go").unlink()
        future = dcp.async_save(
            tensors,
            storage_writer=PatientWriter(folder / name),
            async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
        )
        if name == "first":
            (folder / "go").touch()
            if ARGUMENTS.early:
                wait_for(lambda: stopping)
                (folder / "stopping").touch()
        elif not ARGUMENTS.early:
            # A file exists before its text does.
            wait_for(lambda: (folder / "writing").exists() and (folder / "writing").read_text())
            say("children", (folder / "writing").read_text())
            wait_for(lambda: stopping)
            say("stopping")
            (folder / "go").touch()
        assert isinstance(future, Future)
        future.result()
    loaded = {"weight": torch.zeros(1000, dtype=torch.int64)}
    dcp.load(loaded, checkpoint_id=folder / "second")
    assert torch.equal(loaded["weight"], tensors["weight"])
    torch.distributed.destroy_process_group()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    if ARGUMENTS.work == "load":
        load(ARGUMENTS.method, ARGUMENTS.busy)
    else:
        write(ARGUMENTS.folder)
    say("done")


if __name__ == "__main__":
    main()
